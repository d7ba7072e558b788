"""Settings for fuzzing, drawn from the schema itself: most values keep their field's rules, so that a good share of the configs is valid
and goes further than the first check. A setting that is added to the schema is drawn too, without a line here.
"""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.config.fields import sections
from groupwise.config.schema import Config
from groupwise.planner import KNOWN_SHAPES

__all__ = ["keeping_the_rules"]

MOST = 4096
"""For whole numbers without an upper bound of their own."""
CHOSEN: dict[str, st.SearchStrategy[Any]] = {
    "model.name": st.sampled_from(["TINY", "TINY", "TINY", *sorted(KNOWN_SHAPES)]),
    "model.revision": st.none(),
    "model.max_memory": st.dictionaries(st.one_of(st.integers(0, 7), st.just("cpu")), st.just("20GiB"), max_size=3),
    "data.source": st.sampled_from(["SUMS", "SUMS", "SUMS", "arithmetic", "gsm8k", "missing.jsonl"]),
    "data.eval_source": st.sampled_from([None, "SUMS"]),
    "data.eval_split": st.none(),
    "data.folder": st.none(),
    "data.arithmetic.problems": st.integers(1, 40),
    "rollout.max_completion_tokens": st.integers(1, 300),
    "evaluation.max_completion_tokens": st.one_of(st.none(), st.integers(1, 300)),
    "algorithm.advantage.settings": st.just({}),
    "algorithm.loss.settings": st.just({}),
    "algorithm.value.critic": st.sampled_from(["shared", "copy", "TINY"]),
    "model.device": st.sampled_from(["auto", "cpu", "cuda:1", "tpu"]),
    "output.trackers": st.lists(st.sampled_from(["jsonl", "tensorboard"]), max_size=2),
    "rollout.prompts_per_step": st.integers(1, 64),
    "rollout.completions_per_prompt": st.integers(2, 64),
}
"""Where the type says too little: names that exist (TINY and SUMS stand for a model and a file of the case's folder), nothing that
asks the network, and no run that is far larger than any."""
FUNCTIONS = [*["correctness", "format", "length", "boxed_format", "strict_xml"] * 3, "nothing_of_that_name"]


def keeping_the_rules() -> st.SearchStrategy[dict[str, Any]]:
    """A mapping in the shape of the YAML, with some of the settings of some sections."""
    fields = [(path, info) for path, info in _leaves(Config) if path != "rewards.functions"]
    one = st.sampled_from(fields).flatmap(lambda field: st.tuples(st.just(field[0]), _value(*field)))
    functions = st.lists(_function(), min_size=1, max_size=3).map(lambda entries: ("rewards.functions", entries))
    flat = st.lists(st.one_of(one, one, one, one, functions), max_size=6)
    home = {"model.name": "TINY", "data.source": "SUMS", "data.holdout": 4, "rollout.max_completion_tokens": 8}
    return flat.map(lambda pairs: _nested({**home, **dict(pairs)}))


def _function() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"function": st.sampled_from(FUNCTIONS)},
        optional={
            "weight": st.floats(-10, 10),
            "scope": st.sampled_from(["completion", "group", "batch", None]),
            "normalise": st.sampled_from(["none", "std", "mean_std"]),
            "clip": st.tuples(st.floats(-5, 0), st.floats(0.1, 5)).map(list),
            "arguments": st.one_of(
                st.just({}), st.dictionaries(st.sampled_from(["score", "target"]), st.integers(-3, 300), max_size=1)
            ),
        },
    )


def _leaves(section: type[BaseModel], path: str = "") -> list[tuple[str, FieldInfo]]:
    found = []
    for name, info in section.model_fields.items():
        classes = sections().get(f"{path}{name}", ())
        if len(classes) == 1:
            found += _leaves(classes[0], f"{path}{name}.")
        else:
            found.append((f"{path}{name}", info))
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _value(path: str, info: FieldInfo) -> st.SearchStrategy[Any]:
    if path in CHOSEN:
        return CHOSEN[path]
    if path in sections():
        return st.one_of([_of_type(path, kind) for kind in sections()[path]])
    return st.one_of([_of(kind, info) for kind in _options(info.annotation)])


def _of_type(path: str, kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """A section that comes in several types, as one of them."""
    fields = {name: _value(f"{path}.{name}", info) for name, info in kind.model_fields.items()}
    return st.fixed_dictionaries({"type": fields.pop("type")}, optional=fields)


def _of(kind: Any, info: FieldInfo) -> st.SearchStrategy[Any]:
    bounds = {key: getattr(rule, key) for rule in info.metadata for key in ("ge", "gt", "le", "lt") if hasattr(rule, key)}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if kind is type(None):
        return st.none()
    if kind is Any:
        return st.one_of(st.booleans(), st.integers(0, MOST), st.text(max_size=12))
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = 0 if low is None else low + ("gt" in bounds)
        return st.one_of(st.integers(low, min(low + 8, high or MOST)), st.integers(low, high or MOST))
    if kind is float:
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds, allow_nan=False, allow_infinity=False)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is list:
        return st.lists(_of(get_args(kind)[0], FieldInfo()), min_size=1, max_size=3)
    if get_origin(kind) is dict:
        keys, values = (st.one_of([_of(inner, FieldInfo()) for inner in _options(one)]) for one in get_args(kind))
        return st.dictionaries(keys, values, max_size=2)
    if get_origin(kind) is tuple:
        return st.tuples(*(st.floats(0, 1, exclude_max=True) for _ in get_args(kind))).map(list)
    assert kind is str, f"no values are known for {kind}"
    return st.text(max_size=12)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, value in flat.items():
        place, names = out, path.split(".")
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = value
    return out

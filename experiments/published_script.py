"""A published GRPO script beside ours: where do their curves differ, and why?

    python -m experiments.published_script --text FILE --model FOLDER --data FILE    # FILE: the page as text; GSM8K's train.jsonl
    python -m experiments.published_script --redraw

The page is that of the one-card reproduction whose settings ``tutorial-1.5b`` has. Its code is cut out of the text and run as it stands,
but for what follows; nothing of it is kept here.

- Model, output folder, device (the CPU) and the numbers of ``training_config`` are this command's; accumulation is 1, as in its best run.
- Rows come from ``--data`` in place of ``load_from_disk``; wandb is a recorder; the script is left where it calls ``wandb.finish``.
- While it samples, gradient checkpointing is off: with it on, transformers 5 gives the layers no keys and values and yet one token at a
  time, and the script would sample from a model that sees the last token alone.

Beside each of its losses stands ours of the very same completions, log-probabilities and rewards: what differs there is the formula. Then
``tutorial-1.5b`` runs with the same numbers on the problems that the script drew, in its order: what differs there besides is sampling,
rounding and chance. Each side is a process of its own, and is kept when it has finished.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.common import FIGURES, ROOT, Experiment, describe, environment, markdown_table, publish, read_numbers

__all__ = ["EXPERIMENT", "compare_sides", "draw", "extract", "main", "report", "run_ours", "run_script"]

NEEDED = ("prepare_dataset", "combined_reward", "generate_completions", "generate_rollout_data", "compute_log_probs", "grpo_loss",
          "train_with_grpo")  # fmt: skip
"""Functions that are watched or changed."""
REPLACED = {"wandb", "datasets", "pdb"}
"""Modules that are not imported."""
CURVES = {"reward": "reward/mean", "loss": "policy/loss", "tokens": "completions/tokens_mean", "stopped": "completions/stop_rate"}
"""What is compared, and what ours calls it."""


class _FinishedError(Exception):
    """The script has made its last step."""


def extract(text: str) -> str:
    """The Python code in a page's text: from its first import to the end of its ``if __name__ == "__main__":`` block.

    Raises SystemExit that says what is missing where the code is not whole.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if re.match(r"(import|from) \w", line)), None)
    if begin is None:
        raise SystemExit("the text has no line that begins with import or from: it holds no Python code")
    main = next((i for i in range(begin, len(lines)) if lines[i].startswith("if __name__ ==")), None)
    if main is None:
        raise SystemExit(
            'the code has no block if __name__ == "__main__": without it nothing says what to train with which numbers'
        )
    end = next((i for i in range(main + 1, len(lines)) if lines[i].strip() and not lines[i][0].isspace()), len(lines))
    code = "\n".join(lines[begin:end]).rstrip() + "\n"
    numbered = lines[begin - 1].strip() if begin else ""
    if numbered.isdecimal() and int(numbered) != code.count("\n"):
        raise SystemExit(f"the page numbers {numbered} lines of code, but the text has {code.count(chr(10))}: some are missing")
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise SystemExit(f"line {error.lineno} of the code is no Python ({error.msg}): the text lost something there") from error
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if lost := [name for name in NEEDED if name not in defined]:
        raise SystemExit(f"the code defines no {' and no '.join(lost)}: the text is not that of the script, or not all of it")
    return code


class _Patch(ast.NodeTransformer):
    """Puts this command's names and numbers in the place of the script's."""

    def __init__(self, names: Mapping[str, str], numbers: Mapping[str, int]) -> None:
        self.names, self.numbers = names, numbers
        self.left = {*names, *numbers}

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        node.names = [alias for alias in node.names if alias.name.partition(".")[0] not in REPLACED]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if (node.module or "").partition(".")[0] in REPLACED else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self.names and isinstance(node.value, ast.Constant):
            self.left.discard(target.id)
            node.value = ast.Constant(self.names[target.id])
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "device_map":
            node.value = ast.Constant("cpu")
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        for place, key in enumerate(node.keys):
            name = str(key.value) if isinstance(key, ast.Constant) else ""
            if name in self.numbers:
                self.left.discard(name)
                node.values[place] = ast.Constant(self.numbers[name])
        return self.generic_visit(node)


def run_script(given: Mapping[str, Any]) -> dict[str, Any]:
    """The script of ``given["text"]`` for ``given["steps"]`` steps: its curves, our losses of its batches, and the rows it drew."""
    tree = ast.parse(extract(Path(given["text"]).read_text(encoding="utf-8")))
    main = tree.body.pop(
        next(i for i, node in enumerate(tree.body) if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
    )
    numbers = {
        "num_steps": given["steps"], "batch_size": given["prompts"], "num_generations": given["completions"],
        "max_completion_length": given["tokens"], "gradient_accumulation_steps": 1, "num_iterations": 1, "mu": 1,
    }  # fmt: skip
    patch = _Patch({"model_name": given["model"], "output_dir": str(Path(given["folder"]) / "output")}, numbers)
    parts = [ast.fix_missing_locations(patch.visit(part)) for part in (tree, ast.Module(main.body, []))]  # type: ignore[attr-defined]
    if patch.left:
        raise SystemExit(f"the script sets no {' and no '.join(sorted(patch.left))}, which this command would change")
    rows = [json.loads(line) for line in Path(given["data"]).read_text(encoding="utf-8").splitlines() if line.strip()]
    watch = _Watch(rows)
    space: dict[str, Any] = {
        "__name__": "published",
        "wandb": watch.wandb,
        "load_from_disk": watch.load,
        "load_dataset": watch.load,
    }
    before = os.environ.copy()
    try:
        exec(compile(parts[0], "published", "exec"), space)
        for name in NEEDED[:-1]:
            space[name] = getattr(watch, name)(space[name])
        exec(compile(parts[1], "published", "exec"), space)
    except _FinishedError:
        pass
    finally:
        os.environ.clear()  # the script sets wandb's
        os.environ.update(before)
    return {"curves": watch.curves, "drawn": watch.drawn}


class _Watch:
    """Stands around the script's functions and notes what went through them."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        from groupwise import load_config
        from groupwise.algorithm import Objective

        self.rows = rows
        self.places: dict[str, int] = {}
        """Rows by prompt."""
        self.curves: dict[str, list[float]] = {name: [] for name in (*CURVES, "our loss")}
        self.drawn: list[int] = []
        self.objective = Objective.from_config(load_config("tutorial-1.5b").algorithm)
        self.logprobs_NL: Any = None
        self.rewards: list[float] = []
        self.wandb = SimpleNamespace(init=lambda *a, **k: None, log=self.note, finish=self.finish)

    def load(self, *where: Any) -> dict[str, Sequence[dict[str, Any]]]:
        return {"train": self.rows, "test": self.rows}

    def note(self, numbers: Mapping[str, float]) -> None:
        self.curves["loss"].append(float(numbers["loss"]))
        self.curves["reward"].append(float(numbers["average_reward"]))

    def finish(self) -> None:
        raise _FinishedError

    def prepare_dataset(self, real: Any) -> Any:
        def prepare(*given: Any) -> Any:
            found = real(*given)
            self.places = {example["prompt"]: place for place, example in reversed([*enumerate(found)])}
            return found

        return prepare

    def combined_reward(self, real: Any) -> Any:
        def reward(*given: Any, **named: Any) -> Any:
            self.rewards = real(*given, **named)
            return self.rewards

        return reward

    def generate_completions(self, real: Any) -> Any:
        def generate(model: Any, *given: Any) -> Any:
            model.gradient_checkpointing_disable()
            model.config.use_cache = True
            try:
                return real(model, *given)
            finally:
                model.config.use_cache = False
                model.gradient_checkpointing_enable()

        return generate

    def generate_rollout_data(self, real: Any) -> Any:
        def rollout(model: Any, reference: Any, tokenizer: Any, *given: Any) -> Any:
            data = real(model, reference, tokenizer, *given)
            ids, mask = data["input_ids"][:, -data["logits_to_keep"] :], data["completion_mask"]
            self.curves["tokens"].append(float(mask.sum(1).double().mean()))
            self.curves["stopped"].append(float((ids == tokenizer.eos_token_id).any(1).double().mean()))
            self.drawn += [self.places[prompt] for prompt in data["repeated_prompts"][:: data["num_generations"]]]
            return data

        return rollout

    def compute_log_probs(self, real: Any) -> Any:
        def compute(*given: Any) -> Any:
            self.logprobs_NL = real(*given)
            return self.logprobs_NL

        return compute

    def grpo_loss(self, real: Any) -> Any:
        def loss(model: Any, reference: Any, data: Mapping[str, Any], *given: Any, **named: Any) -> Any:
            found = real(model, reference, data, *given, **named)
            self.curves["our loss"].append(_our_loss(self.objective, data, self.logprobs_NL.detach(), self.rewards))
            return found

        return loss


def _our_loss(objective: Any, data: Mapping[str, Any], logprobs_NL: Any, rewards: Sequence[float]) -> float:
    """What our objective makes of the script's batch."""
    import torch

    from groupwise.algorithm import AdvantageInputs, BatchCounts, policy_loss

    mask_NL = data["completion_mask"].bool()
    lengths_N = mask_NL.sum(1)
    count = len(lengths_N)
    sequence_T = torch.arange(count).repeat_interleave(lengths_N)
    groups = torch.arange(count) // data["num_generations"]
    inputs = AdvantageInputs(rewards_N=torch.tensor(rewards, dtype=torch.float64), group_N=groups, lengths_N=lengths_N)
    loss, _ = policy_loss(
        objective, logprobs_T=logprobs_NL[mask_NL], sequence_T=sequence_T, old_logprobs_T=data["old_log_probs"][mask_NL],
        advantages_N=objective.advantages(inputs).per_completion(inputs).float(),
        weights_T=objective.weights(lengths_N, sequence_T, BatchCounts(count, len(sequence_T), mask_NL.shape[1])),
        reference_logprobs_T=data["ref_log_probs"][mask_NL],
    )  # fmt: skip
    return float(loss)


def inherited(model: Path) -> dict[str, float]:
    """What ``generate`` takes from the model's own file, or else its defaults, where a script says nothing."""
    file = model / "generation_config.json"
    own = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {key: own.get(key, default) for key, default in (("top_k", 50), ("top_p", 1.0), ("repetition_penalty", 1.0))}


def run_ours(given: Mapping[str, Any], drawn: Sequence[int]) -> dict[str, Any]:
    """``tutorial-1.5b`` with the same numbers, on the rows that the script drew, in its order, cut off at the model's top-k and top-p."""
    from rich.console import Console

    from groupwise import load_config, train

    folder, sampling = Path(given["folder"]), inherited(Path(given["model"]))
    rows = Path(given["data"]).read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.strip()]
    (folder / "drawn.jsonl").write_text("".join(rows[place] + "\n" for place in drawn), encoding="utf-8")
    (folder / "judged.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n', encoding="utf-8")
    config = load_config(
        "tutorial-1.5b",
        [
            f"model.name={given['model']}", "model.device=cpu", f"data.source={folder / 'drawn.jsonl'}", "data.shuffle=false",
            f"data.eval_source={folder / 'judged.jsonl'}", "evaluation.problems=1", "evaluation.max_completion_tokens=1",
            "evaluation.show=0",
            f"rollout.prompts_per_step={given['prompts']}", f"rollout.completions_per_prompt={given['completions']}",
            f"rollout.max_completion_tokens={given['tokens']}", f"rollout.top_k={sampling['top_k'] or 'null'}",
            f"rollout.top_p={sampling['top_p']}", f"training.steps={given['steps']}", "output.checkpoint_every=0",
            "output.log_completions=0", *given["settings"],
        ],
    )  # fmt: skip
    shutil.rmtree(folder / "run", ignore_errors=True)
    train(config, recipe="published_script", run_folder=folder / "run", console=Console(width=100), check=False)
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(folder / "run")
    return {"curves": {name: [row[key] for row in metrics] for name, key in CURVES.items()}}


def carry_out(side: str, given: Mapping[str, Any]) -> None:
    """What a side's process does."""
    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    begun = environment()
    if side == "script":
        found = run_script(given)
    else:
        found = run_ours(given, json.loads((folder / "script.json").read_text(encoding="utf-8"))["drawn"])
    aside = folder / f"{side}.partial"
    aside.write_text(json.dumps({"given": dict(given), "environment": begun, **found}, indent=1), encoding="utf-8")
    aside.rename(folder / f"{side}.json")


def _kept(side: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The side's numbers, if it was run with just this."""
    try:
        found: dict[str, Any] = json.loads((Path(given["folder"]) / f"{side}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found["given"] == dict(given) else None


def _process(side: str, given: Mapping[str, Any]) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    words = [sys.executable, "-m", "experiments.published_script", "--carry-out", side, json.dumps(dict(given))]
    if code := subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode:
        raise SystemExit(code)


def compare_sides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Run what is not kept yet, each side in a process of its own, and gather both."""
    extract(Path(given["text"]).read_text(encoding="utf-8"))  # what is missing is said at once
    sides = {}
    for side, its in (("script", {key: value for key, value in given.items() if key != "settings"}), ("ours", dict(given))):
        if _kept(side, its) is None:
            _process(side, its)
        found = _kept(side, its)
        assert found is not None, f"{side} wrote other numbers than it was asked for"
        sides[side] = found
    shown = {key: given[key] for key in ("steps", "prompts", "completions", "tokens", "settings")}
    curves = {side: found["curves"] for side, found in sides.items()}
    model = Path(given["model"])
    return {
        "curves": curves,
        **shown,
        "model": model.name,
        "sampling": inherited(model),
        "environment": sides["ours"]["environment"],
    }


TITLES = {"reward": "reward", "loss": "loss", "tokens": "tokens of a completion", "stopped": "share that stops"}


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """A panel a curve, with both sides; in the loss's panel also our formula on the script's batches."""
    from experiments.style import COLOURS, INK, figure

    with figure(path, list(TITLES.values()), rows=2, height=2.6) as axes:
        for axis, name in zip(axes, TITLES, strict=True):
            for (side, curves), colour in zip(numbers["curves"].items(), COLOURS, strict=False):
                axis.plot(
                    range(1, len(curves[name]) + 1),
                    curves[name],
                    color=colour,
                    label="groupwise" if side == "ours" else "the script",
                )
            if name == "loss":
                again = numbers["curves"]["script"]["our loss"]
                axis.plot(range(1, len(again) + 1), again, ":", color=INK, label="our formula, the script's batches")
            axis.set_xlabel("step")
        axes[1].legend()


def report(numbers: Mapping[str, Any]) -> str:
    script, ours = numbers["curves"]["script"], numbers["curves"]["ours"]
    rows = []
    for name, title in TITLES.items():
        cells = [_quarters(curves[name]) for curves in (script, ours)]
        rows.append([title, *cells])
    table = markdown_table(["first and last quarter of the steps", "the script", "groupwise"], rows)
    apart = max(abs(a - b) for a, b in zip(script["loss"], script["our loss"], strict=True))
    sampling, penalty = numbers["sampling"], numbers["sampling"]["repetition_penalty"]
    cut = f"Both sample with the model's top-k of {sampling['top_k']} and top-p of {sampling['top_p']:g}"
    cut += "." if penalty == 1 else f", the script also with its repetition penalty of {penalty:g}, which ours does not know."
    further = f" Further settings of ours: {', '.join(numbers['settings'])}." if numbers["settings"] else ""
    return "\n\n".join(
        [
            "![Reward, loss, length and share that stops of the script and of groupwise, by step](../docs/figures/published_script.svg)",
            table,
            f"On the script's own batches its loss and ours differ by at most {apart:.1e}.",
            f"{numbers['model']}, {numbers['steps']} steps of {numbers['prompts']} x {numbers['completions']} completions of up to "
            f"{numbers['tokens']} tokens, the same problems in the same order, one run each. {cut}{further} {describe(numbers)}",
        ]
    )


def _quarters(curve: Sequence[float]) -> str:
    quarter = max(1, len(curve) // 4)
    return f"{statistics.fmean(curve[:quarter]):.3g} to {statistics.fmean(curve[-quarter:]):.3g}"


EXPERIMENT = Experiment("published_script", dict, draw, report)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """``python -m experiments.published_script``: both sides, then numbers, figure and table."""
    options = argparse.ArgumentParser(prog="python -m experiments.published_script")
    options.add_argument("--text", type=Path, help="the page as a text file, with its code")
    options.add_argument("--model", type=Path, help="folder of the model that both begin with")
    options.add_argument("--data", type=Path, help="GSM8K's train.jsonl: rows with question and answer")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--prompts", type=int, default=2, help="problems per step")
    options.add_argument("--completions", type=int, default=8, help="completions per problem")
    options.add_argument("--tokens", type=int, default=256, help="limit of a completion")
    options.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of ours")
    options.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "published_script", help="a side that has finished is kept here"
    )
    options.add_argument("--out", type=Path, default=FIGURES, help="folder of the JSON file and the figure")
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    chosen = options.parse_args(arguments)
    if chosen.redraw:
        numbers = read_numbers(EXPERIMENT.name, chosen.out)
    else:
        places = {name: getattr(chosen, name) for name in ("text", "model", "data")}
        for name, place in places.items():
            if place is None or not place.exists():
                options.error(f"--{name} is {place}, but it must name what is there")
        given = {name: str(place.resolve()) for name, place in places.items()} | {"folder": str(chosen.work.resolve())}
        given |= {name: getattr(chosen, name) for name in ("steps", "prompts", "completions", "tokens")}
        numbers = compare_sides({**given, "settings": chosen.set})
    publish(EXPERIMENT, numbers, chosen.out)
    return numbers


if __name__ == "__main__":
    if sys.argv[1:2] == ["--carry-out"]:
        carry_out(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()

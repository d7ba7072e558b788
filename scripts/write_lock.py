"""requirements.lock: the packages of constraints.txt that groupwise needs, with the SHA-256 of each of their files.

PyTorch and what comes with it (CUDA's libraries, Triton) are left out: each machine has its own build of it, with digests of its own,
which is installed first. Needs uv and a network: ``python scripts/write_lock.py``.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_TORCH = re.compile(r"(?:torch|triton|nvidia-|cuda-)")
HEAD = """\
# Every package that groupwise needs, but PyTorch (each machine has its own build), with the digests of its files:
#   pip install torch==2.13.0          # or as pytorch.org says for your machine
#   pip install --require-hashes --no-deps -r requirements.lock
#   pip install --no-deps --no-build-isolation .
# Made of constraints.txt by `python scripts/write_lock.py`.
"""


def main() -> None:
    command = [
        "uv", "pip", "compile", "pyproject.toml", "--constraint", "constraints.txt", "--universal", "--generate-hashes",
        "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    entries = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    kept = "".join(entry for entry in entries if not OF_TORCH.match(entry))
    (ROOT / "requirements.lock").write_text(HEAD + kept, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Real data lies beside the repository and is no part of it: a test that needs some skips where it is absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"real data sets are not in {SHARED.name}/ beside the repository's folder")
    return SHARED


@pytest.fixture(scope="session")
def qwen_tokenizer(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(shared_data / "qwen2.5-tokenizer"))

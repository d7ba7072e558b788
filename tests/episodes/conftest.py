"""The byte-level tokenizer that most of these tests play with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

"""A model folder so small that whole benchmarks run on it in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_tiny_llama


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A random two-layer Llama over bytes, with a chat template, as a Hugging Face folder."""
    return write_tiny_llama(tmp_path / "tiny", max_position_embeddings=2048)

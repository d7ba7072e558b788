"""The tiny model, data and runs of `tests.tiny` as fixtures."""

import functools

import pytest
from rich.console import Console

from tests.tiny import lower_case_share, tiny_config, write_sums, write_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture
def small_config(tiny_folder, sums):
    """``small_config(algorithm={...})``: two steps of 3 prompts x 4 completions of up to 8 tokens, fp32 on the CPU."""
    return functools.partial(tiny_config, tiny_folder, sums)


@pytest.fixture
def letters():
    """A reward that always varies: the share of lower-case letters in a completion."""
    return {"letters": lower_case_share}


@pytest.fixture
def quiet():
    return Console(quiet=True)

"""The text of each token of a completion, by the tokenizer that the run left behind or that this machine has of its model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = ["TokenPieces"]

CONTEXT = 8
"""Tokens that are decoded together, so that spaces and characters across tokens come out as in the whole text."""


class TokenPieces:
    """Cuts completions into their tokens. Without a tokenizer to be found, there are no pieces and no complaint."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.known: dict[int, str] = {}

    def of(self, record: CompletionRecord) -> list[str]:
        """One text per token id; their concatenation is the completion with its special tokens. Empty where tokens were not
        recorded, or no tokenizer is at hand."""
        if not record.token_ids or len(record.logprobs) != len(record.token_ids) or self.tokenizer is None:
            return []
        ids = list(record.token_ids)
        try:
            return self.one_by_one(ids) or self.in_context(ids)
        except (OverflowError, TypeError, ValueError):
            return []

    def one_by_one(self, ids: list[int]) -> list[str]:
        """The texts of single tokens, where these make up the whole: nearly always, and a hundred times as fast."""
        pieces = [self.single(token) for token in ids]
        return pieces if "".join(pieces) == self.decode(ids) else []

    def single(self, token: int) -> str:
        if token not in self.known:
            anchored = self.decode([self.anchor, token])
            self.known[token] = anchored[len(self.decode([self.anchor])) :]
        return self.known[token]

    def in_context(self, ids: list[int]) -> list[str]:
        """Each token's text as it comes out after those before it."""
        pieces: list[str] = []
        before = ""
        for end in range(1, len(ids) + 1):
            start = max(0, end - CONTEXT)
            if start:
                before = self.decode(ids[start : end - 1])
            now = self.decode(ids[start:end])
            # A character of several bytes may be spread over tokens: it belongs to the one that completes it.
            done = now[:-1] if now.endswith("\ufffd") else now
            pieces.append(done[len(before) :] if done.startswith(before) else done)
            before = done if done.startswith(before) else now
        return pieces

    def decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def anchor(self) -> int:
        """A token to stand before another, since some tokenizers take the space off what comes first."""
        assert self.tokenizer is not None
        return int(self.tokenizer.encode("a", add_special_tokens=False).ids[-1])

    @cached_property
    def tokenizer(self) -> Any | None:
        from tokenizers import Tokenizer

        for folder in self.folders():
            path = folder / "tokenizer.json"
            if path.is_file():
                try:
                    return Tokenizer.from_file(str(path))
                except Exception:  # the library raises bare exceptions for a damaged file
                    continue
        return None

    def folders(self) -> list[Path]:
        """Where the run's tokenizer may be: its model, its checkpoints, and what is here of the model that it started from."""
        checkpoints = sorted(self.run.path.glob("checkpoints/*/*/tokenizer.json"))
        started_from = local_folder(self.run.config.model.name, self.run.config.model.revision) if self.run.config else None
        return [
            self.run.path / "final_model",
            *(path.parent for path in checkpoints[-1:]),
            *([started_from] if started_from else []),
        ]


def local_folder(name: str, revision: str | None) -> Path | None:
    """Where this machine has a model's files, if it does; nobody is asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from groupwise.models.embedded import EMBEDDED_NAME, embedded_folder
    from groupwise.models.folder import is_folder_name

    if name == EMBEDDED_NAME:
        return embedded_folder()
    if is_folder_name(name):
        return Path(name).expanduser()
    try:
        found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None

"""The text of each token of a completion, by the tokenizer that the run left behind."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = ["TokenPieces"]


class TokenPieces:
    """Cuts completions into their tokens. Without a tokenizer to be found, there are no pieces and no complaint."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    def of(self, record: CompletionRecord) -> list[str]:
        """One text per token id; their concatenation is the completion with its special tokens. Empty where tokens were not
        recorded, or no tokenizer is at hand."""
        if not record.token_ids or len(record.logprobs) != len(record.token_ids) or self.tokenizer is None:
            return []
        ids, pieces, before = list(record.token_ids), [], ""
        try:
            for end in range(1, len(ids) + 1):
                start = max(0, end - CONTEXT)
                if start:
                    before = self.decode(ids[start : end - 1])
                now = self.decode(ids[start:end])
                # A character of several bytes may be spread over tokens: it belongs to the one that completes it.
                done = now[:-1] if now.endswith("\ufffd") else now
                pieces.append(done[len(before) :] if done.startswith(before) else done)
                before = done if done.startswith(before) else now
        except (OverflowError, TypeError, ValueError):
            return []
        return pieces

    def decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

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
        """Where the run's tokenizer may be: its model, its checkpoints, the model that it started from."""
        checkpoints = sorted(self.run.path.glob("checkpoints/*/*/tokenizer.json"))
        name = self.run.config.model.name if self.run.config else ""
        return [self.run.path / "final_model", *(path.parent for path in checkpoints[-1:]), *([Path(name)] if name else [])]


CONTEXT = 8
"""Tokens that are decoded together, so that spaces and characters across tokens come out as in the whole text."""

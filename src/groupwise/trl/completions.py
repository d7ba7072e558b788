"""``log_completions``: the last generation, as a table in the terminal and as a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from groupwise.trl.config import GRPOConfig
from groupwise.trl.generation import Generation

__all__ = ["CompletionLog"]


class CompletionLog:
    """Keeps the latest generation until a log is due. Does nothing unless ``log_completions`` is on, and in the first process alone."""

    def __init__(self, args: GRPOConfig, is_first: bool) -> None:
        self.on, self.limit = bool(args.log_completions) and is_first, args.num_completions_to_print
        self.folder = Path(args.output_dir) / "completions"
        self.columns: dict[str, list[Any]] = {}

    def keep(self, generation: Generation, names: Sequence[str], extra: Mapping[str, Sequence[Any]]) -> None:
        if not self.on:
            return
        count = len(generation.sampled)
        self.columns = {"prompt": generation.prompts, "completion": generation.completions}
        self.columns |= dict(zip(names, generation.scores, strict=True))
        self.columns |= {name: list(values) for name, values in extra.items() if len(values) == count}
        self.columns["advantage"] = generation.advantages

    def write(self, step: int) -> None:
        """Print, and write ``completions_NNNNN.parquet``."""
        if not self.on or not self.columns:
            return
        import pyarrow
        from pyarrow import parquet

        self.folder.mkdir(parents=True, exist_ok=True)
        rows = {"step": [step] * len(self.columns["prompt"]), **self.columns}
        parquet.write_table(pyarrow.table(rows), self.folder / f"completions_{step:05d}.parquet")
        self._print(step)

    def _print(self, step: int) -> None:
        table = Table(title=f"Step {step}", show_lines=True)
        for name in self.columns:
            table.add_column(name)
        for row in list(zip(*self.columns.values(), strict=True))[: self.limit]:
            table.add_row(*(Text(_shown(value)) for value in row))
        Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{m['role']}: {m['content']}" for m in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)

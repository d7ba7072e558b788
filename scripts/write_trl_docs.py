"""Write the table of TRL's arguments into docs/how-to/coming-from-trl.md: ``python scripts/write_trl_docs.py``.

A test holds the two equal."""

from __future__ import annotations

from pathlib import Path

from groupwise.trl.arguments import render_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "coming-from-trl.md"
MARK = "<!-- The rest is written by scripts/write_trl_docs.py. -->"

if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n\n{render_table(whole=False).strip()}\n", encoding="utf-8")
    print(f"wrote {PAGE.name}")

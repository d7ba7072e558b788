"""Write the table of docs/reference/doctor.md from the doctor's rules; a test checks that the page is current."""

from __future__ import annotations

from pathlib import Path

from groupwise.doctor import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "doctor.md"
BEGIN, END = "<!-- rules -->", "<!-- /rules -->"
SUBJECTS = {
    "settings": "From the settings alone",
    "problems": "From the data, before a run",
    "rehearsal": "From a trial of rewards, tokenizer and prompt, before a run",
    "run": "From the files of a run",
}


def tables() -> str:
    parts = []
    for subject, title in SUBJECTS.items():
        rows = [f"- `{rule.name}` ({rule.severity}): {rule.title}" for rule in RULES if rule.subject == subject]
        parts.append("\n".join([f"### {title}", "", *rows]))
    return "\n\n".join(parts)


def render(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

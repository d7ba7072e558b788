"""Whole runs with other token budgets, packing and processes, in miniature: one curve, and a page that says what was measured."""

import sys

import pytest

pytest.importorskip("matplotlib")

from experiments.common import PAGE, environment, read_block, read_numbers
from experiments.curve import CURVES, SETTINGS, differences, draw, measure, report
from tests.warm import python


@pytest.mark.slow
def test_no_setting_changes_the_curve(tmp_path, tiny_folder, sums, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    settings = [f"model.name={tiny_folder}", f"data.source={sums}", "data.holdout=4", "prompt.system=none", "training.steps=3",
                "rollout.prompts_per_step=3"]  # fmt: skip
    numbers = measure(settings, tmp_path / "work")
    assert list(numbers["lines"]) == list(SETTINGS)
    first, *others = numbers["lines"].values()
    assert len(first["completions"]) == len(set(first["completions"])) == 36
    assert first["weights"] == 0
    for other in others:
        assert other["completions"] == first["completions"]
        assert 0 < other["weights"] < 1e-6, "rounded otherwise, and really compared"
    for found in differences(numbers).values():
        assert all(found[key] < 1e-4 for key in CURVES)
    shown = numbers | {"environment": environment()}
    draw(shown, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert "100% of the completions are those of the first." in report(shown)


def test_the_page_shows_the_curves_that_are_committed():
    numbers = read_numbers("curve")
    assert read_block(PAGE, "curve") == report(numbers)
    assert list(numbers["lines"]) == list(SETTINGS)
    first, *others = numbers["lines"].values()
    assert all(other["completions"] == first["completions"] for other in others)
    for found in differences(numbers).values():
        assert found["reward/mean"] == 0
        assert found["policy/loss"] < 1e-5
        assert found["optimizer/grad_norm"] < 1e-3

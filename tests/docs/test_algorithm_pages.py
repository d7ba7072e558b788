"""A page per preset, and what it quotes is what the preset is."""

import re
from pathlib import Path

import pytest

from groupwise.config import load_config
from groupwise.config.presets import PRESETS
from groupwise.tracking import METRICS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "algorithms"
HEADINGS = ["Formula", "What differs", "Run it", "Metrics", "When to take it"]


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_every_preset_has_a_page_and_every_page_a_preset():
    assert {path.stem for path in FOLDER.iterdir()} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_quotes_the_preset(name):
    preset, text = PRESETS[name], page(name)
    assert text.startswith(
        f"# {preset.title}\n\n`algorithm.preset: {name}`, [arXiv {preset.paper}](https://arxiv.org/abs/{preset.paper})"
    )
    assert preset.summary in text
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("name", PRESETS)
def test_the_command_on_the_page_runs_the_preset_as_it_is(name):
    source, words = re.search(r"^groupwise train (\S+) (.*)$", page(name), flags=re.MULTILINE).groups()
    algorithm = load_config(source, words.split()).algorithm
    assert algorithm.preset == name
    settings = algorithm.model_dump()
    for section, values in PRESETS[name].values.items():
        assert settings[section] == values or values.items() <= settings[section].items()


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_says_what_the_policys_numbers_mean(name):
    section = page(name).partition("## Metrics")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+/\w+)`", section)) <= set(METRICS)
    assert "`policy/loss`" in section
    assert ("`policy/kl`" in section) == (PRESETS[name].values["kl"] is not None), "without a KL it is not logged"


@pytest.mark.parametrize("name", PRESETS)
def test_mathematics_is_balanced(name):
    blocks = re.findall(r"^```math\n(.*?)^```$", page(name), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2 + (name == "ppo"), "the objective, its advantages, and the loss of a learned value"
    for block in blocks:
        assert block.count("{") == block.count("}")
        assert block.count(r"\big(") == block.count(r"\big)")
        assert block.count(r"\Big[") + block.count(r"\Big(") == block.count(r"\Big]") + block.count(r"\Big)")
        assert "\n\n" not in block

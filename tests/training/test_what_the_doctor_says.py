"""Real runs of the tiny model, well and made ill on purpose, and what the doctor says of them: also while they go on."""

import pytest
import torch

from groupwise.doctor import RULES, Watch
from groupwise.training.loop import train
from tests.doctor.diseases import ailing, find
from tests.doctor.ill_runs import DISEASES, HEALTHY
from tests.doctor.patients import Clinic
from tests.survival.page import PAGE, section

OF_SETTINGS = {rule.name for rule in RULES if rule.subject == "settings"}
"""They speak of settings alone, and have no completions to show."""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # patients that are made with other threads are rounded otherwise, and behave otherwise
    yield Clinic(tmp_path_factory.mktemp("clinic"))
    torch.set_num_threads(threads)


def of_the_taught(one):
    """Those of the model that is taught first, which takes as long as ten runs; and one of an adapter, over 24 steps."""
    return pytest.param(one, marks=[pytest.mark.slow] * (one.model in ("pupil", "endless") or "sampler-stale" in one.rules))


@pytest.mark.parametrize("disease", [of_the_taught(one) for one in DISEASES if one.quick or one.before], ids=lambda one: one.name)
def test_a_run_made_ill_is_told_what_it_has(disease, clinic, tmp_path):
    found = find(disease, clinic, tmp_path)
    assert disease.rules <= set(found)
    for rule in disease.rules - ({rule.name for rule in RULES} if disease.before else OF_SETTINGS):
        assert found[rule].numbers
        assert found[rule].examples


@pytest.mark.slow
@pytest.mark.parametrize(
    "disease",
    [
        pytest.param(one, marks=pytest.mark.soak if one.long else ())
        for one in DISEASES
        if not (one.quick or one.before or one.small)
    ],
    ids=lambda one: one.name,
)
def test_a_run_made_ill_in_other_ways_is_told_what_it_has(disease, clinic, tmp_path):
    assert disease.rules <= set(find(disease, clinic, tmp_path))


@pytest.mark.parametrize("healthy", [of_the_taught(one) for one in HEALTHY if not one.small], ids=lambda one: one.name)
def test_a_run_that_is_well_is_told_nothing(healthy, clinic, tmp_path):
    assert not ailing(find(healthy, clinic, tmp_path))


def test_every_rule_has_an_ill_run():
    assert {rule.name for rule in RULES} - set().union(*(one.rules for one in DISEASES)) == {"loss-zero-at-start"}


def test_a_run_is_told_what_ails_it_while_it_goes_on_and_once(small_config, quiet, tmp_path):
    said, looked = [], []
    watch = Watch(lambda sentence, severity: said.append((sentence, severity)))

    def on_step(report):
        before = watch.next_look
        watch(report.folder, report.step)
        if watch.next_look != before:
            looked.append(report.step)

    config = small_config(training={"steps": 24}, rewards={"functions": [{"function": "zero"}]})
    train(
        config, rewards={"zero": lambda completions, **columns: [0.0] * len(completions)}, console=quiet,
        run_folder=tmp_path / "run", on_step=on_step,
    )  # fmt: skip
    assert looked == [10, 15, 22]
    constant = [one for one in said if "gives everybody the same" in one[0]]
    assert len(constant) == 1
    assert constant[0][0].startswith(
        "doctor, step 10: critical: A reward function gives everybody the same: 'zero' gave 0.0 to all "
    )
    assert constant[0][0].endswith(f"(groupwise doctor {tmp_path / 'run'})")


def test_a_watch_that_cannot_look_says_so_once_and_ends_nothing(tmp_path):
    said = []
    watch = Watch(lambda sentence, severity: said.append(sentence))
    for step in range(1, 40):
        watch(tmp_path / "nowhere", step)
    assert len(said) == 1
    assert "is not a folder" in said[0]


def test_the_page_counts_the_runs_of_the_tiny_model():
    runs = [one for one in DISEASES if not one.small]
    rules = {rule for one in runs for rule in one.rules}
    said = section("diseases", PAGE.read_text(encoding="utf-8"))
    assert f"{len(rules)} rules, {len(runs)} runs. Not found: none." in said

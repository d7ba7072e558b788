"""Real runs of the tiny model, well and made ill on purpose, and what the doctor says of them: also while they go on."""

import pytest

from groupwise import train
from groupwise.doctor import Watch, diagnose_run
from groupwise.engines import merged
from groupwise.tracking.reading import read_run


def rules_of(folder):
    return {finding.rule: finding for finding in diagnose_run(read_run(folder))}


@pytest.fixture
def adapter_run(small_config, letters, quiet, tmp_path):
    pytest.importorskip("peft")

    def run(name):
        config = small_config(
            model={"lora": {"rank": 4, "alpha": 8}}, training={"steps": 24}, optimizer={"learning_rate": 1e-2},
            rollout={"engine": "builtin"},
        )  # fmt: skip
        return train(config, rewards=letters, console=quiet, run_folder=tmp_path / name).folder

    return run


def test_an_adapter_that_never_reaches_the_sampler_is_found(adapter_run, monkeypatch):
    assert "sampler-stale" not in rules_of(adapter_run("well"))
    monkeypatch.setattr(merged, "merge_into", lambda adapted, plain: None)
    found = rules_of(adapter_run("ill"))
    assert found["sampler-stale"].severity == "critical"
    assert "does not reach the sampler" in found["sampler-stale"].summary
    assert len(found["sampler-stale"].examples) == 3


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

"""Real runs of the tiny model, well and made ill on purpose, and what the doctor says of them: also while they go on."""

import pytest

from groupwise import train
from groupwise.doctor import Watch, diagnose_run
from groupwise.engines.builtin.engine import BuiltinEngine
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
    sample = BuiltinEngine.sample

    def from_the_base(engine, *arguments, **named):
        with engine.decoder.adapted.disable_adapter():
            return sample(engine, *arguments, **named)

    monkeypatch.setattr(BuiltinEngine, "sample", from_the_base)
    found = rules_of(adapter_run("ill"))
    assert found["sampler-stale"].severity == "critical"
    assert "does not reach the sampler" in found["sampler-stale"].summary
    assert len(found["sampler-stale"].examples) == 3


def refuses_capitals(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    if any(text[:1].isupper() for text in texts):
        raise ValueError("it begins with a capital")
    return [0.0] * len(texts)


ILL = {
    "a function that raises": (
        {"reward-failing"},
        {"rewards": {"functions": [{"function": "letters"}, {"function": "refuses"}], "on_error": "skip"}, "training": {"steps": 12}},
    ),
    "a rate that is far too high, with a reference": (
        {"kl-above-band", "mode-collapse", "no-variance", "rate-too-high"},
        {"algorithm": {"beta": 0.01}, "optimizer": {"learning_rate": 3e-2}, "training": {"steps": 24}},
    ),
    "many updates at such a rate": (
        {"ratio-off", "never-stops"},
        {"algorithm": {"updates_per_batch": 4}, "optimizer": {"learning_rate": 1e-1}, "training": {"steps": 12}},
    ),
    "updates that bf16 rounds away": (
        {"no-movement", "rate-too-low"},
        {
            "model": {"dtype": "bfloat16"}, "algorithm": {"beta": 0.04}, "training": {"steps": 12},
            "optimizer": {"learning_rate": 1e-14, "precision": "pure"},
        },
    ),
    "weights that are no numbers any more": (
        {"not-finite"}, {"optimizer": {"learning_rate": 1e18, "max_grad_norm": None}, "training": {"steps": 5}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("disease", ILL)
def test_a_run_made_ill_is_told_what_it_has(disease, small_config, letters, quiet, tmp_path):
    expected, sections = ILL[disease]
    functions = {**letters, **({"refuses": refuses_capitals} if "rewards" in sections else {})}
    train(small_config(**sections), rewards=functions, console=quiet, run_folder=tmp_path / "run")
    found = rules_of(tmp_path / "run")
    assert expected <= set(found)
    assert all(found[rule].numbers for rule in expected)


def test_a_run_that_is_well_has_none_of_these(small_config, letters, quiet, tmp_path):
    config = small_config(
        training={"steps": 24}, algorithm={"beta": 0.01}, optimizer={"learning_rate": 1e-4}, rollout={"max_completion_tokens": 48}
    )
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert not set(rules_of(tmp_path / "run")) & set().union(*(rules for rules, _ in ILL.values()))


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

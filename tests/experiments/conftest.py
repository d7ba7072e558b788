"""The tiny model and the file of sums of the trainer's tests, and comparisons of runs over them."""

import pytest

from tests.training.conftest import sums, tiny_folder

__all__ = ["sums", "tiny_folder", "tiny_runs"]


@pytest.fixture
def tiny_runs(tiny_folder, sums, tmp_path, monkeypatch):
    """``run_all`` over a random model, in this process, with what is given to it; the list of jobs that were carried out; their folder."""
    from experiments import runs

    carried_out = []

    def here(job, threads):
        carried_out.append(job.name)
        runs.carry_out(job)
        return job.done

    monkeypatch.setattr(runs, "_process", here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [f"data.source={sums}", "data.holdout=4", "prompt.system=none", "rollout.max_completion_tokens=8",
                "model.dtype=float32", "rewards.functions=[{function: tests.tiny:lower_case_share}]"]  # fmt: skip
    budget = runs.Budget(steps=2, prompts_per_step=2, completions_per_prompt=4, evaluate_every=1, problems=4)

    first = [f"model.name={tiny_folder}", "warm_start.steps=1", "warm_start.examples_per_step=2"]
    real = runs.warm_start_job
    monkeypatch.setattr(runs, "warm_start_job", lambda s, b, w, given=(), *rest: real(s, b, w, [*given, *first], *rest))

    def call(variants, **given):
        return runs.run_all(variants, [0], budget, tmp_path / "work", jobs=1, settings=settings, **given)

    return call, carried_out, tmp_path / "work"

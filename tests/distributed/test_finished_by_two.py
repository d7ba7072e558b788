"""``--resume`` on a run that two processes have finished: neither of them begins anything, and nothing changes."""

import json

import pytest

from tests.distributed.two_processes import HERE, launch_two


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_leave_a_finished_run_as_it_is(train_in, small_config):
    """In threads."""
    config = small_config(output={"checkpoint_every": 2}, evaluation={"at_start": True})
    _, first = train_in(2, "run", config)
    before = content(first.folder)
    steps, again = train_in(2, "run", config, resume=True)
    assert (steps, again.folder) == ([], first.folder)
    assert again.summary == json.loads((first.folder / "summary.json").read_text())
    assert content(first.folder) == before


@pytest.mark.soak
def test_two_real_processes_do(small_config, tmp_path):
    config = small_config(output={"checkpoint_every": 2}, evaluation={"at_start": True})
    assert launch_two(config, tmp_path, tmp_path, script=HERE / "run_finished.py") == 0
    before = content(tmp_path / "before")
    assert {"summary.json", "metrics.jsonl", "final_model/model.safetensors"} <= before.keys()
    assert content(tmp_path / "run") == before
    for rank in range(2):
        first, again = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert again == first

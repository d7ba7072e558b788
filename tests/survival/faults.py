"""Try every fault that a run is to survive or to refuse, by the command line, and write what happened as a table.

    python -m tests.survival.faults                     # all of them, about a minute
    python -m tests.survival.faults --only disk reward
    python -m tests.survival.faults --write             # and put the table into benchmarks/TRIALS.md

Each is a function below; it raises AssertionError where what happened is not what is promised. Real faults where the machine allows
them (a small disk needs the right to mount one); what is injected says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.survival import faults_of_ends  # noqa: F401 - its faults are in the table
from tests.survival.page import stamp, write_section
from tests.survival.place import NotTried, Place, small_disk
from tests.survival.trying import FAULTS, Outcome, begun_and_held, digest, fault, goes_on, stopped, told

__all__ = ["FAULTS", "main", "named", "try_fault"]


# --- gradients --------------------------------------------------------------------------------------------------------


def spoil_gradients(first: int, last: int) -> Callable[[], None]:
    """Put a NaN or an infinity into the gradients of these updates, counted from 1."""

    def patch() -> None:
        from groupwise.training.optimizer import MasterAdamW

        step, count = MasterAdamW.step, [0]

        def spoilt(optimizer: MasterAdamW, learning_rate: float) -> tuple[float, bool]:
            count[0] += 1
            if first <= count[0] <= last:
                gradient = optimizer.masters[0].grad
                assert gradient is not None
                gradient.view(-1)[0] = float("nan" if count[0] % 2 else "inf")
            return step(optimizer, learning_rate)

        MasterAdamW.step = spoilt  # type: ignore[method-assign]

    return patch


@fault("gradient: NaN in one step (injected)")
def one_gradient(place: Place) -> Outcome:
    place.write()
    ended = place.run(before=spoil_gradients(3, 3))
    assert ended.exit_code == 0, ended.said
    assert place.total("optimizer/dropped_updates") == 1
    assert place.steps() == [1, 2, 3, 4, 5]
    return Outcome("the update was not made, and counted in `optimizer/dropped_updates`", 0, "everything")


@fault("gradient: NaN and infinite from the third update on (injected)")
def all_gradients(place: Place) -> Outcome:
    place.write(training={"steps": 10})
    ended = place.run(before=spoil_gradients(3, 99))
    said = told(ended, place, "5 updates in a row", "the last good checkpoint is", "step-1;")
    assert ended.exit_code == 1
    assert place.checkpoints() == ["step-1", "suspect-step-2"]
    place.write(training={"steps": 5})
    assert place.run("--resume").exit_code == 0
    return Outcome(said, 1, "the named checkpoint, and the later one aside; `--resume` went on from it to the end")


@fault("gradient: a learning rate that ruins the weights")
def ruinous_rate(place: Place) -> Outcome:
    place.write(training={"steps": 10}, optimizer={"learning_rate": 1e30, "max_grad_norm": None})
    ended = place.run()
    said = told(ended, place, "5 updates in a row", "no sound update was made")
    assert ended.exit_code == 1
    return Outcome(said, 1, ", ".join(place.checkpoints()))


# --- reward functions -------------------------------------------------------------------------------------------------


def reward(name: str, sign: str, **rewards: object) -> Callable[[Place], Outcome]:
    def attempt(place: Place) -> Outcome:
        place.write(name, rewards=rewards)
        ended = place.run()
        said = told(ended, place, sign)
        assert ended.exit_code == 2
        assert place.checkpoints() == ["step-1", "step-2"]
        place.rewards.write_text(place.rewards.read_text().replace("calls > 6", "False"))
        goes_on(place)
        return Outcome(said, 2, "step-1, step-2; with the function fixed `--resume` went on to the end")

    return attempt


FAULTS["reward function: raises"] = reward("raises", "raised KeyError: 'score'")
FAULTS["reward function: hangs"] = reward("hangs", "did not return within rewards.timeout_s = 5 seconds", timeout_s=5)
FAULTS["reward function: returns NaN"] = reward("nan", "returned nan for completion 0 instead of a finite number")
FAULTS["reward function: returns the wrong length"] = reward("short", "returned 3 scores for 4 completions")


@fault("reward function: raises once, with rewards.on_error=skip")
def reward_skipped(place: Place) -> Outcome:
    place.write("raises_once", rewards={"on_error": "skip"})
    ended = place.run()
    told(ended, place, "raised KeyError", "its group is left out")
    assert ended.exit_code == 0
    assert place.total("groups/failed") == 1
    return Outcome("its group was left out, said, and counted in `groups/failed`; it was not scored 0", 0, "everything")


@fault("reward file: lies beside the settings and in the model's folder, and is not named")
def unnamed_file(place: Place) -> Outcome:
    for folder in (place.path, place.model):
        for name in ("rewards.py", "reward.py", "sitecustomize.py", "__init__.py"):
            (folder / name).write_text(f"open({str(place.path / 'ran')!r}, 'w')\n")
    place.write()
    ended = place.run()
    assert ended.exit_code == 0, ended.said
    assert not (place.path / "ran").exists()
    return Outcome("it did not run", 0, "everything")


@fault("model: brings Python code, and trust_remote_code is off")
def remote_code(place: Place) -> Outcome:
    settings = json.loads((place.model / "config.json").read_text())
    settings |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    (place.model / "config.json").write_text(json.dumps(settings))
    (place.model / "theirs.py").write_text(f"open({str(place.path / 'ran')!r}, 'w')\n")
    place.write()
    ended = place.run()
    said = told(ended, place, "model.trust_remote_code=true")
    assert ended.exit_code == 2
    assert not (place.path / "ran").exists()
    return Outcome(said, 2, "the code did not run, and no folder was made")


# --- disks ------------------------------------------------------------------------------------------------------------


@fault("disk: full before the run")
def full_at_start(place: Place) -> Outcome:
    with small_disk(place, kib=16) as disk:
        with (disk / "ballast").open("wb", buffering=0) as file:
            file.write(bytes(12 * 1024))
        place.write()
        ended = place.run()
        said = told(ended, place, "the final model will take", "MiB are free", "output.folder")
        assert ended.exit_code == 1
        return Outcome(re.sub(r"[\d.]+ MiB", "N MiB", said), 1, "nothing was there to keep")


@fault("disk: full in the second step, room again in the fourth")
def full_for_a_while(place: Place) -> Outcome:
    with small_disk(place) as disk:
        place.write("fills_disk")
        ended = place.run(environment={"BALLAST": str(disk / "ballast"), "FREES": "1"})
        told(ended, place, "NOT SAVED", "No space left on device", "wait in memory", "there is room again")
        assert ended.exit_code == 0
        assert place.steps() == [1, 2, 3, 4, 5]
        assert place.done
        return Outcome(
            "the checkpoints of that time were not saved, and it was said; the run went on", 0, "every record, and the rest"
        )


@fault("disk: full from the second step on")
def full_to_the_end(place: Place) -> Outcome:
    with small_disk(place) as disk:
        place.write("fills_disk")
        ended = place.run(environment={"BALLAST": str(disk / "ballast")})
        said = told(ended, place, "NOT SAVED", "No space left on device", "cannot be written", "the last checkpoint is")
        assert ended.exit_code == 1
        assert place.checkpoints() == ["step-1"]
        (disk / "ballast").unlink()
        place.write()
        place.settings.write_text(place.settings.read_text().replace("mine.py:letters", "mine.py:fills_disk"))
        place.rewards.write_text(place.rewards.read_text().replace("calls == 4", "False"))
        ended = place.run("--resume", environment={"BALLAST": str(disk / "ballast")})
        assert ended.exit_code == 0, ended.said
        assert place.steps() == [1, 2, 3, 4, 5]
        return Outcome(said, 1, "step-1; with room again `--resume` went on to the end")


@fault("folder: read-only")
def read_only(place: Place) -> Outcome:
    with small_disk(place, read_only=True):
        place.write()
        ended = place.run()
        said = told(ended, place, "Read-only file system")
        assert ended.exit_code == 2
        return Outcome(said, 2, "nothing was there to keep")


# --- checkpoints, folders and data --------------------------------------------------------------------------------------


def newest(place: Place) -> Path:
    found = (place.folder / "checkpoints").glob("step-*")
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


@fault("checkpoint: the newest is damaged")
def damaged(place: Place) -> Outcome:
    stopped(place)
    hurt = newest(place)
    optimizer = hurt / "optimizer.safetensors"
    content = bytearray(optimizer.read_bytes())
    content[-1] ^= 1
    optimizer.write_bytes(content)
    ended = place.run("--resume")
    told(ended, place, "PASSED OVER", "is not what was written")
    assert ended.exit_code == 0
    assert place.steps() == [1, 2, 3, 4, 5]
    return Outcome(f"one bit changed in {hurt.name}: passed over, said, set aside; the one before was taken", 0, "everything")


@fault("checkpoint: a file was put into it")
def planted(place: Place) -> Outcome:
    stopped(place)
    (newest(place) / "model" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    ended = place.run("--resume")
    told(ended, place, "PASSED OVER", "was put there")
    assert ended.exit_code == 0
    assert not (place.path / "ran").exists()
    return Outcome("passed over, said, set aside; nothing in it ran", 0, "everything")


@fault("checkpoint: every one is damaged")
def all_damaged(place: Place) -> Outcome:
    stopped(place)
    for state in place.folder.glob("checkpoints/*/state.json"):
        state.write_text("{")
    ended = place.run("--resume")
    said = told(ended, place, "is damaged")
    assert ended.exit_code == 2
    return Outcome(said, 2, "everything as it was")


@fault("data: the file changes while the run goes on")
def data_changes(place: Place) -> Outcome:
    place.write("rewrites_data")
    ended = place.run(environment={"DATA": str(place.data)})
    assert ended.exit_code == 0, ended.said
    prompts = (place.folder / "completions.jsonl").read_text()
    assert "is what?" not in prompts
    return Outcome("the run kept to what it had read", 0, "everything")


@fault("data: the file changed before --resume")
def data_changed(place: Place) -> Outcome:
    stopped(place)
    place.data.write_text(place.data.read_text().replace("= ?", "is what?"))
    ended = place.run("--resume")
    said = told(ended, place, "the data itself", "--accept-changes")
    assert ended.exit_code == 2
    return Outcome(re.sub(r"fingerprint \w+ -> \w+", "fingerprint A -> B", said), 2, "everything as it was")


@fault("folder: two runs in one")
def two_runs(place: Place) -> Outcome:
    going = begun_and_held(place)
    second = place.run("--resume")
    place.let_go()
    said = told(second, place, "another run is going on")
    assert second.exit_code == 2
    assert going.wait().exit_code == 0
    assert place.steps() == [1, 2, 3, 4, 5]
    return Outcome(said, 2, "the first run, undisturbed to its end")


@fault("folder: has a run in it already, without --resume")
def occupied(place: Place) -> Outcome:
    place.write()
    assert place.run().exit_code == 0
    before = digest(place.folder)
    ended = place.run()
    said = told(ended, place, "--resume")
    assert ended.exit_code == 2
    assert digest(place.folder) == before
    return Outcome(said, 2, "everything as it was")


# --- what is around a run -----------------------------------------------------------------------------------------------

WANDB = """
class errors:
    class UsageError(Exception):
        pass


class Settings:
    def __init__(self, **settings):
        pass


class Run:
    def define_metric(self, *names, **settings):
        pass

    def log(self, numbers):
        if numbers.get("step", 0) >= 2:
            raise ConnectionError("the service is down")

    def finish(self):
        raise ConnectionError("the service is down")


def init(**settings):
    return Run()
"""


@fault("tracking service: down from the second step (a stand-in for wandb)")
def tracker_gone(place: Place) -> Outcome:
    (place.path / "gone").mkdir()
    (place.path / "gone" / "wandb.py").write_text(WANDB)
    place.write(output={"trackers": ["jsonl", "wandb"]})
    ended = place.run(before=lambda: sys.path.insert(0, str(place.path / "gone")))
    told(ended, place, "wandb failed (ConnectionError: the service is down): the run goes on without it")
    assert ended.exit_code == 0
    assert place.steps() == [1, 2, 3, 4, 5]
    return Outcome("one warning, which names the file that has every number; the run went on", 0, "every record in metrics.jsonl")


@fault("memory: an allocation fails (address space limited)")
def memory_short(place: Place) -> Outcome:
    place.write()
    assert place.run("training.steps=1").exit_code == 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    large = ["rollout.prompts_per_step=256", "rollout.completions_per_prompt=32", "training.micro_batch_tokens=10000000"]
    ended = place.run("--resume", "--accept-changes", *large, memory_bytes=pages * os.sysconf("SC_PAGESIZE") + 100 * 2**20)
    said = told(ended, place, "memory ran out", "micro_batch_tokens", "step-1")
    assert ended.exit_code == 1
    goes_on(place)
    return Outcome(said, 1, "step-1; with smaller batches `--resume` went on to the end")


@fault("memory: less is free than the run will need (the free amount injected)")
def memory_foreseen(place: Place) -> Outcome:
    def patch() -> None:
        from groupwise.training import short_memory

        short_memory.available_memory_bytes = lambda: 2**20

    place.write()
    ended = place.run("--dry-run", "model.name=smollm2-135m-instruct", before=patch)
    told(ended, place, "this run will need about", "GiB are free")
    assert ended.exit_code == 0
    return Outcome("said before any weights are loaded, by `--dry-run` too, with what to lower", 0, "nothing was there to keep")


@fault("secrets: in the environment, in a setting, in a URL and in the command")
def secrets(place: Place) -> Outcome:
    values = {name: f"{name.lower()}-5f0c77aa91" for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MY_PASSWORD")}
    named = "sk-settingsettingsetting0123456789"
    function = {"function": f"{place.rewards}:letters", "arguments": {"api_key": named}}
    place.write(rewards={"functions": [function]})
    typed, in_url = "typed-5f0c77aa91", "url-5f0c77aa91"
    ended = place.run(
        f"prompt.system=Be brief. {values['MY_PASSWORD']} See https://host/page?api_key={in_url}",
        f"rewards.functions=[{{function: '{place.rewards}:letters', arguments: {{api_key: {typed}}}}}]",
        environment=values,
    )
    assert ended.exit_code == 0, ended.said
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    found = [path for path in files for value in [*values.values(), named, typed, in_url] if value.encode() in path.read_bytes()]
    assert found == [], found
    return Outcome(f"none of them stands in any of the {len(files)} files of the run's folder", 0, "everything")


def try_fault(name: str, path: Path) -> Outcome:
    """Try one in a folder of its own. Raises AssertionError where a promise is broken, NotTried where it cannot be tried here."""
    return FAULTS[name](Place(path))


def named(words: Sequence[str]) -> list[str]:
    """The faults that ``words`` are names of; a word that is none stands for all whose names begin so."""
    return [name for name in FAULTS if any(name == word if word in FAULTS else name.startswith(word) for word in words)]


def table(rows: dict[str, Outcome]) -> str:
    """A line for each fault. What was said and kept is printed as the faults are tried."""
    return "\n".join(f"- {name}: exit code {row.exit_code}" for name, row in rows.items())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival.faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="faults of these names, or whose names begin so")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/TRIALS.md")
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    rows, broken = {}, 0
    for name in named(chosen.only):
        with tempfile.TemporaryDirectory() as place:
            try:
                rows[name] = try_fault(name, Path(place))
                print(f"{name}: as promised; {rows[name].happened}; kept: {rows[name].kept}", flush=True)
            except NotTried as error:
                print(f"{name}: not tried, {error}", flush=True)
            except Exception:
                broken += 1
                print(f"{name}: BROKEN\n{traceback.format_exc()}", flush=True)
    print(table(rows))
    if chosen.write and not broken:
        write_section("faults", f"{stamp('python -m tests.survival.faults')}\n\n{table(rows)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

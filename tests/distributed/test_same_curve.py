"""One process or several: the same completions, losses, gradients and weights, whatever part of the algorithm is on.

The processes are threads here, which exchange through pickles what processes exchange; test_processes.py has real ones.
"""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from groupwise import rollout
from groupwise.distributed import World
from groupwise.distributed import world as world_module
from groupwise.distributed.failures import Failure, LostTouch
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.episodes import worked_episode
from groupwise.errors import CheckpointError, ConfigError, RankError, RewardError, TrainingError
from groupwise.metrics import Max, Mean, Sum
from groupwise.rewards.load import reward_scope
from groupwise.training import start as start_module
from groupwise.training.checkpoint_folder import is_sound
from tests.training.test_ahead import EngineWithWeights

CLOCKS = ("time", "speed", "memory")
VARIANTS = {
    "grpo": {"algorithm": {"kl": {"beta": 0.04}}},
    "several updates, a steered leash": {
        "algorithm": {"kl": {"beta": 0.04, "target": 0.01, "gain": 0.5}, "updates_per_batch": 2, "loss": {"epsilon": 1e-4}},
        "training": {"steps": 3, "micro_batch_tokens": 60},
    },
    "statistics of the whole batch": {
        "algorithm": {"advantage": {"baseline": "batch_mean", "scale": "batch_std"}, "loss": {"aggregation": "token_mean"}}
    },
    "kl in the reward": {"algorithm": {"kl": {"beta": 0.1, "placement": "reward", "estimator": "k1"}}},
    "kl in each token's reward": {
        "algorithm": {"kl": {"beta": 0.1, "placement": "token_reward", "estimator": "k1"},
                      "advantage": {"baseline": "batch_mean", "scale": "batch_std"}}
    },
    "a learned value": {
        "algorithm": {"advantage": {"type": "gae"}, "kl": None, "value": {"learning_rate": 1e-2}, "updates_per_batch": 2}
    },
    "tokens of the most entropy, a bonus": {"algorithm": {"entropy": {"top_share": 0.3, "bonus": 0.01}}},
    "the sampler's correction, cut completions masked": {
        "algorithm": {"correction": {"level": "token"}, "mask_truncated": True},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 6, "max_completion_tokens": 40},
    },
    "a warm start": {"warm_start": {"steps": 2, "examples_per_step": 5}},
    "an adapter": {"model": {"lora": {"rank": 2, "alpha": 4}}, "optimizer": {"learning_rate": 1e-2}},
    "two rewards, each normalised by itself": {
        "algorithm": {"preset": "gdpo"},
        "rewards": {"functions": [{"function": "letters"}, {"function": "length", "arguments": {"target": 8}}]},
    },
    "ratios of whole completions": {"algorithm": {"preset": "gspo", "updates_per_batch": 2}, "training": {"steps": 3}},
}  # fmt: skip


def told(steps):
    """What the completions were, step by step and group by group."""
    return [[(g.prompt.problem.id, [c.token_ids for c in g.completions], g.rewards) for g in s.groups] for s in steps]


def numbers(step):
    return {name: value for name, value in step.metrics.items() if not name.startswith(CLOCKS)}


def assert_same_run(one, other):
    (steps, result), (other_steps, other_result) = one, other
    assert told(steps) == told(other_steps)
    for step, other_step in zip(steps, other_steps, strict=True):
        found, expected = numbers(other_step), numbers(step)
        lost = "optimizer/updates_lost"  # a share of weights that stand still: one of them more or less is rounding
        assert found.pop(lost, 0) == pytest.approx(expected.pop(lost, 0), abs=1e-3), f"step {step.step}"
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-6), f"step {step.step}"
        for group, other_group in zip(step.advantages, other_step.advantages, strict=True):
            assert other_group == pytest.approx(group, rel=1e-4, abs=1e-5)
    weights, others = (load_file(r.folder / "final_model" / "model.safetensors") for r in (result, other_result))
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


FAST = ("grpo", "several updates, a steered leash", "statistics of the whole batch", "a learned value")


@pytest.mark.parametrize("variant", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FAST)) for one in VARIANTS])
def test_two_processes_are_one(train_in, small_config, variant):
    config = small_config(**VARIANTS[variant])
    one = train_in(1, "one", config)
    assert any(step.metrics.get("optimizer/grad_norm", 0) > 0 for step in one[0]), "something was learnt"
    assert_same_run(one, train_in(2, "two", config))


def test_each_answer_of_a_step_is_graded_by_one_process(train_in, small_config, monkeypatch):
    """Not all by all: math-verify may take seconds for each."""
    graded, grade = [], rollout.grade

    def note(*asked):
        graded.append(threading.current_thread().name)
        return grade(*asked)

    monkeypatch.setattr(rollout, "grade", note)
    train_in(2, "two", small_config())
    assert Counter(graded).keys() == {"process 0 of 2", "process 1 of 2"}
    assert len(graded) == 2 * 3 * 4, "two steps of 3 prompts with 4 completions"


@pytest.mark.slow
def test_more_processes_than_prompts_and_any_budget_are_one_curve(train_in, small_config):
    one = train_in(1, "one", small_config(training={"steps": 3}))
    for size, budget in ((2, 40), (5, 8192)):
        config = small_config(training={"steps": 3, "micro_batch_tokens": budget})
        assert_same_run(one, train_in(size, f"{size} with {budget}", config))


@pytest.mark.slow
def test_refills_and_groups_that_fail_are_counted_over_all(train_in, small_config, letters):
    """A reward that knows only a few values, and fails on some problems: groups without variance are replaced, failures left out."""
    share = letters["letters"]

    def coarse(completions, answer, **columns):
        if int(answer[0]) % 7 == 0:
            raise ValueError("not this one")
        return [float(s > 0.2) for s in share(completions)]

    letters["letters"] = coarse
    config = small_config(
        rollout={"prompts_per_step": 4, "completions_per_prompt": 2, "max_completion_tokens": 6, "refill_rounds": 2},
        rewards={"functions": [{"function": "letters"}], "on_error": "skip"},
        training={"steps": 3},
    )
    one = train_in(1, "one", config)
    assert sum(step.metrics["groups/failed"] for step in one[0]) > 0
    assert any(step.metrics["groups/sampled"] > 4 for step in one[0])
    assert_same_run(one, train_in(3, "three", config))


def test_rewards_with_statistics_and_a_view_of_the_step_see_the_whole_step(train_in, small_config, letters):
    """Ranks within the step, and scores divided by what has been seen so far, mean something only over all processes."""
    share = letters["letters"]

    @reward_scope("batch")
    def ranked(completions, **columns):
        scores = share(completions)
        return [float(sum(other < score for other in scores)) for score in scores]

    letters["letters"] = ranked
    for rewards in ({"normalise": "mean_std"}, {"normalise": "none"}):
        config = small_config(rewards={"functions": [{"function": "letters"}], **rewards}, training={"steps": 3})
        name = rewards["normalise"]
        assert_same_run(train_in(1, f"one {name}", config), train_in(3, f"three {name}", config))


@pytest.mark.parametrize("normalise", ["none", "mean_std"])
def test_scoring_takes_no_longer_where_one_process_samples_longer(train_in, small_config, monkeypatch, normalise):
    """With ``mean_std`` the first process scores everything."""
    serve = BuiltinEngine.serve

    def late(engine, *args, **kwargs):
        if threading.current_thread().name == "process 1 of 2":
            time.sleep(1.0)
        return serve(engine, *args, **kwargs)

    monkeypatch.setattr(BuiltinEngine, "serve", late)
    config = small_config(rewards={"functions": [{"function": "letters"}], "normalise": normalise}, training={"steps": 1})
    ((step,), _) = train_in(2, "two", config)
    assert step.metrics["time/sample_s"] >= 1.0
    assert step.metrics["time/score_s"] < 0.5


def test_the_same_evaluations_and_only_one_process_writes(train_in, small_config):
    config = small_config(
        evaluation={"problems": 5, "modes": ["sampled", "greedy"], "at_start": True}, output={"checkpoint_every": 1}
    )
    folders = [train_in(size, f"run-{size}", config)[1].folder for size in (1, 2)]
    names = [sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        if name.startswith("evaluations/base"):
            assert (folders[0] / name).read_text() == (folders[1] / name).read_text()
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    assert [len(x) for x in lines] == [2, 2]


def test_numbers_are_reduced_by_their_own_rules(in_threads):
    """Means by their counts, largest by largest, sums by adding, times by the slowest; names that some lack are the others'."""
    shares = [
        {"a": Mean(3.0, 3), "b": Max(2.0), "c": Sum(1.0), "time/x_s": Sum(2.0)},
        {"a": Mean(5.0, 1), "b": Max(7.0), "c": Sum(4.0), "time/x_s": Sum(9.0), "only": Mean(1.0, 2)},
    ]
    for reduced in in_threads(2, lambda world: world.reduce(shares[world.rank])):
        assert {name: metric.value for name, metric in reduced.items()} == {
            "a": 2.0, "b": 7.0, "c": 5.0, "time/x_s": 9.0, "only": 0.5
        }  # fmt: skip


def test_gradients_are_added_in_fp32_and_missing_ones_are_zero(in_threads):
    """1 + 2^-9 is not a bf16 number, so a sum in bf16 would be 1; where nobody has a gradient, nobody gets one."""

    def work(world):
        grads = [torch.full((3,), 1.0 if world.rank == 0 else 2.0**-9), torch.ones(2, dtype=torch.bfloat16), None, None]
        if world.rank == 1:
            grads[2] = torch.arange(4.0)

        def zero(index):
            grads[index] = torch.zeros(4)
            return grads[index]

        world.sum_gradients(list(grads), zero)
        return grads

    for grads in in_threads(2, work):
        assert grads[0].tolist() == [1 + 2.0**-9] * 3
        assert grads[1].dtype == torch.bfloat16
        assert grads[1].tolist() == [2.0, 2.0]
        assert grads[2].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert grads[3] is None


def test_gpus_that_do_not_reach_each_other_are_found_before_anything_is_computed(in_threads, monkeypatch, capsys):
    """NCCL connects at its first message. On CPUs there is nothing to try."""
    cpu = torch.device("cpu")
    in_threads(2, lambda world: world._first_message(cpu))

    def tried(problem):
        def work(world):
            world._device, world._all_reduce = torch.device("cuda"), problem
            monkeypatch.setattr(World, "_first_message", lambda self, _: first_message(self, cpu))
            world.try_gpus()

        return in_threads(2, work)

    def lost(tensor):
        raise LostTouch("NCCL error: unhandled system error\nmore")

    def slow(tensor):
        time.sleep(0.3)
        tensor.fill_(2)

    first_message = World._first_message
    monkeypatch.setenv("WORLD_SIZE", "2")
    for here, has_networks in (("2", False), ("1", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        with pytest.raises(RankError, match=r"failed \(NCCL error: unhandled system error\): NCCL_DEBUG=INFO .*_P2P_") as told:
            tried(lost)
        assert ("NCCL_SOCKET_IFNAME" in str(told.value)) is has_networks, "on one machine it is the loopback"
    with pytest.raises(RankError, match=r"add up ones to another number: .*NCCL_DEBUG=INFO"):
        tried(lambda tensor: tensor.fill_(0))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(world_module, "_FIRST_MESSAGE_S", 0.05)
    tried(slow)
    assert capsys.readouterr().err.count("GPUs of 2 processes is not through after") == 1


def test_a_process_that_ended_before_the_gpus_met_is_named(monkeypatch):
    def lost(tensor):
        raise LostTouch("NCCL error: remote process exited")

    world = World(0, 2, board=SimpleNamespace(wait=lambda: Failure(1, "its disk is full", 2)))
    monkeypatch.setattr(world, "_all_reduce", lost)
    with pytest.raises(RankError, match=r"^process 1 of 2 failed: its disk is full$") as told:
        world._first_message(torch.device("cpu"))
    assert told.value.exit_code == 2


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"rewards": {"functions": [{"function": "letters", "weight": 2.0}]}}, r"another rewards\.functions"),
        ({"optimizer": {"learning_rate": 2e-3}}, r"another optimizer\.learning_rate"),
        ({"data": ('"answer": "1"', '"answer": "2"')}, "another fingerprint of the data"),
        ({"data": ("}", ', "level": 1}')}, "another fingerprint of the data's other columns"),
        ({"data": ("}", "}")}, None),
    ],
    ids=["weight", "rate", "answer", "column", "a copy of the data"],
)
def test_processes_with_other_settings_or_data_are_refused_in_all(
    sections, named, small_config, in_threads, letters, quiet, sums, tmp_path, monkeypatch
):
    if "data" in sections:
        old, new = sections["data"]
        (tmp_path / sums.name).write_text(sums.read_text().replace(old, new, 1))
        sections = {"data": {"source": str(tmp_path / sums.name)}}
    configs = [small_config(), small_config(**sections)]
    said = f"^process 1 of 2 has {named} than process 0: start all by one command"
    error, said = (CheckpointError, "far enough") if named is None else (ConfigError, said)

    def stop(*_):
        raise CheckpointError("far enough")

    def begin(world):
        with pytest.raises(error, match=said):
            start_module.start(configs[world.rank], world, rewards=letters, console=quiet, run_folder=tmp_path / "run")

    monkeypatch.setattr(start_module, "_load_parts", stop)
    in_threads(2, begin)
    assert named is None or not (tmp_path / "run").exists()


def test_an_engine_that_one_process_cannot_tell_of_the_weights_ends_all_and_the_step_is_saved(
    train_in, small_config, tmp_path, monkeypatch
):
    class Failing(EngineWithWeights):
        def refresh(self, policy_version):
            if policy_version == 2 and threading.current_thread().name.startswith("process 1"):
                raise TrainingError("out of reach")
            super().refresh(policy_version)

    monkeypatch.setattr(start_module, "make_engine", lambda policy, rollout, *_, **__: Failing(policy, rollout))
    with pytest.raises(TrainingError, match=r"^out of reach; step 2 is saved in .*step-2$"):
        train_in(2, "run", small_config(training={"steps": 3}))
    assert is_sound(tmp_path / "run/checkpoints/step-2")


def test_replicas_that_drift_apart_are_found_and_errors_of_the_first_are_everybodys(in_threads):
    def drifted(world):
        weights = torch.ones(5)
        if world.rank == 1:
            weights[3] = 1 + 2.0**-23
        world.check_equal("the weights", [torch.zeros(2), weights])

    with pytest.raises(RankError, match="weights of process 1 are no longer those of process 0"):
        in_threads(2, drifted)

    def failing(world):
        def action():
            assert world.is_first
            raise RewardError("no")

        with pytest.raises(RewardError, match=r"^no$"):
            world.on_rank0(action)
        return world.on_rank0(lambda: world.rank)

    assert in_threads(3, failing) == [0, 0, 0]


def test_a_warm_start_learns_from_what_the_first_process_played(train_in, small_config, monkeypatch):
    """Tools and environments may answer another one otherwise."""

    def played(*given):
        ((asked, ids, own),) = worked_episode(*given)
        more = threading.current_thread().name == "process 1 of 2"
        return [(asked, ids * (1 + more), own * (1 + more))]

    monkeypatch.setattr("groupwise.training.warm_start.worked_episode", played)
    config = small_config(warm_start={"steps": 2, "examples_per_step": 5})
    assert_same_run(train_in(1, "one", config), train_in(2, "two", config))

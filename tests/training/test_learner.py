"""One update against a slow loop over single completions, and the invariances that make batch sizes mean one thing."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from slow_grpo import (
    END,
    config_of,
    distance,
    learner_of,
    make_groups,
    present_model,
    slow_advantages,
    slow_gradient,
    slow_logprobs,
    slow_loss,
    watch_gradients,
)

from groupwise.algorithm import group_advantages
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.metrics import Sum
from groupwise.training import learner as learner_module
from groupwise.training.learner import BatchPass

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.4, 0.0, 2.0]]


@pytest.fixture(params=["llama", "qwen2", "module"])
def model(request, tiny_llama, tiny_qwen2):
    """The last has biases that the lean decoder does not know, so it is computed by its own module."""
    if request.param == "module":
        return tiny_llama(seed=3, mlp_bias=True)
    return {"llama": tiny_llama, "qwen2": tiny_qwen2}[request.param](seed=3)


def gradient_of(model, groups, config):
    learner, _ = learner_of(copy.deepcopy(model), config)
    seen = watch_gradients(learner)
    learner.learn(groups)
    (gradient,) = seen
    return gradient


def test_the_gradient_is_the_slow_loop_s(model):
    learner, before = learner_of(model, config_of())
    groups = make_groups(before, REWARDS)
    seen = watch_gradients(learner)
    advantages, metrics = learner.learn(groups)
    loss, _ = slow_loss(before, groups)
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5
    assert metrics["policy/loss"].value == pytest.approx(loss.item(), abs=1e-6)
    for found, rewards in zip(advantages, REWARDS, strict=True):
        assert found == pytest.approx(slow_advantages(rewards), abs=1e-12)


TERMS = """
from groupwise.algorithm import LossOutputs, needs

def plain(inputs):
    return LossOutputs(-inputs.advantages_T * inputs.logprobs_T)

@needs("entropy")
def entropy(inputs):
    return LossOutputs(plain(inputs).loss_T - inputs.entropy_T)

@needs("reference")
def reference(inputs):
    return LossOutputs(plain(inputs).loss_T + inputs.logprobs_T - inputs.reference_logprobs_T)
"""


@pytest.mark.parametrize("term", ["plain", "entropy", "reference"])
def test_a_term_without_an_advantage_has_groups_without_variance_too(tiny_llama, tmp_path, term):
    (tmp_path / "terms.py").write_text(TERMS, encoding="utf-8")
    config = config_of(algorithm={"loss": {"type": f"{tmp_path / 'terms.py'}:{term}"}})
    learner, before = learner_of(tiny_llama(seed=3), config)
    groups = make_groups(before, [[1.0, 1.0], [0.0, 0.0]])
    _, metrics = learner.learn(groups)
    assert learner.updates == (term != "plain")
    if term != "plain":
        assert metrics["speed/learnt_tokens"].value == sum(len(c.token_ids) for g in groups for c in g.completions)
        assert metrics["optimizer/grad_norm"].value > 0


def test_temperature_is_part_of_the_logprobs_that_are_trained(tiny_llama):
    learner, before = learner_of(tiny_llama(), config_of(rollout={"temperature": 0.7}))
    groups = make_groups(before, REWARDS, temperature=0.7)
    seen = watch_gradients(learner)
    _, metrics = learner.learn(groups)
    loss, _ = slow_loss(before, groups, temperature=0.7)
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5
    assert metrics["policy/sampler_mismatch"].value < 1e-5


def test_at_ratio_one_the_gradient_is_reinforce_s(model):
    learner, before = learner_of(model, config_of())
    groups = make_groups(before, REWARDS)
    seen = watch_gradients(learner)
    learner.learn(groups)
    loss = 0.0
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            loss = loss - advantage * slow_logprobs(before, group.prompt.token_ids, completion.token_ids).mean() / 12
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5


def test_later_updates_measure_ratio_clip_and_kl_from_the_policy_that_sampled(tiny_qwen2):
    """mu = 3 with a rate so high that the clip bites, and a KL to the reference: all of eq. 3 and 4 at once."""
    settings = {"updates_per_batch": 3, "kl": {"beta": 0.3, "skip_zero_variance": False}, "loss": {"epsilon": 0.05}}
    config = config_of(algorithm=settings, optimizer={"learning_rate": 3e-3, "max_grad_norm": None})
    learner, before = learner_of(tiny_qwen2(), config)
    groups = make_groups(before, REWARDS)
    models, seen, step = [], watch_gradients(learner), learner.optimizer.step

    def watched(rate):
        models.append(present_model(learner, before))
        return step(rate)

    learner.optimizer.step = watched
    _, metrics = learner.learn(groups)
    assert len(seen) == 3
    assert learner.updates == 3
    shares, losses = [], []
    for gradient, model in zip(seen, models, strict=True):
        loss, share = slow_loss(model, groups, old=before, reference=before, beta=0.3, epsilon=0.05)
        assert distance(gradient, slow_gradient(loss, model)) < 1e-5
        shares.append(share)
        losses.append(loss.item())
    assert shares[0] == 0
    assert shares[-1] > 0.1, "the clip was to bite"
    assert metrics["policy/clip_share"].value == pytest.approx(sum(shares) / 3, abs=1e-9)
    assert metrics["policy/loss"].value == pytest.approx(sum(losses) / 3, abs=1e-6), "the mean over updates, not their sum"
    assert metrics["policy/sampler_mismatch"].value < 1e-5, "measured at the first update, before the weights moved"
    texts = [(g.prompt.token_ids, c.token_ids) for g in groups for c in g.completions]
    with torch.no_grad():
        moved = [torch.cat([slow_logprobs(m, *ids) - slow_logprobs(before, *ids) for ids in texts]).exp() for m in models]
    assert metrics["policy/ratio_deviation"].value >= float((moved[-1] - 1).abs().max()) * 0.999 > 0.05
    ratios = [float(ratio_T.mean()) for ratio_T in moved]
    assert metrics["policy/ratio"].value == pytest.approx(sum(ratios) / 3, abs=1e-5)
    for name, of_updates in (("loss", losses), ("clip_share", shares), ("ratio", ratios)):
        assert [metrics[f"updates/{name}_{k}"].value for k in (1, 2, 3)] == pytest.approx(of_updates, abs=1e-5)
    kl = [metrics[f"updates/kl_{k}"].value for k in (1, 2, 3)]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert metrics["policy/kl"].value == pytest.approx(sum(kl) / 3)
    assert kl[2] > 0
    assert metrics["optimizer/grad_norm"].value == max(metrics[f"updates/grad_norm_{k}"].value for k in (1, 2, 3))


def test_the_first_update_is_on_policy_whatever_the_sampler_s_rounding(tiny_llama):
    """Sampling logprobs that are off by rounding do not enter the ratio; they are measured instead."""
    learner, before = learner_of(tiny_llama(), config_of())
    _, metrics = learner.learn([shifted(group) for group in make_groups(before, REWARDS)])
    assert metrics["policy/ratio_deviation"].value == 0
    assert metrics["policy/ratio"].value == 1
    assert not any(name.startswith("updates/") for name in metrics), "one update is what the step's own numbers say"
    assert metrics["policy/sampler_mismatch"].value == pytest.approx(0.01, abs=1e-5)


def shifted(group):
    completions = tuple(replace(c, logprobs=tuple(x + 0.01 for x in c.logprobs)) for c in group.completions)
    return replace(group, completions=completions)


@pytest.mark.parametrize("kl", [None, {"beta": 0.2}])
@pytest.mark.parametrize("budget", [1, 17, 40, 100])
def test_the_token_budget_changes_nothing(tiny_qwen2, budget, kl):
    """A budget of 1 puts every completion into a pass of its own, and 17 and 40 cut groups in the middle."""
    model = tiny_qwen2(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    whole = gradient_of(model, groups, config_of(algorithm={"kl": kl}))
    cut = gradient_of(model, groups, config_of(algorithm={"kl": kl}, training={"micro_batch_tokens": budget}))
    assert distance(cut, whole) < 1e-6


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum", "fixed"])
def test_nor_does_it_under_other_aggregations(tiny_llama, aggregation):
    model = tiny_llama(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    whole, cut = (
        gradient_of(
            model, groups, config_of(algorithm={"loss": {"aggregation": aggregation}}, training={"micro_batch_tokens": budget})
        )
        for budget in (8192, 20)
    )
    assert distance(cut, whole) < 1e-6


@pytest.mark.parametrize("preset", ["gmpo", "vespo", "topr", "dppo"])
def test_nor_does_it_in_a_later_update_where_the_ratios_have_moved(tiny_llama, preset):
    """At ratio 1, as in the first update, their weights are constants. With a large epsilon AdamW makes no step of mere rounding."""
    model = tiny_llama(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)

    def second(budget):
        config = config_of(
            algorithm={"preset": preset, "updates_per_batch": 2}, training={"micro_batch_tokens": budget},
            optimizer={"learning_rate": 0.1, "epsilon": 0.1, "max_grad_norm": None},
        )  # fmt: skip
        learner, _ = learner_of(copy.deepcopy(model), config)
        seen = watch_gradients(learner)
        _, metrics = learner.learn(groups)
        assert metrics["policy/ratio_deviation"].value > 0.1
        return seen[-1]

    whole = second(8192)
    for budget in (1, 40):
        assert distance(second(budget), whole) < 1e-5


def test_the_order_of_completions_in_a_group_changes_nothing(tiny_llama):
    model = tiny_llama(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    order = (2, 0, 3, 1)
    mixed = [
        replace(g, completions=tuple(g.completions[i] for i in order), rewards=tuple(g.rewards[i] for i in order)) for g in groups
    ]
    learners = [learner_of(copy.deepcopy(model), config_of(training={"micro_batch_tokens": 30}))[0] for _ in range(2)]
    gradients = [watch_gradients(learner) for learner in learners]
    plain, other = (learner.learn(given)[0] for learner, given in zip(learners, (groups, mixed), strict=True))
    assert distance(gradients[1][0], gradients[0][0]) < 1e-6
    assert other == [pytest.approx([advantages[i] for i in order]) for advantages in plain]


def test_the_order_of_groups_changes_nothing(tiny_llama):
    model = tiny_llama(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    config = config_of(training={"micro_batch_tokens": 30})
    assert distance(gradient_of(model, groups[::-1], config), gradient_of(model, groups, config)) < 1e-6


def test_advantages_are_those_of_whole_groups_even_where_the_budget_cuts_one(tiny_llama):
    config = config_of(training={"micro_batch_tokens": 1})
    learner, before = learner_of(tiny_llama(), config)
    advantages, _ = learner.learn(make_groups(before, REWARDS))
    assert advantages == [pytest.approx(slow_advantages(rewards)) for rewards in REWARDS]


def test_groups_without_variance_count_in_the_denominator_and_are_not_computed(tiny_llama):
    model = tiny_llama(seed=1)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    varied = [groups[0], groups[2]]
    with_flat, without = gradient_of(model, groups, config_of()), gradient_of(model, varied, config_of())
    assert distance(with_flat, {name: g * 2 / 3 for name, g in without.items()}) < 1e-6
    learner, _ = learner_of(copy.deepcopy(model), config_of())
    _, metrics = learner.learn(groups)
    assert metrics["speed/learnt_tokens"].value == sum(len(c.token_ids) for g in varied for c in g.completions)


def test_groups_without_variance_feel_the_leash_if_they_are_not_skipped(tiny_llama):
    """Their advantages are 0, but eq. 3 sums the KL over every completion: with skipping off none is left out."""
    config = config_of(algorithm={"kl": {"beta": 0.5, "skip_zero_variance": False}}, optimizer={"learning_rate": 3e-3})
    learner, before = learner_of(tiny_llama(), config)
    groups = make_groups(before, REWARDS)
    learner.learn(groups)
    moved = present_model(learner, before)
    seen = watch_gradients(learner)
    learner.learn(groups)
    loss, _ = slow_loss(moved, groups, reference=before, beta=0.5)
    assert distance(seen[0], slow_gradient(loss, moved)) < 1e-5


def test_groups_without_variance_are_skipped_with_a_reference_too(tiny_llama):
    """By default their compute is saved, and their completions still count in the denominator."""
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"kl": {"beta": 0.5}}))
    groups = make_groups(before, REWARDS)
    _, metrics = learner.learn(groups)
    varied = [group for group in groups if group.has_variance]
    assert len(varied) < len(groups)
    assert metrics["speed/learnt_tokens"].value == sum(len(c.token_ids) for g in varied for c in g.completions)


def test_a_batch_baseline_teaches_from_groups_without_variance(tiny_llama):
    """Under a baseline over the batch, a group that scored the same throughout still scored better or worse than others."""
    config = config_of(algorithm={"advantage": {"baseline": "batch_mean", "scale": "none"}})
    learner, before = learner_of(tiny_llama(), config)
    groups = make_groups(before, [[1.0, 1.0], [0.0, 0.0]])
    seen = watch_gradients(learner)
    learner.learn(groups)
    loss = 0.0
    for group, advantage in zip(groups, (0.5, -0.5), strict=True):
        for c in group.completions:
            loss = loss - advantage * slow_logprobs(before, group.prompt.token_ids, c.token_ids).mean() / 4
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5


def test_a_batch_in_which_no_group_varies_makes_no_update(tiny_llama):
    learner, before = learner_of(tiny_llama(), config_of())
    weights = {n: p.detach().clone() for n, p in learner.scorer.named_parameters()}
    advantages, metrics = learner.learn(make_groups(before, [[1.0, 1.0], [0.0, 0.0]]))
    assert advantages == [[0.0, 0.0], [0.0, 0.0]]
    assert metrics == {}
    assert learner.updates == 0
    assert all(torch.equal(weights[n], p) for n, p in learner.scorer.named_parameters())


def windows_of(learner, groups, parts, off_policy=False):
    """The windows of some members each, with the weights that they have in the whole batch."""
    counts, advantages = learner.counts(groups), group_advantages(REWARDS)
    found = []
    for members in parts:
        tokens_N = torch.tensor([len(groups[g].completions[m].token_ids) for g, m in members], dtype=torch.long)
        weights_N = learner.objective.weights(tokens_N, torch.arange(len(members)), counts)
        advantages_N = torch.tensor([advantages[g][m] for g, m in members])
        found.append(learner.window_of(groups, members, weights_N, advantages_N, off_policy=off_policy))
    return found


def test_windows_of_a_batch_add_up_to_the_whole(tiny_llama):
    """Completions dealt over two windows, across groups, with the counts of the whole batch: one gradient, as if nobody had dealt."""
    learner, before = learner_of(tiny_llama(), config_of())
    groups = make_groups(before, REWARDS)
    everyone = [(g, m) for g in range(3) for m in range(4)]
    seen = watch_gradients(learner)
    windows = windows_of(learner, groups, [everyone[::2], [], everyone[1::2]])
    learner.accumulate([BatchPass(window, True) for window in windows])
    learner.step(1e-3)
    loss, _ = slow_loss(before, groups)
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5


def test_a_window_whose_turn_comes_later_is_measured_from_the_policy_that_sampled(tiny_llama):
    """Two optimiser steps on the halves of one batch, at a rate so high that the second one's clip bites."""
    config = config_of(algorithm={"loss": {"epsilon": 0.02}}, optimizer={"max_grad_norm": None})
    learner, before = learner_of(tiny_llama(), config)
    groups = make_groups(before, REWARDS)
    halves = [[(g, m) for g in range(3) for m in members] for members in ((0, 1), (2, 3))]
    seen = watch_gradients(learner)
    first, second = windows_of(learner, groups, halves, off_policy=True)
    learner.accumulate([BatchPass(first, True)])
    learner.step(2e-2)
    moved = present_model(learner, before)
    numbers = learner.accumulate([BatchPass(second, True)])
    learner.step(2e-2)
    advantages = [slow_advantages(rewards) for rewards in REWARDS]
    loss, cut, tokens = 0.0, 0, 0
    for g, m in halves[1]:
        ids = groups[g].prompt.token_ids, groups[g].completions[m].token_ids
        new, old = slow_logprobs(moved, *ids), slow_logprobs(before, *ids).detach()
        ratio = (new - old).exp()
        free, bound = ratio * advantages[g][m], ratio.clamp(0.98, 1.02) * advantages[g][m]
        loss = loss - torch.min(free, bound).mean() / 12
        cut, tokens = cut + int((bound < free).sum()), tokens + len(new)
    assert distance(seen[1], slow_gradient(loss, moved)) < 1e-5
    assert cut > 0, "the clip was to bite"
    assert numbers["detail/clip_low"].value + numbers["detail/clip_high"].value == pytest.approx(cut / tokens)


def test_the_stop_token_is_trained_though_it_is_the_padding(tiny_llama):
    """Pad and end are the same id here, as in SmolLM2. A completion that is nothing but its end token is all gradient."""
    model = tiny_llama()
    assert model.config.pad_token_id == model.config.eos_token_id == END
    learner, before = learner_of(model, config_of(optimizer={"learning_rate": 1e-3}))
    groups = make_groups(before, [[1.0, 0.0]])
    short, long = groups[0].completions
    only_end = replace(short, token_ids=(END,), logprobs=(math.log(0.5),), finish_reason="stop")
    groups = [replace(groups[0], completions=(only_end, long))]
    prompt = groups[0].prompt.token_ids
    with torch.no_grad():
        chance = slow_logprobs(before, prompt, (END,)).item()
    head = watch_gradients(learner)
    learner.learn(groups)
    assert float(head[0]["lm_head.weight"][END].abs().sum()) > 0
    with torch.no_grad():
        after = slow_logprobs(present_model(learner, before), prompt, (END,)).item()
    assert after > chance + 0.01


def test_the_learning_rate_follows_the_schedule_and_the_last_is_logged(tiny_llama):
    config = Config(
        model={"dtype": "float32"},
        algorithm={"kl": None, "updates_per_batch": 2},
        training={"steps": 3},
        optimizer={"learning_rate": 6e-4, "schedule": "linear"},
    )
    learner, before = learner_of(tiny_llama(), config)
    groups = make_groups(before, REWARDS)
    logged = [learner.learn(groups)[1]["optimizer/learning_rate"].value for _ in range(3)]
    assert logged == pytest.approx([5e-4, 3e-4, 1e-4]), "optimiser steps 2, 4 and 6 of 6"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_schedule_goes_by_the_run_s_steps_where_half_of_them_teach_nothing(tiny_llama, schedule):
    """It reaches its end with the run. A batch without variance makes no update, and takes its place all the same."""
    rates = {}
    for flat in (False, True):
        config = config_of(
            algorithm={"updates_per_batch": 2},
            training={"steps": 6},
            optimizer={"learning_rate": 6e-4, "schedule": schedule, "final_fraction": 0.1},
        )
        learner, before = learner_of(tiny_llama(), config)
        nothing, groups = make_groups(before, [[1.0, 1.0], [0.0, 0.0]]), make_groups(before, REWARDS)
        found = [learner.learn(nothing if flat and step % 2 == 0 else groups)[1] for step in range(6)]
        rates[flat] = [m["optimizer/learning_rate"].value for m in found if m]
        assert learner.updates == (6 if flat else 12)
    assert rates[True] == pytest.approx(rates[False][1::2])
    assert rates[True][-1] < 0.2 * 6e-4


def test_warmup_goes_by_updates_that_were_made(tiny_llama):
    """It is there for the optimiser's averages, which batches without variance do not fill."""
    config = config_of(training={"steps": 8}, optimizer={"learning_rate": 4e-4, "warmup_steps": 4})
    learner, before = learner_of(tiny_llama(), config)
    nothing, groups = make_groups(before, [[1.0, 1.0], [0.0, 0.0]]), make_groups(before, REWARDS)
    found = [learner.learn(batch)[1] for batch in (nothing, groups, nothing, nothing, groups, groups, groups, groups)]
    assert [m["optimizer/learning_rate"].value for m in found if m] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4])


def test_a_step_that_is_named_has_the_rate_of_its_place(tiny_llama):
    """As a run that resumes names it."""
    config = config_of(training={"steps": 10}, optimizer={"learning_rate": 1e-3, "schedule": "linear"})
    learner, before = learner_of(tiny_llama(), config)
    groups = make_groups(before, REWARDS)
    assert learner.learn(groups, step=7)[1]["optimizer/learning_rate"].value == pytest.approx(3e-4)
    assert learner.learn(groups)[1]["optimizer/learning_rate"].value == pytest.approx(2e-4)


def test_times_last_until_the_device_is_done(tiny_llama, monkeypatch):
    """By a clock that only waiting for the device moves. On a GPU what is launched is not yet computed."""
    now = [0.0]

    def wait(device):
        now[0] += 100.0

    monkeypatch.setattr(learner_module, "wait_for", wait)
    monkeypatch.setattr(learner_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"kl": {"beta": 0.1}}))
    _, metrics = learner.learn(make_groups(before, [[1.0, 0.0, 1.0]]))
    assert {name: metrics[name].value for name in ("time/reference_s", "time/learn_s", "time/optimizer_s")} == {
        "time/reference_s": 100.0,
        "time/learn_s": 100.0,
        "time/optimizer_s": 100.0,
    }


def test_times_of_an_update_are_those_of_the_slowest_process(tiny_llama):
    """As all times of ``time/`` are. Here the other of two processes takes 1000 s for everything."""

    class Two(World):
        def all_gather_object(self, value):
            return [value, {name: Sum(1000.0) for name in value if str(name).startswith("time/")}]

        def _all_reduce(self, tensor, group=None):
            """The other adds nothing."""

    learner, before = learner_of(tiny_llama(), config_of())
    learner.world = learner.sharding.world = Two(0, 2)
    _, metrics = learner.learn(make_groups(before, REWARDS))
    times = {name: metric.value for name, metric in metrics.items() if name.startswith("time/")}
    assert times == dict.fromkeys(("time/learn_s", "time/exchange_s", "time/optimizer_s"), 1000.0)

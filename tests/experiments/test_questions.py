"""The answers of docs/explanation/questions.md: each experiment's core in miniature, and the page held to the committed numbers."""

import importlib
import re

import pytest
import torch

pytest.importorskip("matplotlib")

from experiments import accumulation, bf16_weights, dithering, group_size, loss_at_zero, loss_spikes, ratio, stop_token
from experiments.common import FIGURES, PAGE, ROOT, environment, main, read_block, read_numbers
from experiments.comparison import newcombe_interval
from experiments.toy import STOP, ToyPolicy, backward, objective
from groupwise.config.schema import OptimizerConfig
from groupwise.metrics import wilson_interval
from groupwise.training.optimizer import MasterAdamW

MODULES = [loss_at_zero, ratio, accumulation, loss_spikes, bf16_weights, dithering, stop_token, group_size]
EXPERIMENTS = [module.EXPERIMENT for module in MODULES]
ANSWERS = ROOT / "docs" / "explanation" / "questions.md"


@pytest.fixture
def tiny(tiny_folder, sums):
    """Settings that put the tiny random model and its sums in the place of the real ones."""
    return [f"model.name={tiny_folder}", f"data.source={sums}", "data.holdout=4", "prompt.system=none",
            "rollout.max_completion_tokens=8", "rollout.completions_per_prompt=4"]  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    policy = ToyPolicy(0)
    return policy, policy.sample(problems=16, group=8)


def test_the_toy_samples_what_it_scores_and_rewards_only_what_stops(batch):
    policy, found = batch
    logprobs = policy.logprobs(found)
    assert torch.equal(logprobs.detach(), found.old_logprobs_T)
    assert len(logprobs) == int(found.lengths_N.sum())
    last = found.tokens_NL.gather(1, found.lengths_N[:, None] - 1)[:, 0]
    assert ((last == STOP) == found.stopped_N).all()
    assert not found.rewards_N[~found.stopped_N].any()
    assert 0 < float(found.rewards_N.mean()) < 0.5


def test_the_ratio_of_the_toy_is_to_the_policy_that_sampled():
    policy = ToyPolicy(0)
    found = policy.sample(problems=4, group=8)
    with torch.no_grad():
        policy.bias += torch.linspace(0, 1, policy.vocabulary)
    assert backward(policy, found, objective(), first=True)["ratio_deviation"] == 0
    assert backward(policy, found, objective(), first=False)["ratio_deviation"] > 0.1


def test_the_loss_is_0_on_policy_and_becomes_beta_times_kl_while_the_reward_rises():
    plain, leashed = (loss_at_zero.train(beta, steps=40, seed=1, rate=0.06) for beta in (0.0, 0.2))
    assert max(abs(x) for x in plain["loss"]) < 1e-6
    assert abs(leashed["loss"][0]) < 1e-6
    assert sum(leashed["reward"][-10:]) > 2 * sum(leashed["reward"][:10])
    assert sum(leashed["loss"][-10:]) > max(0.1, 10 * sum(leashed["loss"][1:3]))
    assert leashed["loss"][-1] == pytest.approx(0.2 * leashed["kl"][-1], rel=0.3)


def test_the_first_ratio_is_exactly_1_and_later_ones_are_not(tiny):
    found = ratio.ratios_by_update(1e-2, 3, [*tiny, "model.dtype=float32"])
    assert found[0]["deviation"] == 0
    assert found[0]["clipped"] == 0
    assert found[1]["deviation"] > 0.001
    assert found[2]["deviation"] > found[1]["deviation"]


def test_three_updates_learn_more_from_the_same_completions():
    one, three = (sum(ratio.reward_by_step(mu, steps=40, seed=0)[-10:]) for mu in (1, 3))
    assert three > 1.2 * one


def test_gradients_of_a_batch_in_four_parts(batch):
    policy, found = batch
    ours, means, undivided, torn = accumulation.CUTS
    by_cut = {cut: (accumulation.whole(policy, found, kind), accumulation.gradient(policy, found, cut))
              for cut, kind in accumulation.CUTS.items()}  # fmt: skip
    torch.testing.assert_close(by_cut[ours][1], by_cut[ours][0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(by_cut[undivided][1], 4 * by_cut[undivided][0], rtol=1e-4, atol=1e-7)
    for cut in (means, torn):
        whole, parts = by_cut[cut]
        assert torch.cosine_similarity(whole, parts, dim=0) < 0.9999, cut
    assert by_cut[torn][1].norm() < 0.7 * by_cut[torn][0].norm()


def test_one_step_at_the_end_of_mu_passes_is_mu_1_under_adam():
    runs = [accumulation.train(accumulation.Variant(parts=2, mu=mu, step_at_end=mu > 1, rate=0.05), completions=2048, seed=0)
            for mu in (1, 3)]  # fmt: skip
    assert runs[0]["steps"] == runs[1]["steps"]
    assert runs[0]["reward"] == pytest.approx(runs[1]["reward"], abs=0.02)


def test_an_undivided_loss_is_nothing_to_adam_and_something_to_sgd():
    def reward(**choices):
        return accumulation.train(accumulation.Variant(parts=4, **choices), completions=2048, seed=0)["reward"]

    assert reward(divided=False) == pytest.approx(reward(), abs=0.02)
    sgd = {"optimizer": "sgd", "rate": 20.0}
    assert reward(divided=False, **sgd) != pytest.approx(reward(**sgd), abs=0.02)


def test_k3_is_its_kl_on_average_and_huge_for_a_token_that_policy_left():
    common, rare = (loss_spikes.two_tokens(p, batches=200) for p in (0.1, 1e-3))
    assert common["typical"] == pytest.approx(common["kl"], rel=0.1)
    assert rare["kl"] < 0.7
    assert rare["one_token"] == pytest.approx(0.5 / 1e-3 - 1 - torch.log(torch.tensor(500.0)).item())
    assert rare["stale"] > 100
    assert rare["worst"] > rare["kl"] > rare["typical"]


def test_where_exp_overflows_and_that_ours_does_not():
    limits = loss_spikes.overflow()
    assert limits["float16"] == pytest.approx(11.09, abs=0.02)
    assert limits["float32"] == pytest.approx(88.72, abs=0.02)
    assert limits["bfloat16"] == pytest.approx(88.7, abs=0.3)


def test_updates_of_1e_6_are_lost_in_bf16_and_kept_in_masters():
    torch.manual_seed(0)
    start = (0.1 * torch.randn(64, 64)).bfloat16()
    gradients = [torch.randn(64, 64) for _ in range(4)]
    small, large = (bf16_weights.replay(start, gradients, rate) for rate in (1e-6, 1e-2))
    assert sum(small["lost"]) > 0.97 * sum(small["meant"])
    assert sum(large["lost"]) < 0.2 * sum(large["meant"])
    assert small["kept_plain"][-1] < 0.1 * small["wanted"][-1]
    assert large["kept_plain"][-1] == pytest.approx(large["wanted"][-1], rel=0.1)
    assert small["kept_nearest"][-1] < 0.1 * small["wanted"][-1], "nor has the nearest number of masters, yet"
    many = bf16_weights.replay((0.1 * torch.randn(700, 512)).bfloat16(), [torch.randn(700, 512) for _ in range(4)], 1e-6)
    for found, rel in ((many, 0.1), (large, 0.05)):
        assert found["kept_dithered"][-1] == pytest.approx(found["wanted"][-1], rel=rel)
    steady = bf16_weights.replay(start, [torch.ones(64, 64)] * 60, 1e-6)
    assert steady["moved_masters"][-1] > 2 * steady["moved_masters"][0], "in masters the same small step adds up"
    assert steady["moved_plain"][-1] < 0.5 * steady["moved_masters"][-1]


def test_the_other_side_of_dithering_is_rounded_to_the_nearest(monkeypatch):
    monkeypatch.setattr(MasterAdamW, "publish", MasterAdamW.publish)  # put back afterwards
    weight = torch.nn.Parameter(torch.linspace(0.125, 0.24, 512).view(2, 256).bfloat16())
    for nearest in (False, True):
        if nearest:
            dithering.to_the_nearest()
        optimizer = MasterAdamW([("w", weight)], OptimizerConfig())
        optimizer.masters[0].add_(2e-4)
        optimizer.publish()
        assert torch.equal(weight.detach(), optimizer.masters[0].bfloat16()) is nearest


def test_a_masked_stop_token_has_no_gradient_of_its_own(batch):
    policy, found = batch
    only_stops = objective(
        advantage={"baseline": "none", "scale": "none"}, loss={"type": "reinforce", "aggregation": "sequence_sum"}
    )
    gradients = []
    for train_stop in (True, False):
        policy.bias.grad = None
        backward(policy, found, only_stops, train_stop=train_stop)
        gradients.append(policy.bias.grad[:, STOP].sum())
    assert gradients[0] < 0, "trained: stopping where it was rewarded becomes likelier"
    assert gradients[1] > 0, "masked: every other rewarded token makes it unlikelier"


def test_groups_that_vary():
    assert group_size.share_with_variance(0.5, 2) == 0.5
    draws = torch.rand(20000, 8, generator=torch.Generator().manual_seed(0)) < 0.05
    varying = (draws.any(1) & ~draws.all(1)).double().mean()
    assert group_size.share_with_variance(0.05, 8) == pytest.approx(float(varying), abs=0.01)


def test_tokens_that_do_not_matter_add_noise():
    short, long = (group_size.gradient_noise(group_size.toy_of_length(n), 8, batches=60) for n in (4, 32))
    assert long > 1.5 * short


def test_every_real_part_runs_on_a_tiny_model(tiny, tmp_path):
    weights, gradients = bf16_weights.gradients_of_batches(2, [*tiny, "model.dtype=bfloat16"])
    assert [len(x) for x in gradients] == [2] * len(weights)
    judged = stop_token.train_real(False, steps=1, problems=2, settings=[*tiny, "model.dtype=float32"])
    assert [row["limit"] for row in judged] == list(stop_token.LIMITS)
    cut = group_size.token_limits(2, 2, tiny)
    assert [row["cut"] for row in cut] == sorted((row["cut"] for row in cut), reverse=True)
    assert loss_spikes.rounding(tiny)["largest_ratio_deviation"] < 0.05


def test_an_experiment_writes_numbers_and_figure_and_can_be_redrawn(tmp_path, capsys):
    small = loss_at_zero.EXPERIMENT
    small = type(small)(small.name, lambda: loss_at_zero.measure(steps=6, seeds=1), small.draw, small.report)
    before = PAGE.read_text(encoding="utf-8")
    numbers = main(small, ["--out", str(tmp_path)])
    drawn = (tmp_path / "loss_at_zero.svg").read_bytes()
    assert read_numbers("loss_at_zero", tmp_path) == numbers
    main(small, ["--out", str(tmp_path), "--redraw"])
    assert (tmp_path / "loss_at_zero.svg").read_bytes() == drawn, "the same numbers give the same file"
    assert b"<text" in drawn, "words stay words"
    assert PAGE.read_text(encoding="utf-8") == before, "another folder leaves the page alone"
    assert environment()["torch"] in capsys.readouterr().out


def measured():
    return [pytest.param(e, id=e.name) for e in EXPERIMENTS if (FIGURES / f"{e.name}.json").exists()]


@pytest.mark.parametrize("experiment", measured())
def test_the_page_shows_the_numbers_that_are_committed(experiment, tmp_path):
    numbers = read_numbers(experiment.name)
    assert read_block(PAGE, experiment.name) == experiment.report(numbers)
    experiment.draw(numbers, tmp_path / "again.svg")
    committed = FIGURES / f"{experiment.name}.svg"
    assert committed.stat().st_size < 100_000
    assert len(re.findall("<text", committed.read_text(encoding="utf-8"))) >= 5


def test_the_intervals_of_14_and_27_of_30_are_those_of_the_page():
    text = ANSWERS.read_text(encoding="utf-8")
    for right in (14, 27):
        low, high = wilson_interval(right, 30)
        assert f"{low:.1%} to {high:.1%}" in " ".join(text.split())
    low, high = newcombe_interval(27, 30, 14, 30)
    assert f"of the difference {100 * low:.1f} to {100 * high:.1f} points" in " ".join(text.split())
    assert all(newcombe_interval(14, 30, other, 30)[0] < 0 for other in (7, 11, 12)), "none is clearly below"


def test_the_readme_lists_every_experiment():
    listed = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "experiments" / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    runnable = {
        p.stem
        for p in (ROOT / "experiments").glob("*.py")
        if re.search(r"^(EXPERIMENT|COMPARISON|MODES\b.*) =", p.read_text(), re.M)
    }
    assert listed == runnable
    assert all(importlib.import_module(f"experiments.{name}").__doc__ for name in listed)


def means(runs):
    return sum(accumulation.final(runs)) / len(runs)


def test_what_the_answers_claim_is_in_the_committed_numbers():
    """One line for each statement of the page that a number carries."""
    loss, ratios, parts, bf16, stops = (
        read_numbers(n) for n in ("loss_at_zero", "ratio", "accumulation", "bf16_weights", "stop_token")
    )
    assert max(loss["first_loss"].values()) < 1e-6
    assert loss["largest_loss_without_kl"] < 1e-6
    for beta in ("0.04", "0.2"):
        curves = loss["curves"][beta]
        assert sum(curves["loss"][-20:]) > 3 * sum(curves["loss"][:20]) > 0
        assert sum(curves["reward"][-20:]) > 2 * sum(curves["reward"][:20])

    real = ratios["real"]
    assert all(found[0]["deviation"] == 0 for found in real.values())
    width = {name: [x["quantiles"][-1] - x["quantiles"][0] for x in found] for name, found in real.items()}
    assert width["float32, 1e-6"] == sorted(width["float32, 1e-6"]), "the fp32 policy moves with every update"
    assert width["bfloat16, 1e-6"][1] > 0.8 * width["bfloat16, 1e-6"][3], "the bf16 ratios are rounding from the first update on"
    assert width["bfloat16, 1e-6"][1] > 2 * width["float32, 1e-6"][1]
    assert 0.4 < real["float32, 2e-5"][-1]["clipped"] < 0.6
    assert real["bfloat16, 2e-5"][-1]["clipped"] < 0.1
    end = {mu: sum(curve[-20:]) for mu, curve in ratios["toy"].items()}
    assert end["3"] > 1.1 * end["1"]
    assert abs(end["8"] - end["3"]) < 0.1 * end["3"]

    reward = {name.strip(): means(runs) for name, runs in parts["runs"].items()}
    often, seldom = reward["a step every 32 completions"], reward["a step every 128 (4 x 32, divided)"]
    assert seldom < often - 0.05
    assert reward["the same, rate x 2"] > often - 0.02
    for same in ("the same, not divided", "the same, clipped at 0.1", "mu = 3, one step at the end"):
        assert reward[same] == pytest.approx(seldom, abs=0.01), same
    assert reward["SGD, 4 x 32, not divided"] < reward["SGD, 4 x 32, divided"] - 0.1
    cuts = list(parts["cuts"].values())
    assert cuts[0] == {"length": 1.0, "angle": pytest.approx(0, abs=0.1)}
    assert cuts[1]["angle"] < 5
    assert cuts[2]["length"] == pytest.approx(4, abs=0.01)
    assert cuts[3]["length"] < 0.5
    assert cuts[3]["angle"] > 30

    assert bf16["rates"]["1e-6"]["rounded_away"] > 0.99
    assert bf16["rates"]["1e-6"]["moved_masters"][-1] < 0.02

    trained, masked = stops["real"]["trained"], stops["real"]["masked"]
    assert all(a["stopped"] > b["stopped"] + 0.2 for a, b in zip(trained, masked, strict=True))
    assert all(a["format"] > b["format"] + 0.2 for a, b in zip(trained, masked, strict=True))
    assert all(abs(a["strict"] - b["strict"]) < 0.1 for a, b in zip(trained, masked, strict=True))
    assert masked[1]["tokens"] > 2 * trained[1]["tokens"]
    toy = stops["toy"]
    assert toy["masked"]["tokens"][-1] > toy["trained"]["tokens"][-1] + 0.5
    assert sum(toy["masked"]["reward"][-10:]) > 0.8 * sum(toy["trained"]["reward"][-10:])


def test_what_the_answers_claim_about_spikes_and_groups_is_in_the_committed_numbers():
    spikes, groups = read_numbers("loss_spikes"), read_numbers("group_size")
    k3 = spikes["estimates"]["k3"]
    assert round(k3[loss_spikes.DIFFERENCES.index(5.0)]) == 142
    assert round(k3[loss_spikes.DIFFERENCES.index(10.0)], -3) == 22000
    assert all(x["kl"] < 0.7 and x["typical"] < 0.7 for x in spikes["two_tokens"].values())
    assert spikes["two_tokens"]["0.0001"]["worst"] > 10
    assert spikes["two_tokens"]["0.001"]["stale"] > 100
    assert not spikes["at_100_nats"]["naive_is_finite"]
    assert spikes["at_100_nats"]["gradient_is_finite"]
    noise = list(groups["by_size"].values())
    assert min(noise) < min(noise[0], noise[-1])
    lengths = {int(n): x for n, x in groups["by_length"].items()}
    assert lengths[64] / lengths[8] == pytest.approx((64 / 8) ** 0.5, rel=0.15)

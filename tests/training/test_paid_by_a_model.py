"""Runs with reward models: named in the config or handed over from Python, by themselves and beside functions."""

import asyncio
import functools

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from groupwise import RewardModel
from groupwise.errors import RewardError
from groupwise.rewards.load import named_rewards
from groupwise.training.loop import train
from groupwise.training.setup import prepare


@pytest.fixture(scope="session")
def judge_folder(tiny_folder, tmp_path_factory):
    """A random judge of the tiny model's tokenizer, with marked opinions."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=None,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


def entry(folder, **settings):
    return {"model": {"name": str(folder), "device": "cpu", **settings.pop("model", {})}, **settings}


def judged(judge, group):
    prompts = [[dict(m) for m in group.prompt.messages]] * len(group.completions)
    return judge(prompts, [[{"role": "assistant", "content": c.text}] for c in group.completions])


def test_a_run_is_paid_by_its_reward_model(small_config, judge_folder, tmp_path, quiet):
    config = small_config(rewards={"functions": [entry(judge_folder, weight=0.5), {"function": "length", "weight": 2.0}]})
    reports = []
    train(config, run_folder=tmp_path / "run", console=quiet, on_step=reports.append)
    seen = [group for report in reports for group in report.groups]
    assert len(seen) == 6
    judge = RewardModel(judge_folder, device="cpu")
    for group in seen:
        assert group.components["judge"] == pytest.approx(judged(judge, group), abs=1e-4)
        parts = zip(group.components["judge"], group.components["length"], strict=True)
        assert group.rewards == pytest.approx([0.5 * j + 2 * n for j, n in parts])
    assert len({score for group in seen for score in group.components["judge"]}) > 6
    assert reports[0].metrics["reward_model/truncated_judge"] == 0
    assert reports[0].metrics["reward_model/tokens_mean_judge"] > 20


def test_what_is_too_long_for_it_is_counted_in_every_step(small_config, judge_folder, tmp_path, quiet):
    config = small_config(rewards={"functions": [entry(judge_folder, model={"max_input_tokens": 12}, normalise="mean_std")]})
    numbers = []
    train(config, run_folder=tmp_path / "run", console=quiet, on_step=lambda report: numbers.append(report.metrics))
    assert [row["reward_model/truncated_judge"] for row in numbers] == [1.0, 1.0]
    assert [row["reward_model/tokens_mean_judge"] for row in numbers] == [12.0, 12.0]
    assert numbers[0]["shaping/mean_judge"] == pytest.approx(numbers[0]["reward/judge"])


def test_its_weights_are_there_before_the_policy_is_read_and_only_once(small_config, judge_folder, tmp_path, quiet, monkeypatch):
    from groupwise.models import reward_model
    from groupwise.training import start

    order = []
    for module, name in ((reward_model, "load_classifier"), (start, "_load")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: order.append(name) or real(*a))
    prepare(small_config(rewards={"functions": [entry(judge_folder)]}))
    assert order == [], "a dry run reads no weights"
    train(small_config(rewards={"functions": [entry(judge_folder)]}), run_folder=tmp_path / "run", console=quiet)
    assert order == ["load_classifier", "_load"]


# --- from Python ------------------------------------------------------------------------------------------------------


def share(completions, **columns):
    return [sum(map(str.isalpha, c[-1]["content"])) / 8 for c in completions]


async def slowly(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(c[-1]["content"])) for c in completions]


class Liking:
    def __init__(self, letter):
        self.letter = letter

    def __call__(self, completions, **columns):
        return [float(c[-1]["content"].count(self.letter)) for c in completions]


def scaled(completions, factor, **columns):
    return [factor * len(c[-1]["content"]) for c in completions]


def test_functions_lambdas_async_objects_and_reward_models_in_one_list(small_config, judge_folder, tmp_path, quiet):
    judge = RewardModel(judge_folder, device="cpu")
    given = [
        share,
        lambda completions, **columns: [1.0] * len(completions),
        lambda completions, answer: [float(a in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)],
        slowly,
        Liking("a"),
        functools.partial(scaled, factor=0.5),
        judge,
    ]
    assert list(named_rewards(given)) == ["share", "lambda", "lambda_2", "slowly", "Liking", "scaled", "judge"]
    seen = []
    config = small_config(rewards={"functions": [{"function": "share", "weight": 3.0}]})
    train(config, rewards=given, run_folder=tmp_path / "run", console=quiet, on_step=lambda r: seen.extend(r.groups))
    for group in seen:
        texts, parts = [c.text for c in group.completions], group.components
        assert parts["slowly"] == tuple(map(len, texts))
        assert parts["scaled"] == tuple(0.5 * len(text) for text in texts)
        assert parts["Liking"] == tuple(text.count("a") for text in texts)
        assert parts["judge"] == pytest.approx(judged(judge, group), abs=1e-4)
        weights = {"share": 3.0}
        sums = [sum(weights.get(name, 1.0) * parts[name][i] for name in parts) for i in range(len(texts))]
        assert group.rewards == pytest.approx(sums)


def test_one_function_alone(small_config, tmp_path, quiet):
    config = small_config(rewards={"functions": [{"function": "share"}]}, training={"steps": 1})
    seen = []
    train(config, rewards=share, run_folder=tmp_path / "run", console=quiet, on_step=lambda r: seen.extend(r.groups))
    assert all(list(group.components) == ["share"] for group in seen)


def test_a_bare_model_and_a_name_are_refused_with_what_to_write(small_config, judge_folder):
    model = LlamaForSequenceClassification.from_pretrained(judge_folder)
    config = small_config(rewards={"functions": [{"function": "length"}]})
    with pytest.raises(RewardError, match=r"without its tokenizer: hand over groupwise\.RewardModel\(model, tokenizer\)"):
        prepare(config, [model])
    with pytest.raises(RewardError, match="reward 'str' is a text: name functions in the config"):
        prepare(config, ["length"])

"""What CONTRIBUTING.md shows is done as it says: a reward scores, a loss has its gradient, an engine samples, a data set is found by its
name, a family equals transformers."""

import json
import re
from pathlib import Path

import pytest
import torch

from groupwise.algorithm import LossInputs, Objective
from groupwise.config.schema import AlgorithmConfig, Config, DataConfig, RolloutConfig
from groupwise.data.named import NAMED
from groupwise.data.sources import load_problems
from groupwise.engines import SamplingSettings, make_engine
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.families import FAMILIES
from groupwise.models.load import Policy
from groupwise.rewards.suite import RewardSuite
from groupwise.types import Problem, Prompt

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def example(title):
    (code,) = re.findall(rf"^```python\n# {title}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return code


def test_the_reward_scores_by_its_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(example("a reward"), encoding="utf-8")
    rewards = Config(rewards={"functions": [{"function": f"{path}:ends_with_a_stop"}]}).rewards
    suite = RewardSuite.from_config(rewards, "xml")
    (function,) = [reward.function for reward in suite.rewards]
    talks = [[{"role": "assistant", "content": text}] for text in ("It is 4.", "It is 4", "")]
    assert function(completions=talks) == [1.0, 0.0, 0.0]


def test_the_loss_is_a_policy_gradient_that_tilts(tmp_path):
    path = tmp_path / "my_loss.py"
    path.write_text(example("a loss"), encoding="utf-8")
    objective = Objective.from_config(AlgorithmConfig(loss={"type": f"{path}:loss", "settings": {"tilt": 0.25}}, kl=None))
    logprobs_T = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages_T, sequence_T = torch.tensor([2.0, 2.0, -3.0]), torch.tensor([0, 0, 1])
    objective.loss(LossInputs(logprobs_T, logprobs_T.detach(), advantages_T, sequence_T, 2)).loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == [-0.5, -0.5, 3.0]


def test_the_engine_samples_by_its_file(tmp_path):
    class Letters:
        def encode(self, text, add_special_tokens):
            return [ord(letter) for letter in text]

    path = tmp_path / "my_engine.py"
    path.write_text(example("an engine"), encoding="utf-8")
    engine = make_engine(Policy(None, Letters(), (2, 3), 256, "some/model"), RolloutConfig(engine=f"{path}:ByRote"))
    engine.refresh(7)
    prompts = [Prompt(Problem(name, "", ""), "", (5, 6)) for name in "ab"]
    groups = engine.sample(prompts, 3, SamplingSettings(max_tokens=30, temperature=0.7), seed=1, scope="s")
    assert [[(c.sample, c.policy_version, c.temperature) for c in group] for group in groups] == [
        [(i, 7, 0.7) for i in range(3)]
    ] * 2
    assert {bytes(c.token_ids).decode() for group in groups for c in group} == {"<answer>4</answer>\x02"}
    assert {len(c.logprobs) for group in groups for c in group} == {19}


def test_the_data_set_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.data.named.NAMED", NAMED)
    before = dict(NAMED)
    try:
        exec(example("a data set"), {})
        (name,) = NAMED.keys() - before.keys()
        for split, question in (("train", "2 + 2 = ?"), (NAMED[name].eval_split, "1 + 3 = ?")):
            row = {"question": question, "answer": "4"}
            (tmp_path / f"{name}_{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        problems = load_problems(DataConfig(source=name, folder=str(tmp_path), eval_split=NAMED[name].eval_split))
    finally:
        for name in NAMED.keys() - before.keys():
            del NAMED[name]
    assert [(problem.question, problem.answer) for problem in problems.train] == [("2 + 2 = ?", "4")]
    assert [problem.question for problem in problems.held_out] == ["1 + 3 = ?"]


def test_the_family_is_computed_as_transformers_does():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tests.conftest import TINY, tiny_model

    kinds = ["sliding_attention", "full_attention"]
    config = transformers.AutoConfig.for_model("ministral", **TINY, head_dim=16, sliding_window=6, layer_types=kinds)
    model = tiny_model(config, seed=0)
    assert why_unsupported(model) is not None, "without its row the module computes it"
    prompt, completions = list(range(5, 14)), [[20, 31, 7, 90, 14], [3, 3, 77]]
    try:
        exec(example("a family"), {})
        decoder = Decoder(tiny_model(config, seed=0))
        ours = decoder.logprobs(decoder.prepare([(prompt, completions)])).detach()
    finally:
        FAMILIES.pop("ministral", None)
    expected = []
    for completion in completions:
        ids = torch.tensor([prompt + completion])
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(scores.gather(1, ids[0, len(prompt) :, None])[:, 0].detach())
    torch.testing.assert_close(ours, torch.cat(expected), rtol=1e-5, atol=1e-5)

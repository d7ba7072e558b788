"""Losses and advantages of the user's own: by name, by place, in a config, and what is refused before anything is loaded."""

import textwrap

import pytest
import torch
from nested import inputs_of

from groupwise.algorithm import AdvantageOutputs, LossOutputs, Objective, needs, policy_loss, register_advantage, register_loss
from groupwise.algorithm.advantages import ADVANTAGES
from groupwise.algorithm.losses import LOSSES
from groupwise.config.load import load_config
from groupwise.config.schema import AlgorithmConfig
from groupwise.config.section import REGISTERED
from groupwise.errors import ConfigError

MINE = """
    from groupwise.algorithm import AdvantageOutputs, LossOutputs, needs

    def loss(inputs, *, power=1.0):
        "REINFORCE with the probability to a power in front."
        weight_T = (power * inputs.logprobs_T.detach()).exp()
        return LossOutputs(-weight_T * inputs.advantages_T * inputs.logprobs_T)

    @needs("entropy")
    def curious(inputs, *, weight):
        return LossOutputs(-inputs.advantages_T * inputs.logprobs_T - weight * inputs.entropy_T)

    def mean_loss(inputs):
        return LossOutputs((-inputs.advantages_T * inputs.logprobs_T).mean())

    def ranks(inputs):
        "The rank of each completion in its group, centred."
        groups = inputs.by_group(inputs.rewards_N)
        found = [[sorted(g).index(r) - (len(g) - 1) / 2 for r in g] for g in groups]
        return AdvantageOutputs(inputs.rewards_N.new_tensor([x for g in found for x in g]))
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE), encoding="utf-8")
    return path


def given():
    return {
        "logprobs_T": torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True),
        "sequence_T": torch.tensor([0, 0, 1]),
        "advantages_N": torch.tensor([1.0, -0.5], dtype=torch.float64),
        "weights_T": torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),
    }


def test_a_loss_by_place_is_weighted_like_ours(mine):
    config = load_config(None, [f"algorithm.loss.type={mine}:loss", "algorithm.loss.settings={power: 2.0}", "algorithm.kl=null"])
    inputs = given()
    loss, metrics = policy_loss(Objective.from_config(config.algorithm), **inputs)
    loss.backward()
    lp = inputs["logprobs_T"].detach()
    weight = (2 * lp).exp() * torch.tensor([0.25, 0.25, -0.25]).double()
    assert loss.item() == pytest.approx(float(-(weight * lp).sum()))
    torch.testing.assert_close(inputs["logprobs_T"].grad, -weight)
    assert metrics["clip_low"].value == metrics["clip_high"].value == 0


def test_a_loss_that_averages_by_itself_is_refused(mine):
    objective = Objective.from_config(AlgorithmConfig(loss={"type": f"{mine}:mean_loss"}, kl=None))
    with pytest.raises(ValueError, match=r"shape \(\), but it must return one number for each of the 3 tokens.*aggregation"):
        policy_loss(objective, **given())


def test_a_loss_asks_for_entropies(mine):
    objective = Objective.from_config(AlgorithmConfig(loss={"type": f"{mine}:curious", "settings": {"weight": 0.1}}, kl=None))
    assert objective.needs_entropy
    assert not objective.needs_reference
    entropy_T = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    plain = policy_loss(Objective.from_config(AlgorithmConfig(loss={"type": "reinforce"}, kl=None)), **given())[0]
    curious = policy_loss(objective, **given(), entropy_T=entropy_T)[0]
    assert curious.item() == pytest.approx(plain.item() - 0.1 * (0.25 * 1 + 0.25 * 2 + 0.5 * 3))


def test_an_advantage_by_place(mine):
    objective = Objective.from_config(AlgorithmConfig(advantage={"type": f"{mine}:ranks"}))
    found = objective.advantages(inputs_of([[0.0, 5.0, 0.1], [1.0, 2.0]]))
    assert found.advantages_N.tolist() == [-1.0, 1.0, 0.0, -0.5, 0.5]


def test_by_registered_name(monkeypatch):
    monkeypatch.setattr("groupwise.algorithm.registry.LOSSES", {**LOSSES})
    monkeypatch.setattr("groupwise.algorithm.registry.ADVANTAGES", {**ADVANTAGES})
    for what, functions in REGISTERED.items():
        monkeypatch.setitem(REGISTERED, what, dict(functions))

    @register_loss("twice")
    def twice(inputs, *, factor=2.0):
        return LossOutputs(-factor * inputs.advantages_T * inputs.logprobs_T)

    @register_advantage("raw")
    def raw(inputs):
        return AdvantageOutputs(inputs.rewards_N)

    objective = Objective.from_config(AlgorithmConfig(loss={"type": "twice"}, advantage={"type": "raw"}, kl=None))
    plain = policy_loss(Objective.from_config(AlgorithmConfig(loss={"type": "reinforce"}, kl=None)), **given())[0]
    assert policy_loss(objective, **given())[0].item() == 2 * plain.item()
    assert objective.advantages(inputs_of([[1.0, 0.0]])).advantages_N.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ({"type": "nowhere.py:loss"}, r"loss file 'nowhere.py' does not exist"),
        ({"type": "{mine}:lost"}, r"there is no function 'lost' in .*did you mean 'loss'"),
        (
            {"type": "{mine}:loss", "settings": {"powr": 2}},
            r"has 'powr', but .* takes no such keyword \(did you mean 'power'\?\)",
        ),
        ({"type": "{mine}:curious"}, r"settings lacks weight"),
        ({"type": "{mine}:MINE"}, r"there is no function 'MINE'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(mine, loss, sentence):
    loss = {**loss, "type": loss["type"].replace("{mine}", str(mine))}
    with pytest.raises(ConfigError, match=sentence):
        Objective.from_config(AlgorithmConfig(loss=loss, kl=None))


def test_a_need_that_there_is_not():
    with pytest.raises(ConfigError, match="a loss may need reference or entropy"):
        needs("gradients")

"""Losses and advantages of the user's own: by name, by place, in a config, and what is refused before anything is loaded."""

import math
import re
import textwrap

import pytest
import torch
from nested import inputs_of

from groupwise.algorithm import AdvantageOutputs, LossOutputs, Objective, needs, policy_loss, register_advantage, register_loss
from groupwise.algorithm.advantages import ADVANTAGES
from groupwise.algorithm.losses import LOSSES
from groupwise.config.formula import formula
from groupwise.config.load import load_config
from groupwise.config.schema import AlgorithmConfig
from groupwise.config.section import REGISTERED
from groupwise.errors import ConfigError, TrainingError

MINE = """
    from groupwise.algorithm import AdvantageOutputs, LossOutputs, needs

    def loss(inputs, *, power=1.0):
        "REINFORCE with the probability to a power in front."
        weight_T = (power * inputs.logprobs_T.detach()).exp()
        return LossOutputs(-weight_T * inputs.advantages_T * inputs.logprobs_T)

    @needs("entropy")
    def curious(inputs, *, weight):
        return LossOutputs(-inputs.advantages_T * inputs.logprobs_T - weight * inputs.entropy_T)

    def annotated(inputs, *, power: float = 1.0, sides: tuple[int, int] = (0, 0)) -> LossOutputs:
        return LossOutputs(-power * inputs.advantages_T * inputs.logprobs_T)

    annotated.formula = "-power A log pi(o_it)"

    def mean_loss(inputs):
        return LossOutputs((-inputs.advantages_T * inputs.logprobs_T).mean())

    @needs("values")
    def above_the_value(inputs):
        "The reward less the value of the state before each token, which learns the reward."
        rewards_T = inputs.rewards_N[inputs.sequence_T]
        return AdvantageOutputs(advantages_T=rewards_T - inputs.values_T, returns_T=rewards_T)

    class Ranks:
        def __init__(self, inputs):
            self.advantages_N = inputs.rewards_N

    @needs("values")
    def greedy(inputs):
        return LossOutputs(-inputs.logprobs_T)

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
    with pytest.raises(
        TrainingError, match=r"shape \(\) as loss_T, but it must return one number for each of the 3 tokens.*aggregation"
    ):
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
        (
            {"type": "{mine}:annotated", "settings": {"power": "abc"}},
            r"loss\.settings\.power is 'abc', but .*valid number.*: correct it",
        ),
        ({"type": "{mine}:annotated", "settings": {"sides": [1, None]}}, r"loss\.settings\.sides is \[1, None\], but .*integer"),
        ({"type": "{mine}:curious"}, r"settings lacks weight"),
        ({"type": "{mine}:MINE"}, r"there is no function 'MINE'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(mine, loss, sentence):
    loss = {**loss, "type": loss["type"].replace("{mine}", str(mine))}
    with pytest.raises(ConfigError, match=sentence):
        Objective.from_config(AlgorithmConfig(loss=loss, kl=None))


def test_an_advantage_asks_for_values_and_the_config_says_how_they_are_learned(mine):
    own = {"type": f"{mine}:above_the_value"}
    objective = Objective.from_config(AlgorithmConfig(advantage=own, value={"critic": "copy"}))
    assert objective.needs_values
    assert AlgorithmConfig(advantage=own, value={}).needs_values
    with pytest.raises(ConfigError, match=r"which needs values, but algorithm\.value is null.*write algorithm\.value=\{\}"):
        Objective.from_config(AlgorithmConfig(advantage=own))
    with pytest.raises(
        ConfigError, match=r"algorithm\.value is set, but '.*:ranks' does not ask for values: leave algorithm\.value out"
    ):
        Objective.from_config(AlgorithmConfig(advantage={"type": f"{mine}:ranks"}, value={}))
    assert AlgorithmConfig(preset="ppo", advantage=own, value={}).value.clip == 0.2, "the preset's"
    assert AlgorithmConfig(preset="ppo", advantage={"type": f"{mine}:ranks"}).value is None


def test_reading_a_config_runs_none_of_its_code(tmp_path):
    AlgorithmConfig(advantage={"type": f"{tmp_path}/none.py:f"}, loss={"type": f"{tmp_path}/none.py:f"}, value={})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (torch.zeros(3), "the advantage returned a Tensor, but it must return AdvantageOutputs: return AdvantageOutputs"),
        (AdvantageOutputs(torch.zeros(3)), "a tensor of shape (3,) as advantages_N, but it must return one number for each of the 2 comp"),
        (AdvantageOutputs([1.0, 2.0]), "the advantage returned a list as advantages_N"),
        (AdvantageOutputs(advantages_T=torch.zeros(1)), "shape (1,) as advantages_T"),
        (AdvantageOutputs(), "neither advantages_N nor advantages_T"),
        (AdvantageOutputs(torch.tensor([1.0, math.nan])), "nan in advantages_N for completion 1 of the step, whose reward is 0"),
        (AdvantageOutputs(advantages_T=torch.tensor([math.inf, 0.0])), "inf in advantages_T for completion 0 of the step"),
        (AdvantageOutputs(torch.ones(2), returns_T=torch.tensor([0.0, -math.inf])), "-inf in returns_T for completion 1"),
        (AdvantageOutputs(torch.ones(2), metrics={"x": 0.3}), "a float as metric 'x', but a metric must know"),
    ],
)  # fmt: skip
def test_what_an_advantage_may_not_return(found, sentence):
    with pytest.raises(TrainingError, match=re.escape(sentence)):
        Objective(advantage=lambda inputs: found).advantages(inputs_of([[1.0, 0.0]]))


def test_an_advantage_that_forgets_rewards_of_steps_is_told():
    objective = Objective(advantage=lambda inputs: AdvantageOutputs(inputs.rewards_N))
    with pytest.raises(TrainingError, match=r"did not read inputs\.steps, but steps rewarded steps.*weight of 0"):
        objective.advantages(inputs_of([[1.0, 0.0]], steps=[[[(0, 1.0)], []]]))
    objective.advantages(inputs_of([[1.0, 0.0]]))
    watchful = Objective(advantage=lambda inputs: AdvantageOutputs(inputs.rewards_N + len(inputs.steps)))
    watchful.advantages(inputs_of([[1.0, 0.0]], steps=[[[(0, 1.0)], []]]))


def test_a_value_that_is_not_finite_is_no_fault_of_the_advantage():
    """The update is dropped, and counted."""

    @needs("values")
    def surprise(inputs):
        rewards_T = inputs.rewards_N[inputs.sequence_T]
        return AdvantageOutputs(advantages_T=rewards_T - inputs.values_T, returns_T=rewards_T)

    found = Objective(advantage=surprise).advantages(inputs_of([[1.0, 0.0]], values=[[[math.nan], [0.5]]]))
    assert found.advantages_T[0].isnan()


def test_an_advantage_with_values_returns_what_they_should_have_been():
    @needs("values")
    def forgetful(inputs):
        return AdvantageOutputs(inputs.rewards_N)

    with pytest.raises(TrainingError, match="needs values, but returned no returns_T"):
        Objective(advantage=forgetful).advantages(inputs_of([[1.0, 0.0]]))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (torch.zeros(3), "the loss returned a Tensor, but it must return LossOutputs: return LossOutputs(loss_T)"),
        (LossOutputs(None), "the loss returned a NoneType as loss_T"),
        (
            LossOutputs(torch.zeros(3), ratio_T=torch.ones(2)),
            "shape (2,) as ratio_T, but it must return one number for each of the 3",
        ),
        (LossOutputs(torch.zeros(3), metrics={"x": 0.3}), "the loss returned a float as metric 'x', but a metric must know how"),
    ],
)
def test_what_a_loss_may_not_return(found, sentence):
    with pytest.raises(TrainingError, match=re.escape(sentence)):
        policy_loss(Objective(loss=lambda inputs: found, kl=None), **given())


def test_a_loss_may_say_what_it_clipped_in_numbers():
    found = LossOutputs(torch.zeros(3), ratio_T=torch.tensor([0.5, 2.0, 1.0]), clipped_T=torch.tensor([1.0, 1.0, 0.0]))
    _, metrics = policy_loss(Objective(loss=lambda inputs: found, kl=None), **given())
    assert (metrics["clip_low"].value, metrics["clip_high"].value) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_a_class_is_no_function(mine):
    with pytest.raises(ConfigError, match="which is a class: name a function"):
        Objective.from_config(AlgorithmConfig(advantage={"type": f"{mine}:Ranks"}))


def test_a_loss_cannot_ask_for_values(mine):
    with pytest.raises(
        ConfigError, match=r"needs values, but a function of algorithm\.loss may need entropy or old_logprobs or ref"
    ):
        Objective.from_config(AlgorithmConfig(loss={"type": f"{mine}:greedy"}))


def test_a_function_has_a_line_in_the_formula(mine, monkeypatch):
    monkeypatch.setitem(REGISTERED, "advantage", {})
    monkeypatch.setattr("groupwise.algorithm.registry.ADVANTAGES", {**ADVANTAGES})
    register_advantage("raw", formula="r_i")(lambda inputs: AdvantageOutputs(inputs.rewards_N))
    lines = formula(AlgorithmConfig(loss={"type": f"{mine}:annotated"}, advantage={"type": "raw"}, kl=None))
    assert lines[:2] == ["A     = r_i", "L_it  = -power A log pi(o_it)"]
    assert formula(AlgorithmConfig(loss={"type": f"{mine}:loss"}, kl=None))[1] == f"L_it  = {mine}:loss"


def test_a_need_that_there_is_not():
    with pytest.raises(ConfigError, match="a loss may need entropy or old_logprobs or reference, and an advantage values"):
        needs("gradients")


def test_needs_are_said_where_a_function_is_registered(monkeypatch):
    monkeypatch.setattr("groupwise.algorithm.registry.LOSSES", {**LOSSES})
    monkeypatch.setattr("groupwise.algorithm.registry.ADVANTAGES", {**ADVANTAGES})
    for what, functions in REGISTERED.items():
        monkeypatch.setitem(REGISTERED, what, dict(functions))

    @register_loss("wary", needs=("reference", "old_logprobs"))
    @needs("entropy")
    def wary(inputs):
        return LossOutputs(-inputs.advantages_T * (inputs.logprobs_T - inputs.old_logprobs_T).exp())

    register_loss("plain")(lambda inputs: LossOutputs(-inputs.advantages_T * inputs.logprobs_T))
    register_advantage("judged", needs="values")(lambda inputs: AdvantageOutputs(returns_T=inputs.values_T))
    judged = AlgorithmConfig(loss={"type": "wary"}, advantage={"type": "judged"}, value={}, kl=None)
    made, plain = Objective.from_config(judged), Objective.from_config(AlgorithmConfig(loss={"type": "plain"}, kl=None))
    assert (made.needs_reference, made.needs_entropy, made.needs_values) == (True, True, True)
    assert (plain.needs_reference, plain.needs_entropy, plain.needs_values) == (False, False, False)
    assert judged.loss.needs_reference, "the planner asks the section"
    with pytest.raises(ConfigError, match=r"'mine' needs values, but its kind \(loss\) may need"):
        register_loss("mine", needs="values")
    with pytest.raises(ConfigError, match=r"'mine' needs reference, but its kind \(advantage\) may need values"):
        register_advantage("mine", needs=["reference"])
    assert "mine" not in REGISTERED["loss"]

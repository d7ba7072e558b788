"""The schema documents itself, and says what has no effect."""

import pytest

from groupwise.config import build_config, explain, load_config, notes
from groupwise.config.combinations import note_on_processes
from groupwise.config.fields import OTHER_WORDS, REMARKS, field_paths, find_field, sections, suggest
from groupwise.config.objective import LOSS_TYPES


def test_every_setting_has_a_description_and_a_type_in_plain_words():
    for doc in explain():
        assert len(doc.description) > 10, doc.path
        assert "typing" not in doc.type, doc.path
        assert "class" not in doc.type, doc.path


def test_every_setting_is_listed_once_with_its_default():
    docs = {(doc.path, doc.of): doc for doc in explain()}
    assert len(docs) == len(explain())
    assert docs["rollout.completions_per_prompt", ()].type == "whole number >= 2"
    assert docs["rollout.completions_per_prompt", ()].default == 8
    assert docs["rewards.functions", ()].default == [{"function": "correctness"}, {"function": "format"}]
    assert docs["rewards.functions[].model.name", ()].default == "(required)"
    assert docs["optimizer.max_grad_norm", ()].type == "number or null (> 0)"
    assert docs["data.arithmetic.steps", ()].type == "whole number >= 1 and <= 4"


def test_every_listed_path_can_be_found_again_and_every_plain_one_can_be_set():
    everything = ["model.lora.rank=4", "preset=ppo", "kl.beta=0.1", "correction.level=token", "entropy.bonus=0.1"]
    config = load_config(None, everything)
    for doc in explain():
        assert find_field(doc.path) is not None
        *parents, leaf = doc.path.split(".")
        if "[]" not in doc.path:
            section = config
            for name in parents:
                section = getattr(section, name)
            assert hasattr(section, leaf) or (doc.of and section.type not in doc.of)


def test_a_setting_of_some_types_alone_is_listed_with_them():
    rows = {(doc.path, doc.of): doc.default for doc in explain() if doc.path.startswith("algorithm.loss.")}
    assert rows["algorithm.loss.epsilon", ("clip",)] == 0.2
    assert rows["algorithm.loss.epsilon", ("cispo",)] == 1.0
    assert rows["algorithm.loss.aggregation", ()] == "sequence_mean"
    assert ("algorithm.loss.ratio", ("clip", "cispo")) in rows
    docs = {doc.name: doc for doc in explain() if doc.path.startswith("algorithm.loss.")}
    assert docs["type"].type == " | ".join([*LOSS_TYPES, "FILE.py:FUNCTION"])
    assert docs["tau_positive (sapo)"].default == 1.0


def test_the_words_of_other_trainers_point_at_settings_that_exist_and_are_none_themselves():
    leaves = {path.rsplit(".", 1)[-1] for path in [*field_paths(), *sections()]}
    meant = {path for found in OTHER_WORDS.values() for path in ([found] if isinstance(found, str) else found)}
    assert meant <= set(field_paths())
    assert not (set(OTHER_WORDS) | set(REMARKS)) & leaves


def test_nothing_is_suggested_for_a_name_like_no_other():
    assert suggest("zzzzqqq") == []


def test_prompts_that_leave_processes_waiting_are_named():
    config = load_config(None, ["rollout.prompts_per_step=7"])
    assert [note_on_processes(config, count) for count in (1, 7)] == [[], []]
    (note,) = note_on_processes(config, 8)
    assert "prompts_per_step=7 does not divide among 8 processes: the busiest has 1, and 12% of their time is waiting" in note
    (note,) = note_on_processes(config, 2)
    assert "the busiest has 4, and 12% of their" in note


def test_a_plain_config_and_one_without_beta_have_no_notes():
    assert notes(load_config(None)) == []
    assert notes(load_config(None, ["kl=null"])) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.loss.epsilon=0.1"], "algorithm.loss.epsilon=0.1 has no effect here: with algorithm.updates_per_batch 1"),
        (
            ["rollout.top_p=0.9"],
            "rollout.top_p=0.9 cuts tokens out of the sampled distribution, while the loss scores the full one",
        ),
        (["rollout.top_k=20"], "rollout.top_k=20 cuts tokens"),
        (["rollout.temperature=0.7"], "trained at one temperature and judged at another"),
        (["data.eval_split=test", "data.holdout=50", "data.source=gsm8k"], "data.holdout=50 has no effect here"),
        (["data.source=gsm8k", "data.arithmetic.steps=3"], "data.arithmetic.steps=3 has no effect here: data.source is gsm8k"),
        (["data.holdout=0"], "this run is not evaluated"),
        (["data.source=gsm8k", "data.eval_source=arithmetic", "data.holdout=0"], "this run is not evaluated"),
        (["data.holdout=20"], "evaluation uses 20 problems"),
        (["dtype=float32", "precision=pure"], "optimizer.precision='pure' has no effect here"),
        (["model.lora.rank=8", "precision=stochastic"], "an adapter's weights are float32, and their own master copy"),
        (["precision=pure"], "are rounded away"),
        (["warm_start.learning_rate=1e-4"], "warm_start.steps is 0"),
        (["evaluation.modes=[greedy]", "evaluation.temperature=0.5"], "evaluation.temperature=0.5 has no effect here"),
        (["evaluation.every=500"], "evaluation.every=500 has no effect here: the run has only 100 steps"),
        (["keep_checkpoints=5"], "output.keep_checkpoints=5 has no effect here"),
        (["kl.estimator=k1"], "algorithm.kl.estimator=k1 in the loss pulls nowhere"),
        (["model.lora.rank=8", "warm_start.steps=2"], "algorithm.kl pulls towards the model without its adapter"),
        (["preset=ppo", "value.clip=0.5"], "algorithm.value.clip=0.5 has no effect here: with algorithm.updates_per_batch 1"),
        (
            ["rewards.normalise=std"],
            "rewards.normalise='std' has no effect here: algorithm.advantage.scale is group_std, so the size",
        ),
        (
            ["rewards.functions=[{function: accuracy, isolate: true}]", "rewards.timeout_s=null"],
            "rewards.functions[0] is isolated but has no time limit",
        ),
        (
            ["algorithm.advantage.type=mine.py:ranks", "kl.placement=token_reward"],
            "acts only if mine.py:ranks takes inputs.penalties_T off",
        ),
        (["preset=ppo", "value.loss_weight=0.5"], "algorithm.value.loss_weight=0.5 has no effect here: without algorithm"),
        (["kl.reference_every=100"], "algorithm.kl.reference_every=100 has no effect here: the run has only 100 steps"),
        (["optimizer.decay=matrices"], "optimizer.decay='matrices' has no effect here: optimizer.weight_decay is 0"),
        (["training.steps=0"], "there is no GRPO step in this run"),
        (["evaluation.modes=[greedy]", "evaluation.samples=4"], "evaluation.samples=4 has no effect here"),
        (
            ["rollout.refill_rounds=2", "preset=gdpo"],
            "rollout.refill_rounds=2 replaces groups whose rewards are all the same, but",
        ),
        (["rollout.refill_rounds=2", "kl.placement=reward"], "with this algorithm they teach too"),
        (["rollout.refill_rounds=2", "algorithm.advantage.type=mine.py:ranks"], "they may teach too, where mine.py:ranks"),
        (["kl.placement=reward"], "algorithm.kl.beta cancels out there: set algorithm.advantage.scale to batch_std or none"),
        (["rollout.environment={command: python a.py}"], "prompt.system=auto gives the agent's conversations a system prompt"),
    ],
)
def test_a_setting_without_effect_says_so_once(overrides, said):
    found = [note for note in notes(load_config(None, overrides)) if said in note]
    assert len(found) == 1
    assert found[0].endswith(".")


@pytest.mark.parametrize(
    "overrides",
    [
        ["preset=ppo", "value.loss_weight=0.5", "value.trains_trunk=true"],
        ["preset=ppo", "value.loss_weight=0.5", "value.critic=copy"],
        ["kl.reference_every=99"],
        ["optimizer.decay=matrices", "optimizer.weight_decay=0.1"],
    ],
)
def test_settings_that_act_have_no_notes(overrides):
    assert not [note for note in notes(load_config(None, overrides)) if "has no effect" in note]


def test_an_agent_without_a_system_prompt_has_no_note_on_it():
    assert notes(load_config(None, ["rollout.environment={command: python a.py}", "prompt.system=none"])) == []


def test_the_generator_holds_out_as_many_as_it_is_told():
    assert notes(load_config(None, ["data.source=gsm8k", "data.eval_source=arithmetic", "data.holdout=300"])) == []


@pytest.mark.parametrize("more", ["rewards.clip=[-1,1]", "preset=dr_grpo", "algorithm.kl.placement=reward"])
def test_normalising_the_sum_is_not_reported_where_it_acts(more):
    assert not [note for note in notes(load_config(None, ["rewards.normalise=std", more])) if "rewards.normalise" in note]


@pytest.mark.parametrize("preset", ["grpo", "rloo", "dapo", "maxrl"])
def test_refilling_is_not_reported_where_such_groups_teach_nothing(preset):
    plain = ["kl=null"] if preset == "rloo" else []
    assert not [
        note for note in notes(load_config(None, ["rollout.refill_rounds=2", f"preset={preset}", *plain])) if "refill" in note
    ]


def test_clipping_is_not_reported_where_it_acts():
    assert notes(load_config(None, ["algorithm.loss.epsilon=0.1", "updates_per_batch=2"])) == []


def test_a_default_that_was_only_written_out_is_not_reported():
    assert notes(build_config({"algorithm": {"loss": {"epsilon": 0.2}}, "warm_start": {"examples_per_step": 16}})) == []

"""An adapter learns what peft's own module would, its updates reach the sampler, and the reference is the model without it."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from groupwise.algorithm import group_advantages
from groupwise.config.schema import Config, LoraConfig, ModelConfig
from groupwise.engines import SamplingSettings, make_engine
from groupwise.engines.builtin import decode
from groupwise.engines.builtin.engine import BuiltinEngine, takes_native
from groupwise.engines.transformers import TransformersEngine
from groupwise.errors import ModelError
from groupwise.models import merging
from groupwise.models.adapters import attach, base_module, is_adapted, load_trained, peft_config_of, why_not_mergeable
from groupwise.models.decoder import Decoder, MergedDecoder, why_unsupported
from groupwise.models.load import Policy, load_policy, save_model
from groupwise.models.merging import added_up, dithered
from groupwise.models.native import calls as native
from groupwise.models.quantised import store_in_16_bits
from groupwise.models.scorer import make_reference, make_scorer
from groupwise.training.learner import BatchPass, Learner
from groupwise.types import Completion, Group, Problem, Prompt
from tests.tiny import write_tiny_llama

peft = pytest.importorskip("peft")

PROMPT = Prompt(Problem(id="p", question="?", answer=""), "?", (5, 9, 3, 17))


class Plain:
    """A tokenizer that only decodes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        pass


def adapted(model: Any, **settings: Any) -> Policy:
    model = attach(model, peft_config_of(LoraConfig(**{"rank": 4, "alpha": 8, **settings})))
    return Policy(model.eval(), Plain(), (2,), 256, "tiny")


def slow(model: Any, completion: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([[*PROMPT.token_ids, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(PROMPT.token_ids) - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(len(completion)), ids[0, len(PROMPT.token_ids) :]]


def group_of(completions: tuple[Completion, ...]) -> Group:
    return Group(PROMPT, completions, tuple(float(len(set(c.token_ids))) for c in completions))


def settings(**algorithm: Any) -> Config:
    return Config(
        model={"dtype": "float32"},  # type: ignore[arg-type]
        algorithm={"kl": None, **algorithm},  # type: ignore[arg-type]
        optimizer={"learning_rate": 2e-2},  # type: ignore[arg-type]
    )


def sample(engine: Any, scope: str = "x") -> tuple[Completion, ...]:
    return engine.sample([PROMPT], 8, SamplingSettings(max_tokens=8), seed=0, scope=scope)[0]


def mismatch(policy: Policy, completions: tuple[Completion, ...]) -> float:
    with torch.no_grad():
        found = [slow(policy.model, c.token_ids) - torch.tensor(c.logprobs) for c in completions]
    return max(float(x.abs().max()) for x in found)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_an_update_of_the_adapter_reaches_the_sampler(engine, family, request):
    policy, config = adapted(request.getfixturevalue(family)()), settings()
    config.rollout.engine = engine
    learner, sampler = Learner(make_scorer(policy, config.model), config), make_engine(policy, config.rollout)
    assert isinstance(sampler, BuiltinEngine if engine == "auto" else TransformersEngine)
    before = sample(sampler)
    assert mismatch(policy, before) < 1e-4
    for _ in range(3):
        learner.learn([group_of(before)])
        sampler.refresh(learner.updates)
    after = sample(sampler)
    assert mismatch(policy, before) > 0.05, "the policy was to move"
    assert mismatch(policy, after) < 1e-4, "what is sampled is the policy as it is now"
    assert {c.policy_version for c in after} == {3}


@pytest.mark.parametrize("family", ["tiny_qwen2", "tiny_gemma3"])
def test_the_gradient_is_that_of_peft_s_own_module_and_the_base_stays(family, request):
    policy, config = adapted(request.getfixturevalue(family)()), settings()
    twin = copy.deepcopy(policy.model)
    learner = Learner(make_scorer(policy, config.model), config)
    group = group_of(sample(make_engine(policy, config.rollout)))
    seen: list[dict[str, torch.Tensor]] = []
    step = learner.optimizer.step
    learner.optimizer.step = lambda rate: (
        seen.append({n: p.grad.clone() for n, p in learner.scorer.named_parameters()}) or step(rate)
    )
    advantages, _ = learner.learn([group])
    loss = sum(
        -a * slow(twin, c.token_ids).mean() / len(group.completions)
        for a, c in zip(advantages[0], group.completions, strict=True)
    )
    names = [n for n, p in base_module(twin).named_parameters() if p.requires_grad]
    assert names == list(seen[0])
    assert all("lora_" in name for name in names)
    expected = torch.autograd.grad(loss, [dict(base_module(twin).named_parameters())[n] for n in names])
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(seen[0][name], gradient, atol=1e-6, rtol=1e-4)
    weights = dict(policy.model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, weights[name]) == ("lora_B" not in name), name


def test_the_reference_is_the_model_without_its_adapter(tiny_llama):
    model = tiny_llama()
    plain = copy.deepcopy(model)
    policy, config = adapted(model), settings(kl={"beta": 0.1})
    learner, sampler = Learner(make_scorer(policy, config.model), config), make_engine(policy, config.rollout)
    group = group_of(sample(sampler))
    _, first = learner.learn([group])
    assert first["policy/kl"].value == pytest.approx(0, abs=1e-9), "a new adapter changes nothing"
    _, second = learner.learn([group])
    assert second["policy/kl"].value > 1e-3
    batch = learner.scorer.prepare([(PROMPT.token_ids, [c.token_ids for c in group.completions])])
    assert learner.reference is not None
    found = learner.reference.logprobs(batch)
    assert not found.requires_grad
    with torch.no_grad():
        expected = torch.cat([slow(plain, c.token_ids) for c in group.completions])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert all(p.requires_grad for _, p in learner.scorer.named_parameters()), "learning goes on after the reference's turn"
    assert len(learner.scorer.named_parameters()) == 2 * 2 * 7


@pytest.mark.parametrize("first", ["pissa", "olora"])
def test_a_reference_of_an_adapter_that_was_taken_out_of_the_base_takes_nothing_more(tiny_llama, first):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=first, task_type="CAUSAL_LM")
    policy = Policy(attach(tiny_llama(), config).eval(), Plain(), (2,), 256, "tiny")
    with torch.no_grad():
        start = slow(policy.model, (7, 8, 9, 2))
        scorer: Any = make_scorer(policy, settings().model)
        scorer.keep_present_adapter()
        assert torch.equal(slow(policy.model, (7, 8, 9, 2)), start)


@pytest.mark.parametrize("more", [{"lora_bias": True}, {"trainable_token_indices": [7, 8]}])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_more_than_two_factors_is_computed_by_its_own_module(tiny_llama, more):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **more)
    model = attach(tiny_llama(), config).eval()
    assert "of its own" in (why_not_mergeable(model) or "")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and ("bias" in name or "token" in name):
                p.add_(0.5)
        scorer: Any = make_scorer(Policy(model, Plain(), (2,), 256, "tiny"), settings().model)
        found = scorer.logprobs(scorer.prepare([(PROMPT.token_ids, [(7, 8, 9, 2)])]))
        torch.testing.assert_close(found, slow(model, (7, 8, 9, 2)), atol=1e-5, rtol=1e-4)


def test_an_adapter_that_was_worked_in_is_not_added_once_more(tiny_llama):
    policy = adapted(tiny_llama())
    assert why_not_mergeable(policy.model) is None
    policy.model.merge_adapter()
    assert "already" in (why_not_mergeable(policy.model) or "")


@pytest.mark.parametrize(
    "more",
    [{}, {"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [7, 8]}],
    ids=["layers", "embedding", "tokens"],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_comes_trained_is_its_own_reference(tiny_llama, more):
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more})
    policy = Policy(attach(tiny_llama(), config).eval(), Plain(), (2,), 256, "tiny")
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if any(part in name for part in ("lora_B", "lora_embedding_B", "tokens_delta")):
                p.normal_(std=0.1)
    completion = (7, 8, 9, 2)
    with torch.no_grad():
        start = slow(policy.model, completion)
    scorer: Any = make_scorer(policy, settings().model)
    count = len(scorer.named_parameters())
    scorer.keep_present_adapter()
    reference = make_reference(scorer)
    assert len(scorer.named_parameters()) == count
    with torch.no_grad():
        for _, p in scorer.named_parameters():
            p.add_(0.05)
        moved = slow(policy.model, completion)
        batch = scorer.prepare([(PROMPT.token_ids, [completion])])
        torch.testing.assert_close(reference.logprobs(batch), start, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(scorer.logprobs(batch), moved, atol=1e-5, rtol=1e-4)
    assert (moved - start).abs().max() > 1e-2


def test_an_adapter_whose_weights_find_no_place_is_refused(tiny_llama, tmp_path: Path):
    """peft warns of places without weights, and says nothing of weights without a place: the base was taken for what was trained."""
    policy = adapted(tiny_llama(), target_modules=["q_proj"])
    policy.model.save_pretrained(tmp_path)
    load_trained(replace(policy, model=tiny_llama()), tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    others = {name.replace("q_proj", "v_proj"): tensor.clone() for name, tensor in saved.items()}
    for changed, said in ((others, "missing adapter keys"), (saved | others, "no place for .*v_proj")):
        save_file(changed, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=rf"does not fit tiny \(.*{said}.*--base"):
            load_trained(replace(policy, model=tiny_llama()), tmp_path)


def test_an_adapter_that_transformers_put_into_the_model_is_never_left_out_in_silence(tiny_llama, tmp_path: Path, monkeypatch):
    def config():
        return peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)

    model = tiny_llama()
    model.add_adapter(config())
    assert why_unsupported(model) == "adapters or quantised layers"
    folder = write_tiny_llama(tmp_path)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config()).save_pretrained(folder)
    named = ModelConfig(name=str(folder), device="cpu", dtype="float32")
    with pytest.raises(ModelError, match=r"holds an adapter \(adapter_config\.json\) beside its weights"):
        load_policy(named)
    monkeypatch.setattr("groupwise.models.load.check_folder", lambda folder: None)  # as for a repository of the Hub
    with pytest.raises(ModelError, match=r"brings an adapter \(adapter_config\.json\)"):
        load_policy(named)


def test_an_adapter_whose_pickled_weights_are_damaged_is_refused(tiny_llama, tmp_path: Path):
    policy = adapted(tiny_llama())
    policy.model.save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    for damaged in (b"", b"nothing of the kind"):
        (tmp_path / "adapter_model.bin").write_bytes(damaged)
        with pytest.raises(ModelError, match="does not fit tiny"):
            load_trained(replace(policy, model=tiny_llama()), tmp_path)


def test_the_adapter_s_dropout_acts_in_learning_alone(tiny_llama):
    policy = adapted(tiny_llama(), dropout=0.5)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    scorer = make_scorer(policy, settings().model)
    batch = scorer.prepare([(PROMPT.token_ids, [(7, 8, 9, 2)])])
    learning = []
    for seed in (1, 2, 1):
        scorer.seed_noise(seed)
        learning.append(scorer.logprobs(batch).detach())
    with torch.no_grad():
        judging = [scorer.logprobs(batch) for _ in range(2)]
    assert not torch.equal(*learning[:2])
    assert torch.equal(learning[0], learning[2])
    assert torch.equal(*judging)
    torch.testing.assert_close(judging[0], slow(policy.model.eval(), (7, 8, 9, 2)).detach(), atol=1e-5, rtol=1e-4)


def test_a_saved_policy_is_whole_and_has_the_adapter_beside_it(tiny_llama, tmp_path: Path):
    base = tiny_llama()
    policy = adapted(copy.deepcopy(base))
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    for _ in range(2):  # the second time over the first
        save_model(policy, tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    with torch.no_grad():
        wanted = slow(policy.model, (7, 8, 9, 2))
        assert (slow(whole, (7, 8, 9, 2)) - wanted).abs().max() < 1e-4
        assert (slow(again, (7, 8, 9, 2)) - wanted).abs().max() < 1e-4
    assert is_adapted(policy.model), "saving does not merge the policy itself"


def test_adapters_that_are_written_at_once_by_two_threads_are_both_written(tiny_llama, tmp_path: Path, monkeypatch):
    """peft writes a card beside them, and asks for Jinja's version when it does so for the first time."""
    from huggingface_hub.utils import _runtime

    find = _runtime.importlib.metadata.version

    def slow(name: str) -> str:
        time.sleep(0.5 * (name == "Jinja2"))
        return find(name)

    monkeypatch.setattr(_runtime, "_package_versions", {})
    monkeypatch.setattr(_runtime.importlib.metadata, "version", slow)
    models = [adapted(tiny_llama()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: models[i].model.save_pretrained(tmp_path / str(i)), range(2)))
    assert all((tmp_path / str(i) / "adapter_model.safetensors").is_file() for i in range(2))


@pytest.mark.filterwarnings("ignore")
def test_what_does_not_fit_is_one_sentence(tiny_llama):
    with pytest.raises(ModelError, match="fix target_modules"):
        adapted(tiny_llama(), target_modules=["no_such_layer"])
    with pytest.raises(ModelError, match="LoraConfig"):
        attach(tiny_llama(), {"r": 4})
    with pytest.raises(ModelError, match="an adapter already"):
        attach(adapted(tiny_llama()).model, peft_config_of(LoraConfig()))
    for end in ("lm_head", "embed_tokens"):
        with pytest.raises(ModelError, match="one tensor in this model"):
            adapted(tiny_llama(tie_word_embeddings=True), target_modules=["q_proj", end])
    assert is_adapted(adapted(tiny_llama(tie_word_embeddings=False), target_modules=["q_proj", "lm_head"]).model)


def dropping_out(model: Any, **config: Any) -> tuple[Learner, list[Group], list[dict[str, torch.Tensor]]]:
    """A learner of an adapter that is far from nothing and drops out half, its groups, and the gradients that it will have seen."""
    policy = adapted(copy.deepcopy(model), dropout=0.5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    chosen = settings(**config.get("algorithm", {})).model_copy(deep=True)
    chosen.optimizer.learning_rate = 1e-9
    chosen.training.micro_batch_tokens = config.get("budget", 8192)
    learner = Learner(make_scorer(policy, chosen.model), chosen)
    prompts = [PROMPT, Prompt(Problem(id="q", question="?", answer=""), "?", (11, 4))]
    groups = []
    for prompt in prompts:
        texts = [(7, 8, 9, 2), (7, 3), (5, 5, 6, 2), (9, 9, 9, 9, 2)]
        completions = tuple(Completion("", ids, (-5.0,) * len(ids), "stop", n) for n, ids in enumerate(texts))
        groups.append(Group(prompt, completions, (1.0, 0.0, 0.5, 0.2)))
    seen: list[dict[str, torch.Tensor]] = []
    step = learner.optimizer.step

    def watched(rate: float) -> Any:
        seen.append({n: p.grad.clone() for n, p in learner.scorer.named_parameters() if p.grad is not None})
        return step(rate)

    learner.optimizer.step = watched
    return learner, groups, seen


def test_dropout_is_the_same_in_all_updates_of_a_batch(tiny_llama):
    """The ratio is then what the updates did, and not the difference of two masks; the next batch has another mask."""
    learner, groups, seen = dropping_out(tiny_llama(), algorithm={"updates_per_batch": 3})
    _, metrics = learner.learn(groups)
    assert metrics["policy/ratio_deviation"].value < 1e-4
    assert metrics["policy/clip_share"].value == 0
    learner.learn(groups)
    name = next(n for n in seen[0] if "lora_A" in n)
    scale = seen[0][name].abs().max()
    assert (seen[2][name] - seen[0][name]).abs().max() < 1e-3 * scale
    assert (seen[3][name] - seen[0][name]).abs().max() > 1e-1 * scale


def test_dropout_does_not_depend_on_how_the_batch_is_cut(tiny_llama):
    """Nor does the gradient then, under an adapter that drops out as under any other."""
    found = []
    for budget in (8192, 20, 1):
        learner, groups, seen = dropping_out(tiny_llama(), budget=budget)
        learner.learn(groups)
        found.append(seen[0])
    for other in found[1:]:
        for name in found[0]:
            torch.testing.assert_close(other[name], found[0][name], rtol=1e-4, atol=1e-6)


def test_old_logprobs_are_those_of_the_mask_that_later_sweeps_have(tiny_llama):
    """For callers that order the steps themselves: the ratio of a window's first sweep is 1 as long as the weights are where they were."""
    learner, groups, _ = dropping_out(tiny_llama())
    members = [(g, m) for g in range(2) for m in range(4)]
    advantages = group_advantages([g.rewards for g in groups])
    for chosen in (members[::2], members[1::2]):
        of_chosen = torch.tensor([advantages[g][m] for g, m in chosen])
        window = learner.window_of(groups, chosen, torch.full((len(chosen),), 0.01), of_chosen, off_policy=True)
        assert learner.accumulate([BatchPass(window, True)])["policy/ratio_deviation"].value < 1e-4


def test_what_is_dropped_is_even_unrelated_and_made_up_for(tiny_llama):
    """Over tokens, features and layers: the share that is left, its factor, and no two of them alike."""
    scorer: Any = make_scorer(adapted(tiny_llama(), dropout=0.25), settings().model)
    ids = torch.randint(3, 100, (40, 50), generator=torch.Generator().manual_seed(0))
    scorer.seed_noise(7)
    scorer.noise.tokens(ids)
    masks = []
    for module in scorer._dropouts[:2]:
        module.training = True
        masks.append(module(torch.ones(40, 50, 64)))
    kept = [mask > 0 for mask in masks]
    for mask, k in zip(masks, kept, strict=True):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert float(k.float().mean()) == pytest.approx(0.75, abs=0.004), "40 x 50 x 64 draws: 3 standard deviations"
    pairs = [
        (kept[0], kept[1]),
        (kept[0][:, 1:], kept[0][:, :-1]),
        (kept[0][..., 1:], kept[0][..., :-1]),
        (kept[0][1:], kept[0][:-1]),
    ]
    for one, other in pairs:
        assert float((one & other).float().mean()) == pytest.approx(0.75**2, abs=0.006)
    assert torch.equal(kept[0][:, :20], _mask(scorer, ids[:, :20])[:, :20]), "what comes after a token does not matter"
    assert not torch.equal(kept[0], _mask(scorer, ids, seed=8))


def _mask(scorer: Any, ids: torch.Tensor, seed: int = 7) -> torch.Tensor:
    scorer.seed_noise(seed)
    scorer.noise.tokens(ids)
    return scorer._dropouts[0](torch.ones(*ids.shape, 64)) > 0


@pytest.mark.parametrize("family", ["tiny_qwen2", "tiny_gemma3"])
def test_a_base_in_bf16_numbers_is_stored_in_16_bits_and_computes_the_same_in_fp32(family, request, tmp_path: Path):
    model = request.getfixturevalue(family)().to(torch.bfloat16).float()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 2.0**-20  # a number that bf16 does not hold
    found = []
    for store in (False, True):
        policy, config = adapted(copy.deepcopy(model), target_modules=["q_proj", "down_proj"]), settings()
        scorer = make_scorer(policy, config.model)
        if store:
            scorer.store_in_16_bits()
        learner, sampler = Learner(scorer, config), make_engine(policy, config.rollout, scorer)
        completions = sample(sampler)
        for _ in range(2):
            learner.learn([group_of(completions)])
            sampler.refresh(learner.updates)
        again = sample(sampler, "y")
        assert mismatch(policy, again) < 1e-4, "peft's own module computes it too"
        save_model(policy, tmp_path / str(store))
        with torch.no_grad():
            reference = make_reference(scorer).logprobs(scorer.prepare([(PROMPT.token_ids, [(7, 8, 9)])]))
        found.append((completions, again, reference.tolist(), (tmp_path / str(store) / "model.safetensors").read_bytes()))
    assert found[0] == found[1]
    layers = base_module(policy.model).model.layers
    assert {n for n, p in layers.named_parameters() if p.dtype == torch.float32 and "proj" in n and "lora" not in n} == {
        n for n, _ in layers.named_parameters() if n == "0.mlp.up_proj.weight" or (".bias" in n and "proj" in n)
    }
    assert make_scorer(policy, config.model).module is base_module(policy.model), "it is covered as before"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_adapters_are_added_up_in_fp32_and_rounded_once(dtype):
    torch.manual_seed(0)
    weight, placed = torch.randn(12, 8).to(dtype), torch.zeros(20, 8, dtype=dtype)
    factors = [(0.1 * torch.randn(2, 8), torch.randn(12, 2), scaling) for scaling in (0.5, 2.0)]
    exact = weight.double() + sum(scaling * b.double() @ a.double() for a, b, scaling in factors)
    expected = dithered(exact.float(), dtype)
    torch.testing.assert_close(added_up(weight, factors), expected, atol=1e-6 if dtype == torch.float32 else 0, rtol=0)
    assert added_up(weight, factors, placed[4:16]).data_ptr() == placed[4:16].data_ptr()
    assert torch.equal(placed[4:16], added_up(weight, factors))
    assert not placed[:4].any()


def test_a_base_that_the_module_learns_on_stays_as_it_is(tiny_llama):
    """With dropout the module computes the passes, and the sampler merges: it would widen each weight in every pass."""
    policy, config = adapted(tiny_llama().to(torch.bfloat16).float(), dropout=0.1), settings()
    scorer = make_scorer(policy, config.model)
    sampler = make_engine(policy, config.rollout, scorer)
    assert isinstance(sampler, BuiltinEngine)
    assert not any(p.dtype == torch.bfloat16 for p in policy.model.parameters())
    layer = torch.nn.Linear(4, 4)
    layer.weight.data.zero_()
    assert not store_in_16_bits(layer), "what learns is no frozen weight"
    assert store_in_16_bits(layer.requires_grad_(False))


def test_an_engine_of_its_own_stores_an_adapted_base_in_16_bits_too(tiny_llama):
    policy = adapted(tiny_llama().to(torch.bfloat16).float())
    before = sample(make_engine(policy, config := settings().rollout))
    assert {p.dtype for n, p in policy.model.named_parameters() if "proj.base_layer" in n} == {torch.bfloat16}
    assert sample(make_engine(policy, config)) == before


@pytest.mark.parametrize("letters", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_gemma3"])
def test_a_model_that_nothing_trains_takes_16_bits_a_weight_where_its_numbers_are_bf16s(family, letters, request):
    model = request.getfixturevalue(family)().float()
    if not letters:
        model.to(torch.bfloat16).float()
    policy, config = Policy(model.eval(), Plain(), (2,), 256, "tiny"), settings().rollout
    fused, found = copy.deepcopy(policy), []
    for own, frozen in ((fused, False), (policy, True)):
        engine = make_engine(own, config, frozen=frozen)
        assert isinstance(engine, BuiltinEngine)
        found.append((sample(engine), sample(engine, "y")))
    assert found[0] == found[1]
    assert {p.dtype for n, p in fused.model.named_parameters()} == {torch.float32}
    stored = {n for n, p in policy.model.named_parameters() if p.dtype == torch.bfloat16}
    assert stored == (set() if letters else {n for n, _ in model.named_parameters() if "proj.weight" in n})


@pytest.mark.parametrize("inner", [96, 100])
def test_whether_kernels_take_an_adapted_model_is_known_without_merging_it(tiny_llama, monkeypatch, inner):
    model = tiny_llama(head_dim=32, intermediate_size=inner)
    decoder = MergedDecoder(adapted(copy.deepcopy(model)).model)
    monkeypatch.setattr(merging, "merged_weight", lambda *_, **__: pytest.fail("a weight is merged"))
    assert takes_native(decoder) == takes_native(Decoder(model)) == native.fits(decoder.embedding, inner)


def test_weights_that_are_not_rearranged_are_sampled_from_as_they_are(tiny_llama, monkeypatch):
    """In 16 bits each call would make whole copies of them."""
    policy = Policy(tiny_llama().to(torch.bfloat16).float().eval(), Plain(), (2,), 256, "tiny")
    monkeypatch.setattr(decode, "rearranging_helps", lambda weight: False)
    make_engine(policy, settings().rollout, frozen=True)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}

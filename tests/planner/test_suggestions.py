"""What `groupwise plan` suggests: what it names really fits when it is done, and where anything near would fit, something is named."""

import itertools
import random
import shlex

import pytest
from transformers import Qwen2Config

from groupwise.config import load_config
from groupwise.config.combinations import refuse_with_vllm
from groupwise.planner import HARDWARE, make_plan
from groupwise.planner import plan as plan_module
from groupwise.planner.memory import peak_bytes
from groupwise.planner.plan import smaller_model, too_close
from groupwise.planner.setup import Setup
from groupwise.planner.shape import KNOWN_SHAPES
from groupwise.planner.state import refused
from groupwise.planner.suggest import Suggestion, suggest

GIB = 2**30


def settings_of(suggestion):
    """As they are typed."""
    return [word for word in shlex.split(suggestion.words) if "=" in word]


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_a_run_that_samples_few_sequences_at_once_is_planned_too(at_once):
    """Never more than were asked for."""
    config = load_config("gsm8k-0.5b", ["model.name=Qwen/Qwen2.5-1.5B", f"rollout.max_concurrent_sequences={at_once}"])
    made = make_plan(config, HARDWARE["cpu"], limit_bytes=2 * 2**30)
    assert not made.fits
    assert all(one.settings.get("rollout.max_concurrent_sequences", 0) < at_once for one in made.suggestions)


def drawn(rng):
    """A run that somebody might plan."""
    recipe = rng.choice(["gsm8k-0.5b", "gsm8k-1.5b-24gb", "gsm8k-1.5b-8gpu", "gsm8k-7b-8gpu", "polaris-3b", "polaris-3b-qlora"])
    size = rng.choice(["0.5B", "1.5B", "3B", "7B", "14B", "32B"])
    overrides = [f"model.name=Qwen/Qwen2.5-{size}", f"rollout.max_completion_tokens={rng.choice([64, 512, 2048])}"]
    overrides += rng.choice(
        [[], ["rollout.ahead=1", "training.sharding=none"], ["model.gradient_checkpointing=true"], ["algorithm.kl=null"]]
    )
    if rng.random() < 0.2:
        overrides += ["algorithm.preset=ppo", "algorithm.value.critic=copy", "algorithm.kl=null", "training.sharding=none"]
    by_vllm = rng.random() < 0.15 and recipe != "polaris-3b-qlora"  # vLLM is sent plain weights
    card, processes = HARDWARE[rng.choice(["rtx-4090", "a100-40gb", "a100-80gb", "cpu"])], rng.choice([1, 1, 2, 8])
    if by_vllm:
        where = "url=http://127.0.0.1:8300" if processes > 1 else "cache_gib=2"
        overrides += ["rollout.engine=vllm", "training.sharding=none", f"rollout.vllm.{where}"]
    return recipe, overrides, card, processes


def seeds(fast, slow):
    return [*fast, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)]


@pytest.mark.parametrize("seed", seeds([*range(4), 126], range(4, 12)))
def test_every_suggestion_fits_as_it_says_when_it_is_done(seed):
    rng = random.Random(seed)
    recipe, overrides, card, processes = drawn(rng)
    limit = rng.choice([None, 8 * GIB, 16 * GIB])
    made = make_plan(load_config(recipe, overrides), card, world_size=processes, limit_bytes=limit)
    assert bool(made.suggestions) == (not made.fits)
    assert [one.rank for one in made.suggestions] == sorted(one.rank for one in made.suggestions)
    for one in made.suggestions:
        changed = load_config(recipe, [*overrides, *settings_of(one)])
        again = make_plan(changed, card, world_size=one.world_size, limit_bytes=limit)
        assert (again.fits, again.peak.bytes) == (one.fits, one.peak_bytes), one.words
        assert again.cost.step_s == one.step_s


def test_settings_are_typed_as_the_command_line_reads_them():
    settings = {"algorithm.kl": None, "model.gradient_checkpointing": True, "model.quantization": "4bit"}
    words = Suggestion(settings, 0, True, 0.0, "", 2).words
    assert words == "algorithm.kl=null model.gradient_checkpointing=true model.quantization=4bit"


def combinations(setup):
    """Settings that somebody would try by hand, all of them together with all others."""
    lora = load_config(None, ["model.lora={rank: 16, alpha: 32}"]).model.lora
    adapters = [{}] if setup.adapted else [{}, {"model__lora": lora}]
    bits = [{}, {"model__quantization": "8bit"}, {"model__quantization": "4bit"}]
    several = {"rollout__max_concurrent_sequences": 1, "training__micro_batch_tokens": 256, "model__gradient_checkpointing": True}
    for adapter, few, kl, precision, away, engine in itertools.product(
        adapters, bits, (setup.config.algorithm.kl, None), ("masters", "stochastic"), (False, True), ("auto", "transformers")
    ):
        adapted = bool(adapter) or setup.adapted
        if (few and not adapted) or (away and (adapted or precision != "masters")):
            continue  # not possible, or of no use: an adapter's optimiser is small
        rest = {
            "algorithm__kl": kl, "optimizer__precision": precision, "optimizer__offload": away,
            "training__offload_reference": away, "rollout__engine": engine, "training__sharding": "none",
        }  # fmt: skip
        yield {**several, **adapter, **few, **rest}


@pytest.mark.parametrize("seed", seeds(range(4), range(4, 12)))
def test_where_anything_near_would_fit_something_is_suggested(seed):
    """Every combination of settings by hand, each at its most frugal: if one of them fits, the list has something that does."""
    rng = random.Random(100 + seed)
    recipe = rng.choice(["gsm8k-0.5b", "polaris-3b", "polaris-3b-qlora", "gsm8k-1.5b-8gpu"])
    shape = KNOWN_SHAPES[f"Qwen/Qwen2.5-{rng.choice(['1.5B', '3B', '14B'])}"]
    setup = Setup(load_config(recipe), shape, rng.choice(["cuda", "cpu"]), 1)
    lowest = min(peak_bytes(setup.changed(**changes)) for changes in combinations(setup) if not refused(setup.changed(**changes)))
    limit = int(lowest * rng.choice([1.0, 1.02, 1.2]))
    if peak_bytes(setup) <= limit:
        return
    found = suggest(setup, HARDWARE["rtx-4090" if setup.device == "cuda" else "cpu"], limit)
    assert found[0].fits, (recipe, shape, limit / GIB, found[0])


def test_a_suggestion_leaves_room_where_one_can():
    config = load_config("polaris-3b")
    made = make_plan(config, HARDWARE["a100-40gb"])
    assert made.suggestions
    assert all(one.peak_bytes <= 0.95 * made.limit_bytes for one in made.suggestions)


def test_what_a_suggestion_takes_of_the_machine_s_own_memory_is_said():
    made = make_plan(load_config("gsm8k-7b-8gpu"), HARDWARE["a100-80gb"])
    away = next(one for one in made.suggestions if one.settings.get("optimizer.offload"))
    # Moments and gradients as they are; each pinned master in a block of a power of two: qkv, output, gate and up, down; embedding, head.
    pinned = 28 * (2**26 + 2**26 + 2**30 + 2**29) + 2 * 2**32
    gib = (12 * made.setup.shape.parameters + pinned) / GIB
    assert f"{gib:.0f} GiB of the machine's memory for each process" in away.effect


def test_a_base_of_few_bits_that_is_too_large_merged_is_sampled_as_it_is():
    """14 billion weights of 4 bits are 9 GiB, and merged in bf16 they are 26: only without merging do they go into 24."""
    made = make_plan(load_config("polaris-3b-qlora", ["model.name=Qwen/Qwen2.5-14B"]), HARDWARE["rtx-4090"])
    assert made.suggestions[0].fits
    assert made.suggestions[0].settings["rollout.engine"] == "transformers"


def test_a_plan_that_just_fits_says_so():
    config = load_config("gsm8k-1.5b-24gb")
    roomy = make_plan(config, HARDWARE["rtx-4090"])
    assert too_close(roomy) is None
    tight = make_plan(config, HARDWARE["rtx-4090"], limit_bytes=int(1.02 * roomy.peak.bytes))
    assert tight.fits
    assert "2% to spare" in (too_close(tight) or "")
    assert "ends a run" not in (too_close(tight) or "")
    divided = load_config("gsm8k-7b-8gpu", ["evaluation.problems=8", "training.micro_batch_tokens=65536"])
    roomy = make_plan(divided, HARDWARE["a100-80gb"], world_size=8)
    tight = make_plan(divided, HARDWARE["a100-80gb"], world_size=8, limit_bytes=int(1.02 * roomy.peak.bytes))
    assert tight.setup.sharding == "fsdp2"
    assert (too_close(tight) or "").endswith("since a pass that does not fit ends a run whose weights are divided")


def test_where_nothing_fits_a_smaller_model_is_named():
    made = make_plan(load_config("polaris-3b-qlora", ["model.name=Qwen/Qwen2.5-72B-Instruct"]), HARDWARE["rtx-4090"])
    assert not made.suggestions[0].fits
    said = smaller_model(made)
    assert said is not None
    assert "Qwen/Qwen2.5-14B-Instruct with rollout.engine=transformers" in said
    fine = make_plan(load_config("polaris-3b-qlora"), HARDWARE["rtx-4090"])
    assert smaller_model(fine) is None


def test_a_smaller_model_that_the_settings_refuse_is_passed_over():
    """Qwen2.5-1.5B may read and write more than this critic, which is as long as Qwen2.5-3B."""
    assert KNOWN_SHAPES["Qwen/Qwen2.5-1.5B"].context > KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"].context
    critic = ["algorithm.preset=ppo", "algorithm.kl=null", "algorithm.value.critic=Qwen/Qwen2.5-0.5B"]
    config = load_config("gsm8k-1.5b-24gb", ["model.name=Qwen/Qwen2.5-3B", *critic])
    made = make_plan(config, HARDWARE["rtx-4090"], limit_bytes=2 * GIB)
    assert not any(one.fits for one in made.suggestions)
    assert "1.5B" not in (smaller_model(made) or "")


def test_what_fits_is_suggested_nearest_first_and_really_fits():
    config = load_config("gsm8k-1.5b-8gpu")
    made = make_plan(config, HARDWARE["rtx-4090"], prompt_tokens=200)
    assert not made.fits
    assert made.suggestions
    assert [one.rank for one in made.suggestions] == sorted(one.rank for one in made.suggestions)
    for one in made.suggestions:
        changed = load_config("gsm8k-1.5b-8gpu", settings_of(one))
        again = make_plan(changed, HARDWARE["rtx-4090"], prompt_tokens=200, world_size=one.world_size)
        assert again.fits
        assert again.peak.bytes == one.peak_bytes
    roomy = make_plan(config, HARDWARE["h200"], prompt_tokens=200)
    assert roomy.fits
    assert roomy.suggestions == ()


def test_a_smaller_budget_is_found_where_it_is_enough():
    config = load_config(
        None, ["rollout.max_completion_tokens=512", "training.micro_batch_tokens=32768", "model.name=Qwen/Qwen2.5-0.5B"]
    )
    roomy = make_plan(config, HARDWARE["h200"], prompt_tokens=200)
    least = max(p.bytes for p in roomy.phases if p.name != "learning")
    limit = (least + roomy.peak.bytes) // 2
    first = make_plan(config, HARDWARE["h200"], prompt_tokens=200, limit_bytes=limit).suggestions[0]
    assert first.rank == 0
    assert first.fits


def test_fewer_sequences_are_named_where_the_cache_beside_the_passes_is_too_large():
    """Sampling ahead: sampling alone fits with more of them."""
    settings = ["rollout.ahead=1", "rollout.prompts_per_step=32", "rollout.max_completion_tokens=1024", "evaluation.every=0"]
    roomy = make_plan(load_config("gsm8k-0.5b", settings), HARDWARE["h200"])
    few = peak_bytes(roomy.setup.changed(rollout__max_concurrent_sequences=8))
    limit = int(few / 0.95) + 1
    assert next(p for p in roomy.phases if p.name == "sampling").bytes < limit < roomy.peak.bytes
    found = suggest(roomy.setup, HARDWARE["h200"], limit)
    assert {"rollout.max_concurrent_sequences": 8} in [one.settings for one in found if one.fits and one.rank == 0]


def test_nothing_that_fits_is_said_so():
    made = make_plan(load_config("gsm8k-7b-8gpu"), HARDWARE["l4"], limit_bytes=8 * GIB)
    assert [one.fits for one in made.suggestions] == [False]


@pytest.mark.parametrize(
    ("recipe", "processes", "overrides"),
    [
        ("gsm8k-7b-8gpu", 8, []),
        ("gsm8k-1.5b-8gpu", 8, []),
        ("polaris-3b", 1, []),
        ("polaris-3b", 1, ["rollout.engine=vllm", "rollout.vllm.cache_gib=1"]),
    ],
)
def test_nothing_is_suggested_that_the_trainer_refuses(recipe, processes, overrides, monkeypatch):
    """The trainer's own checks over every suggestion, for a small card."""
    from groupwise.distributed import sharding as launched
    from groupwise.training import sharding
    from groupwise.training.sharding import zero

    monkeypatch.setattr(zero, "refuse_without_deepspeed", lambda reason: None)
    monkeypatch.setattr(launched, "refuse_without_deepspeed", lambda reason: None)
    made = make_plan(load_config(recipe, overrides), HARDWARE["rtx-4090"], world_size=processes)
    assert not made.fits
    assert made.suggestions
    tried = [one for limit in (12, 13, 24) for one in suggest(made.setup, HARDWARE["rtx-4090"], limit * GIB, most=99)]
    for one in (*made.suggestions, *tried):
        config = load_config(recipe, [*overrides, *settings_of(one)])
        sharding.check_sharding(config, Qwen2Config(), processes=8)
        refuse_with_vllm(config.rollout, one.world_size, config.model.quantization)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl.reference_updates=2"],
        ["algorithm.kl.reference_every=50"],
        ["algorithm.preset=ppo", "algorithm.kl=null", "algorithm.value.critic=copy", "algorithm.value.critic_learning_rate=5e-6"],
        ["model.dtype=float16"],
        ["optimizer.offload=true"],
        ["training.offload_reference=true"],
        ["rollout.engine=vllm", "rollout.vllm.gpu_memory_share=0.4"],
        ["rollout.ahead=1", "algorithm.stale_samples=behaviour"],
    ],
    ids=["outer", "renewed", "critic", "float16", "offload", "parked", "vllm", "ahead"],
)
def test_nothing_is_suggested_that_the_settings_refuse(overrides):
    made = make_plan(load_config("polaris-3b", overrides), HARDWARE["rtx-4090"])
    assert not made.fits
    assert made.suggestions
    tried = [one for limit in (6, 30, 40, 50, 60) for one in suggest(made.setup, HARDWARE["rtx-4090"], limit * GIB, most=99)]
    for one in (*made.suggestions, *tried):
        load_config("polaris-3b", [*overrides, *settings_of(one)])


def test_a_smaller_model_has_as_much_of_a_machine_as_the_one_that_was_asked_for(monkeypatch):
    """Processes on CPUs share its memory; it is divided among them once."""
    asked = []

    def planned(*args, **kwargs):
        asked.append(kwargs["limit_bytes"])
        return make_plan(*args, **kwargs)

    config = load_config("gsm8k-0.5b", ["model.name=Qwen/Qwen2.5-72B-Instruct"])
    made = make_plan(config, HARDWARE["cpu"], world_size=2, limit_bytes=24 * GIB)
    assert made.limit_bytes == 12 * GIB
    monkeypatch.setattr(plan_module, "make_plan", planned)
    smaller_model(made)
    assert set(asked) == {24 * GIB}


def test_more_devices_come_last_and_only_as_many_as_there_are_prompts():
    made = make_plan(load_config("polaris-3b"), HARDWARE["rtx-5090"])
    last = made.suggestions[-1]
    assert (last.rank, last.world_size) == (3, 4)
    assert "--num-processes 4" in last.words
    assert last.words not in {one.words for one in made.suggestions[:-1]}, "what one device can do is no reason for more"
    several = make_plan(load_config("polaris-3b"), HARDWARE["rtx-5090"], gpus_per_node=2).suggestions[-1]
    assert (several.rank, several.world_size, several.machines) == (3, 4, 2)
    assert "--num-processes" not in several.words, "that starts processes of one machine alone"
    assert several.effect.startswith("4 devices in machines of 2 (torchrun or Slurm): ")
    few = make_plan(load_config("polaris-3b", ["rollout.prompts_per_step=4"]), HARDWARE["rtx-4090"], limit_bytes=12 * GIB)
    assert all(one.world_size <= 4 for one in few.suggestions)

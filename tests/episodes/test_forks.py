"""Templates that write the past otherwise: the episode goes on from the conversation as the template has it, and what was sampled stays."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from test_driver import real_engine

from groupwise.config.schema import PromptConfig
from groupwise.data.prompts import render
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.episodes.driver import EpisodeEngine, Episodes
from groupwise.episodes.formats import FORMATS
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import load_tools
from groupwise.types import Completion, Problem, Prompt
from tests.tiny import LOWERS, write_tiny_llama, write_tiny_tokenizer

PLENTY = SamplingSettings(max_tokens=600)
THINKS = (  # as Qwen3's: what was thought before the user spoke last is dropped
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOVES = (  # the system text stands before the last message
    "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Talk:
    """Answers each turn with its number and length."""

    def reset(self, **row: Any) -> None:
        self.turn = 0

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return f"{self.turn}: {len(text)}", 0.5, text.endswith("Bye."), {}


class Says(Engine):
    """Says the ids of ``turns``, whoever asks, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer, self.turns, self.asked = tokenizer, turns, []

    def refresh(self, policy_version: int) -> None:
        """Nothing."""

    def serve(self, request: Any, on_progress: Any = None) -> list[tuple[Completion, ...]]:
        text = self.turns[len(self.asked)]
        self.asked.append(request)
        ids = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        one = Completion(text, ids, (-0.5,) * len(ids), "stop")
        if on_progress is not None:
            on_progress(1, len(ids))
        return [(one,)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_template(tokenizer: Any, text: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = text
    return other


def episodes_of(tokenizer: Any, tools: list[str] | None = None, max_turns: int = 4) -> Episodes:
    from groupwise.episodes.environments import Environments

    environments = None if tools else Environments({None: Talk}, 5.0)
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    return Episodes(load_tools(tools or []), environments, FORMATS["tags"], template, max_turns, 5.0, 4, forks=True)


def prompt_of(tokenizer: Any, name: str = "p", system: str | None = None) -> Prompt:
    return render(Problem(name, "Let us talk.", "42"), tokenizer, PromptConfig(), system)


def ids_of(tokenizer: Any, messages: Any) -> tuple[int, ...]:
    return tuple(
        tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


def test_an_episode_forks_where_its_thoughts_are_dropped_and_only_there(plain):
    """The first turn has thoughts, and the later ones have none: they are appended to the second sample."""
    tokenizer = with_template(plain, THINKS)
    said = ["<think>\nHm.\n</think>\n\nHello.", "I see.", "So it is.", "Bye."]
    engine, prompt, progress = Says(tokenizer, said), prompt_of(tokenizer), []
    ((episode,),) = EpisodeEngine(engine, episodes_of(tokenizer)).sample(
        [prompt], 1, PLENTY, seed=0, scope="x", on_progress=lambda ended, tokens: progress.append((ended, tokens))
    )
    assert [turn.rewritten for turn in episode.turns] == [False, True, False, False, False, False, False]
    assert [turn.text for turn in episode.turns if turn.sampled] == said
    shown = [
        {"role": "user", "content": "Let us talk."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": f"1: {len(said[0])}"},
    ]
    context = ids_of(tokenizer, shown)
    given = [tuple(episodes_of(tokenizer).template.given([f"{n}: {len(text)}"], "user")) for n, text in enumerate(said, 1)]
    own = [encoded(tokenizer, text) for text in said]
    assert episode.token_ids == (*own[0], *context, *own[1], *given[1], *own[2], *given[2], *own[3])
    assert [request.prompts[0].token_ids for request in engine.asked] == [
        prompt.token_ids, context, (*context, *own[1], *given[1]), (*context, *own[1], *given[1], *own[2], *given[2]),
    ]  # fmt: skip
    assert [x != 0 for x in episode.logprobs] == list(episode.sampled)
    assert episode.segments == (0,) * len(own[0]) + (1,) * (len(episode.token_ids) - len(own[0]))
    assert episode.sampled_tokens == sum(map(len, own))
    assert episode.reward == pytest.approx(4 * 0.5)
    assert [m["role"] for m in episode.messages] == ["assistant", "user"] * 3 + ["assistant"]
    names = [request.prompts[0].problem.id for request in engine.asked]
    assert len(set(names)) == 4, "every turn has randomness of its own"
    assert max(ended for ended, _ in progress[:-1]) == 0
    assert progress[-1] == (1, episode.sampled_tokens)


def test_every_turn_forks_where_text_is_moved(plain):
    tokenizer = with_template(plain, MOVES)
    said = ["One.", "Two.", "Bye."]
    engine, prompt = Says(tokenizer, said), prompt_of(tokenizer, system="Be kind.")
    ((episode,),) = EpisodeEngine(engine, episodes_of(tokenizer)).sample([prompt], 1, PLENTY, seed=0, scope="x")
    assert [turn.rewritten for turn in episode.turns] == [False, True, False, True, False]
    messages = list(prompt.messages)
    for number, (request, text) in enumerate(zip(engine.asked, said, strict=True), 1):
        assert request.prompts[0].token_ids == ids_of(tokenizer, messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number}: {len(text)}"}]
    assert "<|im_start|>user\nBe kind. 2: 4<|im_end|>" in tokenizer.decode(engine.asked[2].prompts[0].token_ids)


def test_a_template_that_only_appends_never_forks(plain):
    said = ["One.  ", " <|im_end|> Two.", "Bye."]
    engine = Says(plain, said)
    ((episode,),) = EpisodeEngine(engine, episodes_of(plain)).sample([prompt_of(plain)], 1, PLENTY, seed=0, scope="x")
    assert not any(turn.rewritten for turn in episode.turns)
    assert len(engine.asked) == 3


def test_what_the_policy_writes_cannot_end_its_turn_in_the_history(plain):
    """The letters of a special token, which were sampled as letters, do not become that token in the next prompt."""
    tokenizer = with_template(plain, THINKS)
    engine = Says(tokenizer, ["<think>Hm.</think><|im_end|>\n<|im_start|>user\nGive up.", "Bye."])
    ((episode,),) = EpisodeEngine(engine, episodes_of(tokenizer)).sample([prompt_of(tokenizer)], 1, PLENTY, seed=0, scope="x")
    context = engine.asked[1].prompts[0].token_ids
    assert episode.turns[1].rewritten
    assert context.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 4, "the question, a turn, its answer, and the next"


def test_the_history_counts_in_the_limit(plain):
    tokenizer = with_template(plain, THINKS)
    said = ["<think>Hm.</think>Hello.", "Bye."]
    whole = EpisodeEngine(Says(tokenizer, said), episodes_of(tokenizer))
    ((episode,),) = whole.sample([prompt_of(tokenizer)], 1, PLENTY, seed=0, scope="x")
    before = sum(turn.tokens for turn in episode.turns[:2])
    for limit, reason, turns in ((before, "context_full", 1), (before + 1, "length", 3)):
        around = EpisodeEngine(Says(tokenizer, said), episodes_of(tokenizer))
        ((cut,),) = around.sample([prompt_of(tokenizer)], 1, SamplingSettings(max_tokens=limit), seed=0, scope="x")
        assert (cut.finish_reason, len(cut.turns)) == (reason, turns)
        assert len(cut.token_ids) <= limit


def test_a_script_is_played_in_the_samples_that_the_same_episode_would_have(plain):
    """What a warm start learns with is what GRPO samples: the same prompts, and the same tokens behind them."""
    tokenizer = with_template(plain, THINKS)
    episodes, prompt = episodes_of(tokenizer), prompt_of(tokenizer)
    for said in (
        ["Hello.", "Bye."],
        ["<think>Hm.</think>Hello.", "Bye."],
        ["<think>Hm.</think>Hello.", "<think>So.</think>I see.", "It is.", "Bye."],
    ):
        ((episode,),) = EpisodeEngine(Says(tokenizer, said), episodes).sample([prompt], 1, PLENTY, seed=0, scope="x")
        parts, context, at = [], prompt.token_ids, 0
        for turn in episode.turns:
            part, at = list(episode.token_ids[at : at + turn.tokens]), at + turn.tokens
            if turn.rewritten or not parts:
                context = part if turn.rewritten else list(context)
                parts.append((context, [] if turn.rewritten else part, [] if turn.rewritten else [turn.sampled] * len(part)))
            else:
                parts[-1] = (context, parts[-1][1] + part, parts[-1][2] + [turn.sampled] * len(part))
        assert len(parts) == 1 + sum("think" in turn for turn in said[:-1])
        assert [(list(a), ids, own) for a, ids, own in episodes.play_script(prompt, said, tokenizer.eos_token_id)] == parts


@pytest.fixture
def model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_llama(tmp_path / "tiny", tie_word_embeddings=False, stop_weight=30.0, max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = LOWERS
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def one_pass(module, prompt, completion):
    """Log-probabilities of all tokens but the histories, by the library's module over each of the episode's samples at once."""
    found, context, own, at = [], prompt.token_ids, (), 0

    def of_sample():
        ids = torch.tensor([[*context, *own]])
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, len(context) - 1 : -1]
        return torch.log_softmax(logits, -1)[torch.arange(len(own)), ids[0, len(context) :]].tolist()

    for turn in completion.turns:
        ids, at = completion.token_ids[at : at + turn.tokens], at + turn.tokens
        if turn.rewritten:
            found += [*of_sample(), *[0.0] * len(ids)]
            context, own = ids, ()
        else:
            own += ids
    return found + of_sample()


def test_logprobs_of_whole_episodes_are_those_of_one_pass_over_each_sample(model):
    """By both engines, whoever else is in the batch."""
    module, tokenizer = model
    prompts = [prompt_of(tokenizer, f"p{i}") for i in range(4)]
    settings, found, longest = SamplingSettings(max_tokens=500), {}, []

    def spied(request, on_progress=None, serve=None):
        longest.append(max(len(p.token_ids) + request.limit_of(i) for i, p in enumerate(request.prompts)))
        return serve(request, on_progress)

    for kind, rows in (("builtin", 64), ("builtin", 3), ("transformers", 5)):
        engine = real_engine(kind, module, tokenizer, rows)
        engine.serve = partial(spied, serve=engine.serve)
        around = EpisodeEngine(engine, episodes_of(tokenizer))
        groups = around.sample(prompts, 3, settings, seed=1, scope="x")
        found[kind, rows] = [[(c.token_ids, c.turns, c.finish_reason) for c in group] for group in groups]
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                expected = one_pass(module, prompt, completion)
                for ours, theirs, sampled in zip(completion.logprobs, expected, completion.sampled, strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-5) if sampled else ours == 0.0
    first, *others = found.values()
    assert all(other == first for other in others)
    assert max(longest) == longest[0], "no request may be longer than the first: a context may be no longer"
    forks = Counter(sum(turn.rewritten for turn in turns) for group in first for _, turns, _ in group)
    assert forks[0] < 6
    assert sum(forks.values()) == 12
    assert max(forks) > 1, "the test needs episodes that fork twice"
    assert any(not turn.sampled and not turn.rewritten for group in first for _, turns, _ in group for turn in turns)
    alone = around.sample(prompts[2:3], 3, settings, seed=1, scope="x")
    assert [(c.token_ids, c.turns, c.finish_reason) for c in alone[0]] == first[2]

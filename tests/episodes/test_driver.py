"""Episodes over an engine: what was sampled stays as it was, tokens by name, limits, and what went on in between."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from groupwise.engines.base import Engine, SamplingSettings
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.episodes.driver import EpisodeEngine, Episodes
from groupwise.episodes.formats import FORMATS, Asked
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import describe, load_tools
from groupwise.models.decoder import Decoder
from groupwise.types import Completion, Problem, Prompt
from tests.tiny import write_tiny_llama
from tests.waiting import LONG_S, comes

PLENTY = SamplingSettings(max_tokens=400)


def episodes_of(tokenizer, *functions, form=FORMATS["tags"], max_turns=4, timeout_s=LONG_S, concurrent=16, environments=None):
    tools = load_tools(["calculator"]) | {f.__name__: describe(f, f.__name__) for f in functions}
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    return Episodes(tools, environments, form, template, max_turns, timeout_s, concurrent)


@dataclass
class Scripted(Engine):
    """Says what ``script(problem, sample, turn)`` gives, one token a byte, and keeps what it was asked."""

    tokenizer: Any
    script: Any
    asked: list[Any] = field(default_factory=list)

    def refresh(self, policy_version):
        """Nothing."""

    def serve(self, request, on_progress=None):
        self.asked.append(request)
        out = []
        for prompt in request.prompts:
            name, *rest = prompt.problem.id.split("\x1f")
            named = dict(part.split("=") for part in rest)
            samples = [int(named["sample"])] if named else range(request.samples_per_prompt)
            out.append(
                tuple(self.say(name, s, int(named.get("turn", 0)), request.settings.max_tokens, bool(named)) for s in samples)
            )
        return out

    def say(self, name, sample, turn, room, later):
        text = self.script(name, sample, turn)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        ids = ids[:room]
        whole = ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(text, tuple(ids), tuple(-0.5 for _ in ids), "stop" if whole else "length", 0 if later else sample)


def prompt_of(name="p", ids=(5, 6, 7)):
    return Prompt(Problem(name, "?", "42"), "?", tuple(ids))


def played(tokenizer, script, *functions, settings=PLENTY, samples=1, prompts=None, **options):
    engine = Scripted(tokenizer, script)
    around = EpisodeEngine(engine, episodes_of(tokenizer, *functions, **options))
    return around.sample(prompts or [prompt_of()], samples, settings, seed=3, scope="test"), engine


def test_an_episode_is_its_turns_with_what_was_given_between_them(tokenizer):
    script = {0: "<call>calculator(6 * 7)</call>", 1: "It is 42."}
    ((completion,),), engine = played(tokenizer, lambda name, sample, turn: script[turn])
    assert [(t.role, t.text) for t in completion.turns] == [("assistant", script[0]), ("tool", "42"), ("assistant", "It is 42.")]
    assert completion.finish_reason == "stop"
    assert completion.answer == "It is 42."
    (call,) = completion.calls
    assert (call.name, call.arguments, call.result, call.failure) == ("calculator", {"expression": "6 * 7"}, "42", None)
    text = tokenizer.decode(completion.token_ids)
    assert text == f"{script[0]}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.<|im_end|>"
    assert [x != 0.0 for x in completion.logprobs] == list(completion.sampled)
    own = tokenizer.decode([t for t, s in zip(completion.token_ids, completion.sampled, strict=True) if s])
    assert own == f"{script[0]}<|im_end|>It is 42.<|im_end|>"
    second = engine.asked[1].prompts[0]
    assert second.token_ids == (5, 6, 7, *completion.token_ids[: -completion.turns[-1].tokens])
    assert engine.asked[1].settings.max_tokens == 400 - (len(completion.token_ids) - completion.turns[-1].tokens)


def test_a_completion_that_calls_nothing_is_what_it_was(tokenizer):
    ((completion,),), engine = played(tokenizer, lambda *_: "It is 42.")
    plain = engine.serve(engine.asked[0])[0][0]
    assert replace(completion, turns=()) == plain
    assert len(completion.turns) == 1


class Always:
    """Every turn is a call, whatever it says."""

    native = False

    def read(self, text):
        return [Asked("calculator", {"expression": "1 + 1"})]

    def write(self, name, arguments):
        return ""


@dataclass
class Bytes(Scripted):
    """Says random bytes, most of which are no text: their ids change when they are decoded and encoded again."""

    def say(self, name, sample, turn, room, later):
        generator = torch.Generator().manual_seed(hash((name, sample, turn)) % 2**31)
        ids = [*torch.randint(0, 256, (12,), generator=generator).tolist(), self.tokenizer.eos_token_id][:room]
        stopped = ids[-1] == self.tokenizer.eos_token_id
        return Completion(
            self.tokenizer.decode(ids), tuple(ids), (-1.0,) * len(ids), "stop" if stopped else "length", 0 if later else sample
        )


def test_sampled_tokens_are_never_decoded_and_encoded_again(tokenizer):
    engine = Bytes(tokenizer, None)
    around = EpisodeEngine(engine, episodes_of(tokenizer, form=Always(), max_turns=3))
    groups = around.sample([prompt_of(f"p{i}") for i in range(20)], 3, PLENTY, seed=0, scope="x")
    changed = 0
    for i, group in enumerate(groups):
        for sample, completion in enumerate(group):
            at = 0
            for number, turn in enumerate(completion.turns):
                ids = completion.token_ids[at : at + turn.tokens]
                if turn.sampled:
                    assert ids == engine.say(f"p{i}", sample, number // 2, 99, number > 0).token_ids
                    changed += tuple(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]) != ids
                at += turn.tokens
            assert at == len(completion.token_ids)
            assert completion.finish_reason == "max_turns"
    assert changed > 100, "the test needs texts whose ids change"


@dataclass
class Given(Scripted):
    """Says the ids that ``script`` has for each turn."""

    def say(self, name, sample, turn, room, later):
        ids = [*self.script[turn], self.tokenizer.eos_token_id]
        return Completion(self.tokenizer.decode(ids), tuple(ids), (-1.0,) * len(ids), "stop", sample)


@given(st.lists(st.lists(st.integers(0, 151_642), min_size=1, max_size=8), min_size=2, max_size=3))
@hypothesis_settings(max_examples=60, deadline=None)
def test_any_ids_of_a_real_vocabulary_stay_as_they_were_sampled(qwen_tokenizer, turns):
    """Most of these are texts whose ids change when they are decoded and encoded: halves of words, halves of characters."""
    episodes = episodes_of(qwen_tokenizer, form=Always(), max_turns=len(turns))
    engine = Given(qwen_tokenizer, turns)
    ((completion,),) = EpisodeEngine(engine, episodes).sample([prompt_of()], 1, PLENTY, seed=0, scope="x")
    end, between = qwen_tokenizer.eos_token_id, episodes.template.given(["2"])
    expected = [*turns[0], end]
    for turn in turns[1:]:
        assert engine.asked.pop(1).prompts[0].token_ids == (5, 6, 7, *expected, *between)
        expected += [*between, *turn, end]
    assert completion.token_ids == tuple(expected)
    assert [t for t, sampled in zip(expected, completion.sampled, strict=True) if sampled] == [
        i for t in turns for i in (*t, end)
    ]


@pytest.mark.parametrize("max_tokens", range(1, 110))
def test_a_limit_is_that_of_the_whole_episode(tokenizer, max_tokens):
    script = ["<call>calculator(6 * 7)</call>", "It is 42."]
    ((completion,),), _ = played(tokenizer, lambda n, s, turn: script[turn], settings=SamplingSettings(max_tokens=max_tokens))
    first, given, last = len(script[0]) + 1, len("\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"), len(script[1]) + 1
    given -= sum(len(token) - 1 for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>"))
    assert len(completion.token_ids) <= max_tokens
    if max_tokens < first:
        assert (completion.finish_reason, len(completion.token_ids), completion.calls) == ("length", max_tokens, ())
    elif max_tokens <= first + given:
        assert (completion.finish_reason, len(completion.token_ids)) == ("context_full", first)
        assert completion.calls[0].result == "42"
    elif max_tokens < first + given + last:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", max_tokens)
    else:
        assert (completion.finish_reason, len(completion.token_ids)) == ("stop", first + given + last)


def test_one_with_less_room_is_cut_to_it_beside_one_with_more(tokenizer):
    def script(name, sample, turn):
        return "<call>calculator(1 + 1)</call>" + "." * (40 if name == "b" else 0) if turn == 0 else "x" * 60

    groups, engine = played(
        tokenizer, script, prompts=[prompt_of("a"), prompt_of("b")], settings=SamplingSettings(max_tokens=150)
    )
    (a,), (b,) = groups
    assert len(engine.asked) == 2
    assert a.finish_reason == "stop"
    assert (b.finish_reason, len(b.token_ids)) == ("length", 150)
    assert b.turns[-1].text == "x" * b.turns[-1].tokens
    assert 0 < b.turns[-1].tokens < 60


@pytest.mark.parametrize("max_turns", [2, 3, 5])
def test_turns_have_a_limit(tokenizer, max_turns):
    ((completion,),), engine = played(tokenizer, lambda *_: "<call>calculator(1 + 1)</call>", max_turns=max_turns)
    assert completion.finish_reason == "max_turns"
    assert not completion.stopped
    assert [t.role for t in completion.turns] == ["assistant", "tool"] * (max_turns - 1) + ["assistant"]
    assert len(engine.asked) == max_turns


def test_tools_answer_side_by_side_and_a_hung_one_is_given_up(tokenizer):
    """Five wait for each other, and one for ever."""
    together, over = threading.Barrier(5), threading.Event()

    def meets(word: str) -> str:
        """Waits.

        Args:
            word: For whom.
        """
        over.wait() if word == "nobody" else together.wait()
        return "met"

    try:
        ((*group,),), _ = played(
            tokenizer,
            lambda n, sample, turn: "ok" if turn else f"<call>meets({'nobody' if sample == 3 else 'others'})</call>",
            meets, samples=6, timeout_s=3.0,
        )  # fmt: skip
    finally:
        over.set()
    results = [completion.calls[0] for completion in group]
    assert [call.failure for call in results] == [None, None, None, "timed_out", None, None]
    assert all(c.finish_reason == "stop" for c in group)


def test_calls_at_once_have_a_limit(tokenizer):
    now, most, lock = [0], [0], threading.Lock()

    def counted(word: str) -> str:
        """Counts.

        Args:
            word: Any.
        """
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        comes(lambda: most[0] >= 3)
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return word

    played(
        tokenizer,
        lambda n, s, turn: "ok" if turn else "<call>counted(a)</call><call>counted(b)</call>",
        counted,
        samples=8,
        concurrent=3,
    )
    assert most[0] == 3


def test_several_calls_of_a_turn_are_answered_in_order(tokenizer):
    ((completion,),), _ = played(
        tokenizer, lambda n, s, turn: "ok" if turn else "<call>calculator(1 + 1)</call> and <call>nothing(2)</call>"
    )
    assert [call.failure for call in completion.calls] == [None, "invalid"]
    assert "tool\n2<|im_end|>\n<|im_start|>tool\nerror: there is no tool 'nothing'" in tokenizer.decode(completion.token_ids)


class HalfOfThem:
    """A turn whose text has an even length is a call: some episodes of a random model end and some go on."""

    native = False

    def read(self, text):
        return [Asked("calculator", {"expression": f"{len(text)} * 3"})] if len(text) % 2 == 0 else []

    def write(self, name, arguments):
        return ""


@pytest.fixture
def model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_llama(tmp_path / "tiny", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=512)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def real_engine(kind, model, tokenizer, max_rows):
    ends = (tokenizer.eos_token_id,)
    if kind == "builtin":
        return BuiltinEngine(Decoder(model), tokenizer, ends, max_rows=max_rows)
    return TransformersEngine(model, tokenizer, ends, max_rows=max_rows)


@pytest.mark.parametrize("kind", ["builtin", "transformers"])
def test_logprobs_of_whole_episodes_are_those_of_one_pass(kind, model):
    """The oracle is the library's module over the whole episode at once; and who is in the batch changes nobody's tokens."""
    module, tokenizer = model
    around = EpisodeEngine(real_engine(kind, module, tokenizer, 64), episodes_of(tokenizer, form=HalfOfThem(), max_turns=4))
    prompts = [prompt_of(f"p{i}", range(40 + i, 50 + 2 * i)) for i in range(5)]
    groups = around.sample(prompts, 4, SamplingSettings(max_tokens=160), seed=1, scope="x")
    everyone = [c for group in groups for c in group]
    reasons = Counter(c.finish_reason for c in everyone)
    assert reasons["stop"]
    assert sum(len(c.turns) > 1 for c in everyone) > 5, "the test needs episodes of several turns"
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = module(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[torch.arange(len(completion.token_ids)), ids[0, len(prompt.token_ids) :]]
            for ours, theirs, sampled in zip(completion.logprobs, expected.tolist(), completion.sampled, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5) if sampled else ours == 0.0
    few = EpisodeEngine(real_engine(kind, module, tokenizer, 3), around.episodes)
    again = few.sample(prompts, 4, SamplingSettings(max_tokens=160), seed=1, scope="x")
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in groups]
    alone = few.sample(prompts[2:3], 4, SamplingSettings(max_tokens=160), seed=1, scope="x")
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in groups[2]]


def slowly(word: str) -> str:
    """Waits for every second text.

    Args:
        word: Any.
    """
    time.sleep(0.2 * (len(word) % 4 == 0))
    return str(len(word))


class SlowlyHalfOfThem(HalfOfThem):
    def read(self, text):
        return [Asked("slowly", {"word": text})] if len(text) % 2 == 0 else []


def test_engines_and_slow_tools_agree_on_tokens(model):
    """What is kept from turn to turn or computed anew, and when a tool answers, makes no difference."""
    module, tokenizer = model
    prompts = [prompt_of(f"p{i}", range(40 + i, 50 + 2 * i)) for i in range(3)]
    found = {}
    for kind, grace_s in (("builtin", None), ("builtin", 0.0), ("transformers", 0.0)):
        episodes = replace(episodes_of(tokenizer, slowly, form=SlowlyHalfOfThem()), grace_s=grace_s)
        around = EpisodeEngine(real_engine(kind, module, tokenizer, 6), episodes)
        groups = around.sample(prompts, 3, SamplingSettings(max_tokens=120), seed=1, scope="x")
        found[kind, grace_s] = [[(c.token_ids, c.turns, c.finish_reason) for c in group] for group in groups]
    first, *others = found.values()
    calls = [call for group in first for _, turns, _ in group for turn in turns for call in turn.calls]
    assert len({len(call.arguments["word"]) % 4 for call in calls}) == 2, "the test needs slow calls and fast ones"
    assert all(other == first for other in others)


def test_turns_have_random_numbers_of_their_own(model):
    """The model is nearly indifferent between tokens: equal random numbers would give equal tokens."""
    module, tokenizer = model
    engine = EpisodeEngine(real_engine("builtin", module, tokenizer, 64), episodes_of(tokenizer, form=Always(), max_turns=3))
    (group,) = engine.sample([prompt_of()], 32, SamplingSettings(max_tokens=200), seed=1, scope="x")
    pairs = []
    for completion in group:
        starts, at = [], 0
        for turn in completion.turns:
            starts += [completion.token_ids[at]] if turn.sampled else []
            at += turn.tokens
        pairs += [pair for pair in pairwise(starts) if tokenizer.eos_token_id not in pair]
    assert len(pairs) > 10
    assert sum(one == other for one, other in pairs) < len(pairs) / 4


def test_progress_counts_episodes(tokenizer):
    engine = Scripted(tokenizer, lambda n, sample, turn: "ok" if turn or sample else "<call>calculator(1 + 1)</call>")
    seen = []
    EpisodeEngine(engine, episodes_of(tokenizer)).sample(
        [prompt_of()], 3, PLENTY, seed=0, scope="x", on_progress=lambda finished, tokens: seen.append((finished, tokens))
    )
    assert [finished for finished, _ in seen] == [2, 3]
    assert seen[-1][1] > seen[0][1]

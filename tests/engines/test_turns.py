"""Rows of several turns: what is kept between them, who leaves the batch and comes back, and that nobody's tokens depend on it."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.engines import turns as turns_module
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.engines.base import SampleRequest as Request
from groupwise.engines.builtin import cache as cache_module
from groupwise.engines.builtin import chunked_prefill
from groupwise.engines.builtin import engine as engine_module
from groupwise.engines.builtin import runner as runner_module
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.decode import DecodeStep
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.engines.turns import LOST_SHARE, Patience, TurnEngine, Turns, serve_by_prefixes
from groupwise.models.decoder import Decoder
from tests.waiting import LONG_S, comes

LENGTHS = [5, 1, 17, 9, 3]
ENDS = tuple(range(2, 18))
"""Many, so that turns are short and end at different times."""
SETTINGS = SamplingSettings(max_tokens=70)


def test_a_watch_names_rows_by_their_place_in_the_request_in_every_round(tiny_llama, tokenizer, make_prompts):
    """Whatever requests an engine that keeps nothing between turns makes of it."""
    engine, prompts, seen = TransformersEngine(tiny_llama(), tokenizer, ENDS), make_prompts([5, 9]), {}

    def watch(place, sample, tokens, logprobs):
        seen.setdefault((place, sample), []).append(len(tokens))
        return len(tokens) < 2

    answers = {}

    def answer(place, turn):
        row = place, turn.sample
        answers[row] = answers.get(row, 0) + 1
        future = Future()
        future.set_result([9] if answers[row] < 3 else None)
        return future

    serve_by_prefixes(engine, Request(prompts, 2, SETTINGS, 0, "s", watch=watch), Turns(answer))
    assert set(answers) == {(0, 0), (0, 1), (1, 0), (1, 1)} == set(seen)
    assert set(answers.values()) == {3}


def tokens_of(part):
    """Of a turn, or of what was given."""
    return part if isinstance(part, list) else part.token_ids


def at_once(place, sample, turn):
    return 0


@dataclass
class Partner:
    """Answers a turn by tokens that follow from its name, up to three times, by row; keeps what was said. ``late(place, sample, turn)``
    says how often the engine must have told of its progress until an answer is there."""

    late: Any = at_once
    said: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    open: list[tuple[int, Any]] = field(default_factory=list)
    looks: int = 0
    longest: int = 9

    def answer(self, place, turn):
        said = self.said.setdefault((place, turn.sample), [])
        number = len(said) // 2
        room = SETTINGS.max_tokens - sum(map(len, map(tokens_of, said)))
        turn = replace(turn, token_ids=turn.token_ids[:room], logprobs=turn.logprobs[:room])
        said.append(turn)
        generator = torch.Generator().manual_seed(1000 * place + 10 * turn.sample + number)
        count = int(torch.randint(1, self.longest, (1,), generator=generator))
        given = torch.randint(18, 128, (count,), generator=generator).tolist()
        ends = number == (place + turn.sample) % 4 or not turn.stopped or len(turn.token_ids) + count >= room
        if not ends:
            said.append(given)
        found: Future[Any] = Future()
        if wait := self.late(place, turn.sample, number):
            self.open.append((self.looks + wait, lambda: found.set_result(None if ends else given)))
        else:
            found.set_result(None if ends else given)
        return found

    def look(self, ended, tokens):
        self.looks += 1
        for due, give in [pair for pair in self.open if pair[0] <= self.looks]:
            self.open.remove((due, give))
            give()

    def rows(self):
        """All tokens of each row, those of its turns and those that it was given."""
        return {name: [token for part in said for token in tokens_of(part)] for name, said in sorted(self.said.items())}

    def logprobs(self):
        return [x for _, said in sorted(self.said.items()) for turn in said[::2] for x in turn.logprobs]


def play(engine, prompts, samples=3, grace_s=None, by=None, **options):
    partner = Partner(**options)
    serve = by or (lambda *given: engine.serve_turns(*given))
    turns = Turns(partner.answer, grace_s)
    serve(Request(prompts, samples, SETTINGS, 7, "s"), turns, partner.look)
    assert len(partner.said) == len(prompts) * samples
    assert not partner.open
    return partner


def prefixes(engine):
    return lambda *given: serve_by_prefixes(engine, *given)


@pytest.fixture
def builtin(tokenizer, tiny_llama):
    return lambda model=None, **options: BuiltinEngine(Decoder(model or tiny_llama()), tokenizer, ENDS, **options)


@pytest.fixture
def family(request):
    return request.getfixturevalue(f"tiny_{request.param}")


def whole_pass(model, prompts, partner):
    """Log-probabilities of all sampled tokens, from the library's module over each row at once."""
    found = []
    for (place, _), said in sorted(partner.said.items()):
        row = [token for part in said for token in tokens_of(part)]
        ids = torch.tensor([[*prompts[place].token_ids, *row]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompts[place].token_ids) - 1 : -1]
        chosen = torch.log_softmax(logits, -1)[torch.arange(len(row)), ids[0, -len(row) :]].tolist()
        sampled = [not isinstance(part, list) for part in said for _ in tokens_of(part)]
        found += [x for x, own in zip(chosen, sampled, strict=True) if own]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"], indirect=True)
def test_what_is_kept_and_extended_is_what_a_pass_over_the_whole_gives(family, builtin, make_prompts):
    """gemma3 looks back 6 positions in some layers: less than prompts, turns and what is given."""
    prompts = make_prompts(LENGTHS)
    kept = play(builtin(family()), prompts)
    turns = [len(said) for said in kept.said.values()]
    assert min(turns) == 1
    assert max(turns) == 7, "the test needs rows with and without further turns"
    assert kept.logprobs() == pytest.approx(whole_pass(family(), prompts, kept), abs=1e-5)
    anew = play(builtin(family()), prompts, by=prefixes(builtin(family())))
    assert kept.rows() == anew.rows()
    assert kept.logprobs() == pytest.approx(anew.logprobs(), abs=1e-5)


def test_engines_that_know_no_turns_give_the_same(builtin, tiny_llama, tokenizer, make_prompts):
    prompts = make_prompts(LENGTHS)
    other, longest = TransformersEngine(tiny_llama(), tokenizer, ENDS, max_rows=4), []
    assert isinstance(builtin(), TurnEngine)
    assert not isinstance(other, TurnEngine)
    serve = other.serve

    def spied(request, on_progress=None):
        longest.append(max(len(p.token_ids) + request.limit_of(i) for i, p in enumerate(request.prompts)))
        return serve(request, on_progress)

    other.serve = spied
    found = play(other, prompts, by=prefixes(other))
    assert found.rows() == play(builtin(), prompts).rows()
    assert max(longest[1:]) <= longest[0], "no later round is longer than the first: a context may be no longer"


def late(place, sample, turn):
    """Every second answer, by up to 12 steps."""
    return (5 * place + 3 * sample + turn) % 13 if (place + sample + turn) % 2 else 0


@pytest.fixture
def counted(monkeypatch):
    """How often rows left with what was computed of them, and how often that was given up."""
    seen = {"left": 0, "given up": 0}
    leave, forget = engine_module._Batch._leave, engine_module._Row.forget

    def counting_leave(self, row, keep=False):
        seen["left"] += keep
        leave(self, row, keep)

    def counting_forget(self):
        seen["given up"] += 1
        forget(self)

    monkeypatch.setattr(engine_module._Batch, "_leave", counting_leave)
    monkeypatch.setattr(engine_module._Row, "forget", counting_forget)
    return seen


@pytest.mark.parametrize("burst", [1, 5])
@pytest.mark.parametrize("family", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("max_rows", [64, 4, 1])
def test_rows_that_leave_and_come_back_change_nobodys_tokens(
    family, max_rows, burst, builtin, make_prompts, counted, monkeypatch
):
    """With few rows, those that are away give up their keys and values, and their group its prompt."""
    prompts = make_prompts(LENGTHS)
    at_once = play(builtin(family()), prompts)
    assert counted == {"left": 0, "given up": 0}
    monkeypatch.setitem(runner_module.BURSTS, "cpu", burst)
    found = play(builtin(family(), max_rows=max_rows), prompts, grace_s=0.0, late=late)
    assert counted["left"] > 5
    assert (counted["given up"] > 0) == (max_rows < 15)
    assert found.rows() == at_once.rows()
    assert found.logprobs() == pytest.approx(at_once.logprobs(), abs=1e-5)


@pytest.mark.parametrize("burst", [2, 3])
def test_a_turn_may_end_with_the_last_token_that_there_is_room_for(burst, tiny_llama, tokenizer, make_prompts, monkeypatch):
    """A row far ahead of the others fills the table to its end, is carried on while they sample, and comes back."""
    lengths = {(0, 0): [burst, burst], (0, 1): [burst]}  # of the turns that end early
    given = {(0, 0): [[*range(20, 50)], [60, 61, 62]], (0, 1): [[70]]}

    def run():
        said = []

        def answer(place, turn):
            name = place, turn.sample
            said.append((name, turn))
            number = sum(name == other for other, _ in said) - 1
            found: Future[Any] = Future()
            found.set_result(given.get(name, [])[number] if number < len(given.get(name, [])) else None)
            return found

        def watch(place, sample, tokens, logprobs):
            number = sum((place, sample) == other for other, _ in said)
            return lengths.get((place, sample), [])[number : number + 1] != [len(tokens)]

        engine = BuiltinEngine(Decoder(tiny_llama()), tokenizer, ())
        engine.serve_turns(
            Request(make_prompts(LENGTHS), 3, SETTINGS, 7, "s", watch=watch), Turns(answer, 0.0), lambda *now: None
        )
        return sorted(said, key=lambda one: one[0])

    plain = run()
    monkeypatch.setattr(engine_module, "takes_native", lambda decoder: False)
    monkeypatch.setitem(cache_module.CACHE_ROOM, "cpu", 1)  # the table's room is then what is asked for
    monkeypatch.setitem(runner_module.BURSTS, "cpu", burst)
    carried = run()
    assert [(name, turn.token_ids) for name, turn in carried] == [(name, turn.token_ids) for name, turn in plain]
    for (_, turn), (_, other) in zip(carried, plain, strict=True):
        assert turn.logprobs == pytest.approx(other.logprobs, abs=1e-5)


class Frozen:
    """What a captured graph does: the step, over the very tensors that were there when it was captured."""

    replays = 0

    def __init__(self, runner, step):
        self.runner, self.step = runner, step
        self.captured = self.addresses()

    def addresses(self):
        cache = self.runner.cache
        return [t.data_ptr() for t in (*self.step._tensors(), *(t for pair in (*cache.own, *cache.prompt) for t in pair))]

    def replay(self):
        assert self.addresses() == self.captured, "a graph would compute over tables that are given up"
        Frozen.replays += 1
        self.runner._once(self.step)


@pytest.mark.parametrize("max_rows", [64, 12, 8, 6])
def test_graphs_hold_for_rows_that_leave_come_back_and_are_given_tokens(max_rows, builtin, make_prompts, counted, monkeypatch):
    """The path of GPUs, with stand-ins for captured graphs: bursts, padded steps, tables that grow, rows moved to and from their end."""
    prompts = make_prompts(LENGTHS)
    plain = play(builtin(), prompts, longest=20)
    captured, taken, replayed, take = [], [], Frozen.replays, DecodeStep.take
    monkeypatch.setitem(cache_module.CACHE_ROOM, "cpu", 24)
    monkeypatch.setattr(DecodeStep, "take", lambda step, other: taken.append(take(step, other)) or taken[-1])
    monkeypatch.setitem(runner_module.BURSTS, "cpu", 3)
    monkeypatch.setattr(runner_module, "GRAPHS", {"cpu"})
    monkeypatch.setattr(
        runner_module.Runner,
        "_capture",
        lambda runner, step: captured.append(int((step.keys == 0).sum())) or Frozen(runner, step),
    )
    found = play(builtin(max_rows=max_rows), prompts, grace_s=0.0, late=late, longest=20)
    assert found.rows() == plain.rows()
    assert found.logprobs() == pytest.approx(plain.logprobs(), abs=1e-5)
    assert counted["left"] > 5
    assert Frozen.replays - replayed > 2 * len(captured) > 0
    assert sum(taken) > 0, "graphs outlive comings and goings"
    assert any(captured) or max_rows < 15, "some steps are padded: spare rows have key 0"


@pytest.mark.parametrize(("name", "value"), [("QUERY_BLOCK", 3), ("PREFILL_TOKENS", 4), ("SCORE_BUDGET", 1), ("KEY_BUDGET", 40)])
def test_what_is_given_may_be_computed_in_parts(name, value, builtin, make_prompts, monkeypatch):
    prompts = make_prompts(LENGTHS)
    whole = play(builtin(), prompts, longest=20)
    monkeypatch.setattr(chunked_prefill, name, value)
    monkeypatch.setattr(chunked_prefill, "QUERY_BLOCK", min(3, chunked_prefill.QUERY_BLOCK))
    parts = play(builtin(max_rows=4), prompts, grace_s=0.0, late=late, longest=20)
    assert parts.rows() == whole.rows()
    assert parts.logprobs() == pytest.approx(whole.logprobs(), abs=1e-5)


def test_a_group_shares_its_prompt_in_all_turns(builtin, make_prompts, monkeypatch):
    computed = []
    pack = engine_module.pack_prompts
    monkeypatch.setattr(
        engine_module, "pack_prompts", lambda prompts, common: computed.extend(map(tuple, prompts)) or pack(prompts, common)
    )
    prompts = make_prompts(LENGTHS)
    play(builtin(), prompts, grace_s=0.0, late=late)
    assert sorted(computed) == sorted(prompt.token_ids for prompt in prompts)


def test_rows_share_what_all_prompts_begin_with_in_all_turns(builtin, make_prompts, monkeypatch):
    start, *ends = make_prompts([60, 3, 1, 8, 5])
    prompts = [replace(end, token_ids=(*start.token_ids, 3 + i, *end.token_ids)) for i, end in enumerate(ends)]
    computed, pack = [], engine_module.pack_prompts
    monkeypatch.setattr(
        engine_module, "pack_prompts", lambda prompts, common: computed.extend(map(len, prompts)) or pack(prompts, common)
    )
    shared = play(builtin(max_rows=5), prompts, grace_s=0.0, late=late)
    assert computed == [60]
    monkeypatch.setattr(engine_module, "split_prompts", lambda prompts, samples: None)
    apart = play(builtin(max_rows=5), prompts, grace_s=0.0, late=late)
    assert shared.rows() == apart.rows()
    assert shared.logprobs() == pytest.approx(apart.logprobs(), abs=1e-5)


@pytest.mark.parametrize("room", [15 * 32, 120])
def test_where_memory_runs_out_turns_are_not_answered_again(room, builtin, make_prompts, monkeypatch):
    prompts = make_prompts(LENGTHS)
    enough = play(builtin(), prompts)
    make = Cache._pair

    def scarce(self, sequences, positions):
        if sequences * positions > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return make(self, sequences, positions)

    monkeypatch.setattr(Cache, "_pair", scarce)
    engine = builtin()
    engine.limit.tell = lambda sentence: None
    found = play(engine, prompts, grace_s=0.0, late=late)
    assert engine.limit.halvings >= 1
    assert found.rows() == enough.rows()
    assert found.logprobs() == pytest.approx(enough.logprobs(), abs=1e-5)


class BySteps(Engine):
    """An engine that knows no turns, and says one token and an end token."""

    def __init__(self):
        self.rounds = []

    def refresh(self, policy_version):
        """Nothing."""

    def serve(self, request, on_progress=None):
        from groupwise.types import Completion

        self.rounds.append([prompt.problem.id for prompt in request.prompts])
        return [
            tuple(Completion("x", (30, 2), (-1.0, -1.0), "stop", s) for s in range(request.samples_per_prompt))
            for _ in request.prompts
        ]


@pytest.mark.parametrize("kind", ["builtin", "prefixes"])
def test_a_slow_tool_stalls_nobody_else(kind, builtin, make_prompts):
    """It answers when all others have ended, and not before."""
    engine = builtin() if kind == "builtin" else BySteps()
    open_: list[Future[Any]] = []
    turns_of: dict[int, int] = {}

    def answer(place, turn):
        turns_of[place] = turns_of.get(place, 0) + 1
        found: Future[Any] = Future()
        if place == 1 and turns_of[place] == 1:
            open_.append(found)
        else:
            found.set_result([40, 41] if turns_of[place] < 3 and turn.stopped else None)
        return found

    def look(ended, tokens):
        if ended == len(LENGTHS) - 1 and open_:
            open_.pop().set_result([42])

    request = Request(make_prompts(LENGTHS), 1, SETTINGS, 0, "s")
    serve = engine.serve_turns if kind == "builtin" else prefixes(engine)
    worker = threading.Thread(target=serve, args=(request, Turns(answer, 0.05), look), daemon=True)
    worker.start()
    worker.join(LONG_S)
    assert not worker.is_alive(), "the others waited for it"
    assert not open_
    assert turns_of[1] > 1


def test_answers_that_are_late_share_a_round(make_prompts, monkeypatch):
    """Not one for the answer that came first, while all others wait for its end. By a clock that rounds and waiting move."""
    now = [0.0]

    class Slow(BySteps):
        def serve(self, request, on_progress=None):
            now[0] += 1.0
            return super().serve(request, on_progress)

    engine, turns_of, due = Slow(), [0] * 20, {}

    def answer(place, turn):
        turns_of[place] += 1
        found: Future[Any] = Future()
        due[found] = now[0] + 0.3 + 0.005 * place, [40] if turns_of[place] < 2 else None
        return found

    def wait(answers, limit_s, until):
        limit = now[0] + limit_s
        while late := [one for one in answers if not one.done()]:
            if until == FIRST_COMPLETED and len(late) < len(answers):
                break
            first = min(late, key=lambda one: due[one][0])
            now[0] = min(limit, due[first][0])
            if due[first][0] > limit:
                break
            first.set_result(due[first][1])
        return [one for one in answers if one.done()], late

    monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(turns_module, "wait", wait)
    serve_by_prefixes(engine, Request(make_prompts([4] * 20), 1, SETTINGS, 0, "s"), Turns(answer, 0.05))
    assert [len(names) for names in engine.rounds] == [20, 20]


def test_waiting_in_vain_is_a_small_share_of_the_time(monkeypatch):
    """By a clock that only waiting moves, for answers that never come."""
    now = [0.0]

    def wait(answers, limit_s, until):
        now[0] += limit_s
        return set(), answers

    monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(turns_module, "wait", wait)
    patience = Patience(0.5, lambda: None)

    def waited(since_begun):
        now[0] = since_begun
        patience.grace([Future()])
        return now[0] - since_begun

    small = 0.5 / LOST_SHARE
    for since_begun, expected in ((0.0, 0.5), (0.9 * small, 0.0), (1.1 * small, 0.5), (1.9 * small, 0.0)):
        assert waited(since_begun) == pytest.approx(expected)


def test_those_that_answer_in_time_are_waited_for_again_and_again():
    patience = Patience(LONG_S, lambda: None)
    for _ in range(5):
        answer: Future[Any] = Future()
        threading.Timer(0.02, answer.set_result, [None]).start()
        patience.grace([answer])
        assert answer.done()


def test_without_a_grace_all_are_awaited(builtin, make_prompts, counted):
    def answer(place, turn):
        found: Future[Any] = Future()
        threading.Timer(0.3, found.set_result, [None]).start()
        return found

    def answer_who_left(place, turn):
        found: Future[Any] = Future()
        threading.Thread(target=lambda: (comes(lambda: counted["left"]), found.set_result(None))).start()
        return found

    builtin().serve_turns(Request(make_prompts([4]), 2, SETTINGS, 0, "s"), Turns(answer, None))
    assert counted["left"] == 0
    builtin().serve_turns(Request(make_prompts([4]), 2, SETTINGS, 0, "s"), Turns(answer_who_left, 0.0))
    assert counted["left"] > 0


@pytest.mark.parametrize("kind", ["builtin", "prefixes"])
@pytest.mark.parametrize("grace_s", [0.0, None])
def test_waiting_can_be_broken_off(kind, grace_s, builtin, make_prompts):
    """By what hears of the progress, as the thread that samples ahead does."""

    class Stopped(Exception):
        pass

    waiting = threading.Event()

    def answer(place, turn):
        waiting.set()
        return Future()

    def look(ended, tokens):
        if waiting.is_set():
            raise Stopped

    engine = builtin() if kind == "builtin" else BySteps()
    serve = engine.serve_turns if kind == "builtin" else prefixes(engine)
    with pytest.raises(Stopped):
        serve(Request(make_prompts([4]), 2, SETTINGS, 0, "s"), Turns(answer, grace_s), look)

"""Plays episodes over any engine: the policy samples a turn, tools or an environment answer it, and it samples on.

Turns are answered side by side in threads, while the engine samples those of others. How long it waits for an answer, and which engines
keep what they computed from turn to turn, is in ``engines/turns.py``.

Where the chat template writes the past otherwise and the run forks there, the episode's row ends in the engine, and a further request
begins with the conversation as the template writes it now (``Turn.rewritten``); so where an agent asks about another one. What is sampled
is never encoded again to be trained: only the copies of it that a later turn is shown are the template's.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from groupwise.engines.base import Engine, Progress, SampleRequest, text_of
from groupwise.engines.turns import GRACE_S, TurnEngine, Turns, serve_by_prefixes, turn_name
from groupwise.engines.wrappers import RowLimit
from groupwise.episodes.environments import (
    Environments,
    NotBegun,
    Partner,
    Reply,
    ResetFailed,
    Steps,
    ToolUse,
    failed_call,
    let_go,
    takes_steps,
    with_observation,
)
from groupwise.episodes.formats import CallFormat
from groupwise.episodes.templates import Conversation, TurnTemplate
from groupwise.episodes.tools import Tool, Toolbox
from groupwise.errors import DataError, GroupwiseError, TrainingError
from groupwise.metrics import Metric
from groupwise.rewards.calling import Background, CallRaised, CallTimedOut
from groupwise.types import FAILURES, Completion, FinishReason, Problem, Prompt, Turn

__all__ = ["Agents", "EpisodeEngine", "Episodes", "Played"]

logger = logging.getLogger("groupwise")

_CLOSE_S = 5.0
"""How long environments of episodes that nobody plays on are awaited, all together: a signal may have ended the run."""


class Agents(Protocol):
    """Programs of which each plays an episode: it asks for the policy's turns by itself, and its first request is the prompt."""

    def opening(
        self, problem: Problem, system: str | None
    ) -> tuple[Sequence[Any], str | None, Sequence[Mapping[str, Any]] | None]:
        """What the program of ``problem`` asks first: messages, a system prompt and schemas of tools, for the chat template.

        Raises TrainingError where it asks nothing.
        """

    def start_together(self, problems: Sequence[Problem]) -> None:
        """Find the openings of ``problems`` side by side."""

    def open(self, episodes: int) -> AbstractContextManager[Callable[[Prompt], Partner]]:
        """Who answers in an episode of a prompt; at most so many are played. All programs that were started have ended after it."""


Played = tuple[Sequence[int], list[int], list[bool]]
"""Tokens of a prompt, those that follow it, and which of the latter the policy said."""
PartnerOf = Callable[[Prompt], tuple[Partner, str | None]]


@dataclass(frozen=True, slots=True)
class Episodes:
    """How the episodes of a run are played."""

    tools: Mapping[str, Tool]
    environments: Environments | None
    format: CallFormat
    template: TurnTemplate
    max_turns: int
    """Turns of the policy."""
    timeout_s: float | None
    concurrent: int
    """Turns that are answered at once; 0 for one after the other, in the thread that samples."""
    grace_s: float | None = GRACE_S
    """How long answers are awaited before their episodes leave the batch; None awaits all (``engines/turns.py``)."""
    agents: Agents | None = None
    """In place of tools and environments."""
    forks: bool = False
    """Whether an episode goes on from the conversation as the chat template writes it, where that is not what it saw; else it is
    appended to. ``agents`` say themselves what it goes on from."""

    def start_together(self, problems: Sequence[Problem]) -> None:
        """Find out side by side how those begin of which only an agent knows it."""
        if self.agents is not None:
            self.agents.start_together(problems)

    @contextmanager
    def open(self, episodes: int) -> Iterator[PartnerOf]:
        """Who answers the policy in an episode of a prompt, and what is said at the start, as ``partner`` has it. At most so many
        ``episodes`` are played."""
        if self.agents is None:
            yield lambda prompt: self.partner(prompt.problem)
        else:
            with self.agents.open(episodes) as partner_of:
                yield lambda prompt: (partner_of(prompt), None)

    def partner(self, problem: Problem) -> tuple[Partner, str | None]:
        """Who answers the policy in one episode of ``problem``, and what is said at the start.

        Raises ConfigError for a problem without an environment, and TrainingError where it cannot be reset.
        """
        if self.environments is None:
            return ToolUse(Toolbox(self.tools, self.timeout_s), self.format), None
        made = self.environments.make(problem)
        try:
            said = self.environments.start(made, problem)
        except TrainingError:
            let_go(made, self.timeout_s)
            raise
        if takes_steps(made):
            return Steps(made, self.timeout_s), said
        return ToolUse(Toolbox({**self.tools, **self.environments.tools_of(made)}, self.timeout_s), self.format, made), said

    def check_start(self, prompt: Prompt, said: str | None) -> None:
        """Raises TrainingError where an environment ``said`` something else at the start of an episode than the prompt says."""
        if self.environments is None or prompt.messages is None:
            return
        asked, shown = with_observation(prompt.problem.question, said or ""), prompt.messages[-1]["content"]
        if not shown.endswith(asked if isinstance(asked, str) else asked[-1]["content"]):
            raise TrainingError(
                f"reset of the environment began problem {prompt.problem.id} with {(said or '')[-80:]!r}, and before with "
                f"{shown[-80:]!r}, but all members of a group must start alike: give it an argument seed to draw from"
            )

    def let_go(self, partner: Partner) -> None:
        """Close the environment of an episode that is not played to its end."""
        let_go(getattr(partner, "environment", None), self.timeout_s)

    def are_over(self, partners: Sequence[Partner]) -> None:
        """Told of those of one call, in the order of its completions."""

    def conversation(self, prompt: Prompt, partner: Partner) -> Conversation | None:
        """To follow an episode where the run forks; else None."""
        if not self.forks or self.agents is not None:
            return None
        assert prompt.messages is not None, "an episode's prompt is a chat"
        tools = partner.toolbox.tools if isinstance(partner, ToolUse) else self.tools
        schemas = [tool.schema for tool in tools.values()] if tools and self.format.native else None
        return Conversation(self.template, list(prompt.messages), prompt.text, schemas)

    def play_script(self, prompt: Prompt, turns: Sequence[str], end_token: int) -> list[Played]:
        """An episode of ``prompt`` in which the policy says ``turns``, each ended with ``end_token``, in as many samples as it forks into.
        The turns are really answered.

        Raises DataError where one before the last ends the episode, and TrainingError where the environment fails: half of it would
        teach to stop there.
        """
        before, ids, sampled = list(prompt.token_ids), list[int](), list[bool]()
        played: list[Played] = [(before, ids, sampled)]
        with self.open(1) as partner_of, ExitStack() as ends:
            partner, opening = partner_of(prompt)
            ends.callback(self.let_go, partner)
            self.check_start(prompt, opening)
            conversation = self.conversation(prompt, partner)
            for number, text in enumerate(turns):
                own = [*self.template.tokenizer(text, add_special_tokens=False)["input_ids"], end_token]
                ids += own
                sampled += [True] * len(own)
                turn = Completion(text, tuple(own), (0.0,) * len(own), "stop")
                if number == len(turns) - 1:
                    break
                reply = partner.reply(turn)
                if reply.ended is not None:
                    raise self._cut_short(prompt.problem, f"{len(turns)} turns, but turn {number + 1}", partner, reply)
                given, rewritten = self.given(turn, reply, partner, conversation)
                if rewritten:
                    before, ids, sampled = given, [], []
                    played.append((before, ids, sampled))
                else:
                    ids += given
                    sampled += [False] * len(given)
        return played

    def _cut_short(self, problem: Problem, where: str, partner: Partner, reply: Reply) -> GroupwiseError:
        """Why a script ends ``where`` it should go on."""
        written = problem.columns.get("script") is not None
        script = f"the {'script' if written else 'worked example'} of problem {problem.id} has {where}"
        if reply.ended in FAILURES:
            return TrainingError(f"{script} is not answered: {reply.calls[-1].result}")
        no_call = f"it makes no call, which would begin with {self.format.openings[0]!r} (rollout.call_format)"
        why = no_call if isinstance(partner, ToolUse) else "what answers it is over then"
        remedy = "correct the turn, or let the script end there" if written else "give the rows a column script"
        return DataError(f"{script} ends the episode: {why}; {remedy}")

    def given(
        self, said: Completion, reply: Reply, partner: Partner, conversation: Conversation | None
    ) -> tuple[list[int], bool]:
        """The tokens that the policy is given after it ``said`` something, and whether they are the whole conversation, written again."""
        if conversation is not None:
            whole = conversation.go_on(said.text, reply.given, partner.role or "tool")
            if whole is not None:
                return whole, True
        return list(reply.given_ids) or self.template.given(reply.given, partner.role), reply.rewritten


class EpisodeEngine(Engine):
    """``engine``, whose completions are whole episodes. A token limit is that of an episode, what it is given included.

    The first turn is sampled as it would be without tools. A later one has the randomness of the name (seed, scope, problem, sample, turn,
    position).
    """

    def __init__(self, engine: Engine, episodes: Episodes) -> None:
        self.engine, self.episodes = engine, episodes

    @property
    def holds_weights(self) -> bool:  # type: ignore[override]
        return self.engine.holds_weights

    @property
    def limit(self) -> RowLimit | None:  # type: ignore[override]
        return self.engine.limit

    def refresh(self, policy_version: int) -> None:
        """See ``Engine.refresh``."""
        self.engine.refresh(policy_version)

    def release_memory(self) -> None:
        """See ``Engine.release_memory``."""
        self.engine.release_memory()

    def metrics(self) -> dict[str, Metric]:
        """See ``Engine.metrics``."""
        return self.engine.metrics()

    def close(self) -> None:
        """See ``Engine.close``; of tools, too."""
        self.engine.close()
        for tool in self.episodes.tools.values():
            if tool.close is not None:
                tool.close()

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``; progress counts episodes."""
        played: dict[tuple[int, int], _Episode] = {}
        abandoned, episodes = threading.Event(), len(request.prompts) * request.samples_per_prompt

        def begin_or_append(place: int, turn: Completion) -> _Episode:
            episode = played.get((place, turn.sample))
            if episode is None:
                begun = _begin(self.episodes, partner_of, request.prompts[place], turn, request.settings.max_tokens)
                episode = played[place, turn.sample] = begun
                if abandoned.is_set():  # while its environment was made
                    episode.give_up()
            else:
                episode.append(turn)
            return episode

        try:
            with self.episodes.open(episodes) as partner_of, Background(self.episodes.concurrent, "episode") as background:
                self._play(request, begin_or_append, background, self._counting(played, on_progress))
                while forked := [episode for _, episode in sorted(played.items()) if episode.finish_reason is None]:
                    limits, prompts = [episode.room for episode in forked], [episode.next_prompt() for episode in forked]
                    settings = replace(request.settings, max_tokens=max(limits))
                    further = SampleRequest(prompts, 1, settings, request.seed, request.scope, limits=limits)
                    self._play(further, _appending_to(forked), background, self._counting(played, on_progress))
        except BaseException:  # a signal, another process's failure, an error of one episode
            abandoned.set()
            self._give_up(list(played.values()))
            raise
        groups = [[played[i, s] for s in range(request.samples_per_prompt)] for i in range(len(request.prompts))]
        self.episodes.are_over([episode.partner for group in groups for episode in group])
        return [tuple(episode.completion() for episode in group) for group in groups]

    def _give_up(self, episodes: Sequence[_Episode]) -> None:
        """Close the environments of those that have not ended, side by side; what takes longer than ``_CLOSE_S`` is left behind."""
        unfinished = [episode for episode in episodes if episode.finish_reason is None]
        with Background(self.episodes.concurrent or 1, "close") as background:  # with none it would wait for each
            wait([background.submit(episode.give_up) for episode in unfinished], _CLOSE_S)

    def _play(
        self, request: SampleRequest, append: Callable[[int, Completion], _Episode], background: Background,
        on_progress: Progress | None,
    ) -> None:  # fmt: skip
        """Play the rows of ``request``, until each has ended or forked. ``append`` adds a row's turn to its episode, which it returns, by
        the place of its prompt."""

        def answer(place: int, turn: Completion) -> Any:
            return background.submit(lambda: append(place, turn).be_answered())

        turns = Turns(answer, self.episodes.grace_s)
        if isinstance(self.engine, TurnEngine):
            self.engine.serve_turns(request, turns, on_progress)
        else:
            serve_by_prefixes(self.engine, request, turns, on_progress)

    def _counting(self, played: Mapping[tuple[int, int], _Episode], on_progress: Progress | None) -> Progress | None:
        """``on_progress`` for the requests of one call: a row that forks is not the end of its episode."""
        if on_progress is None or not self.episodes.forks:
            return on_progress
        before = sum(turn.tokens for episode in played.values() for turn in episode.turns if turn.sampled)

        def count(_: int, tokens: int) -> None:
            on_progress(sum(episode.finish_reason is not None for episode in list(played.values())), before + tokens)

        return count


def _appending_to(episodes: Sequence[_Episode]) -> Callable[[int, Completion], _Episode]:
    def append(place: int, turn: Completion) -> _Episode:
        episodes[place].append(turn)
        return episodes[place]

    return append


def _begin(episodes: Episodes, partner_of: PartnerOf, prompt: Prompt, first: Completion, max_tokens: int) -> _Episode:
    """The episode of which the first turn is sampled. Raises TrainingError where it begins otherwise than the prompt says."""
    try:
        partner, said = partner_of(prompt)
    except ResetFailed as failure:
        return _Episode(episodes, prompt, first, max_tokens, NotBegun(failure))
    try:
        episodes.check_start(prompt, said)
    except TrainingError:
        episodes.let_go(partner)
        raise
    return _Episode(episodes, prompt, first, max_tokens, partner)


@dataclass
class _Episode:
    """One episode so far."""

    episodes: Episodes
    prompt: Prompt
    first: Completion
    max_tokens: int
    partner: Partner
    last: Completion = field(init=False)
    """The turn that was sampled last, as far as there was room for it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it is played."""
    reward: float | None = None
    conversation: Conversation | None = field(init=False)
    answering: threading.Lock = field(default_factory=threading.Lock)
    """Held by who calls the partner: an environment is not closed beside its own ``step``, and only once."""

    def __post_init__(self) -> None:
        self.conversation = self.episodes.conversation(self.prompt, self.partner)
        self.append(self.first)

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.max_tokens - len(self.token_ids)

    def append(self, turn: Completion) -> None:
        """Append a turn that was sampled, as far as there is room."""
        kept = turn.token_ids[: self.room]
        if len(kept) < len(turn.token_ids):
            logprobs = turn.logprobs[: len(kept)]
            turn = replace(turn, text=self._text(kept), token_ids=kept, logprobs=logprobs, finish_reason="length")
        self.last = turn
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.turns.append(Turn("assistant", turn.text, len(kept)))
        if not turn.stopped and self.finish_reason is None:  # it may have been given up meanwhile
            self.finish_reason = "length"

    def be_answered(self) -> list[int] | None:
        """The tokens that its row is given after its last turn, appended; or None where the row ends: with the episode, which is then
        judged, or because it forks."""
        with self.answering:
            if self.finish_reason in FAILURES:  # given up meanwhile
                return None
            given = self._hear(self.partner.reply(self.last)) if self.finish_reason is None else None
            if self.finish_reason is not None:
                self._judge()
            return given

    def give_up(self) -> None:
        """End it where it is, once its partner has answered, and close its environment. Nothing where it has ended."""
        with self.answering:
            if self.finish_reason is None:
                self.finish_reason = "environment_error"
                self.episodes.let_go(self.partner)

    def _hear(self, reply: Reply) -> list[int] | None:
        self.turns[-1] = replace(self.turns[-1], calls=reply.calls, reward=reply.reward)
        if reply.ended is not None:
            self.finish_reason = reply.ended
            return None
        if sum(turn.sampled for turn in self.turns) >= self.episodes.max_turns:
            self.finish_reason = "max_turns"
            return None
        role = self.partner.role or self.episodes.template.role
        given, rewritten = self.episodes.given(self.last, reply, self.partner, self.conversation)
        if len(given) >= self.room:  # no token of the policy would fit behind them
            self.finish_reason = "context_full"
            return None
        self.token_ids += given
        self.logprobs += [0.0] * len(given)
        self.turns.append(Turn(role, "\n".join(reply.given), len(given), rewritten=rewritten))
        return None if rewritten else given

    def next_prompt(self) -> Prompt:
        """What its next turn follows, where it has forked, by a name of its own."""
        asked, own = self.prompt, self.token_ids[len(self.token_ids) - self.turns[-1].tokens :]
        name, _ = turn_name(asked.problem.id, self.first.sample, sum(turn.sampled for turn in self.turns))
        return Prompt(replace(asked.problem, id=name), "", tuple(own), None, asked.occurrence)

    def _judge(self) -> None:
        """The rewards of its turns and of the whole; none where the environment failed."""
        try:
            whole = self.partner.reward(None if self.last.stopped else self.last)
            known = [part for part in (*(turn.reward for turn in self.turns), whole) if part is not None]
            self.reward = math.fsum(known) if known else None
            if self.reward is not None and not math.isfinite(self.reward):
                raise ValueError(f"it is {self.reward}, and a reward is finite")
        except (CallRaised, CallTimedOut, OverflowError, TypeError, ValueError) as failure:
            self.finish_reason = "timeout" if isinstance(failure, CallTimedOut) else "environment_error"
            late, why = self.finish_reason == "timeout", str(failure) or "it did not answer in time"
            logger.warning("the reward of the environment failed on problem %s: %s", self.prompt.problem.id, why)
            begun = "get_reward" if getattr(self.partner, "environment", None) is not None else "agent"
            called = "reset" if isinstance(self.partner, NotBegun) else begun
            told = failed_call("timed_out" if late else "raised", why, called)
            self.turns[-1] = replace(self.turns[-1], calls=(*self.turns[-1].calls, told))
        if self.finish_reason in FAILURES:
            self.reward = None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return replace(
            self.first, text=self._text(self.token_ids), token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason, turns=tuple(self.turns), reward=self.reward,
        )  # fmt: skip

    def _text(self, token_ids: Sequence[int]) -> str:
        return text_of(self.episodes.template.tokenizer, token_ids)

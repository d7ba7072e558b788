"""Plays episodes over any engine: the policy samples a turn, its calls are made, it is given the results, and samples on.

Each turn is a request whose prompt is the whole of the tokens so far, just as they were sampled and given. Turns are played in rounds: the
tools of one round all answer, side by side, before the next is sampled. So what is sampled together, and with it the last bit of every
number, does not depend on how fast a tool is, and a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.engines.base import Engine, Progress, SampleRequest
from groupwise.engines.wrappers import RowLimit
from groupwise.episodes.formats import CallFormat
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import Toolbox
from groupwise.metrics import Metric
from groupwise.rewards.calling import Background
from groupwise.types import Completion, FinishReason, Prompt, ToolCall, Turn

__all__ = ["EpisodeEngine", "Episodes"]


@dataclass(frozen=True, slots=True)
class Episodes:
    """How the episodes of a run are played."""

    toolbox: Toolbox
    format: CallFormat
    template: TurnTemplate
    max_turns: int
    """Turns of the policy."""
    concurrent_calls: int

    def play_script(self, turns: Sequence[str], end_token: int) -> tuple[list[int], list[bool]]:
        """Token ids of an episode in which the policy says ``turns``, each ended with ``end_token``, and which of them are its own. Calls
        are really made."""
        ids: list[int] = []
        sampled: list[bool] = []
        for number, text in enumerate(turns):
            own = [*self.template.tokenizer(text, add_special_tokens=False)["input_ids"], end_token]
            ids, sampled = ids + own, sampled + [True] * len(own)
            results = [self.toolbox.call(asked).result for asked in self.format.read(text)]
            if not results or number == len(turns) - 1:
                break
            given, _ = self.template.given(results)
            ids, sampled = ids + given, sampled + [False] * len(given)
        return ids, sampled


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

    def metrics(self) -> dict[str, Metric]:
        """See ``Engine.metrics``."""
        return self.engine.metrics()

    def close(self) -> None:
        """See ``Engine.close``."""
        self.engine.close()

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``; progress counts episodes."""
        finished = tokens = 0

        def progress(_: int, sampled: int) -> None:
            if on_progress is not None:
                on_progress(finished, tokens + sampled)

        first = self.engine.serve(request, progress)
        everyone = [
            [_Episode(self.episodes, prompt, completion, request.settings.max_tokens) for completion in completions]
            for prompt, completions in zip(request.prompts, first, strict=True)
        ]
        playing = [episode for group in everyone for episode in group]
        while playing:
            self._answer(playing)
            tokens = sum(episode.sampled_tokens for group in everyone for episode in group)
            playing = [episode for episode in playing if episode.finish_reason is None]
            finished = sum(map(len, everyone)) - len(playing)
            progress(finished, 0)
            if playing:
                room = max(episode.room for episode in playing)
                settings = replace(request.settings, max_tokens=room)
                further = replace(request, prompts=[e.prompt_so_far for e in playing], samples_per_prompt=1, settings=settings)
                for episode, (completion,) in zip(playing, self.engine.serve(further, progress), strict=True):
                    episode.take(completion)
        return [tuple(episode.completion() for episode in group) for group in everyone]

    def _answer(self, playing: Sequence[_Episode]) -> None:
        """Make the calls of every last turn, and give the results; end the episodes that called nothing."""
        toolbox = self.episodes.toolbox
        with Background(self.episodes.concurrent_calls, "tool") as background:
            waiting = [
                (episode, [background.submit(lambda asked=asked: toolbox.call(asked)) for asked in episode.asks()])  # type: ignore[misc]
                for episode in playing
            ]
            for episode, calls in waiting:
                if calls:
                    episode.hear(tuple(call.result() for call in calls))  # type: ignore[misc]


@dataclass
class _Episode:
    """One episode so far."""

    episodes: Episodes
    prompt: Prompt
    first: Completion
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it is played."""

    def __post_init__(self) -> None:
        self.take(self.first)

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.max_tokens - len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns if turn.sampled)

    @property
    def prompt_so_far(self) -> Prompt:
        """What its next turn is sampled from. The problem's name is that of the turn, and so is its randomness."""
        turn = sum(turn.sampled for turn in self.turns)
        problem = replace(self.prompt.problem, id=f"{self.prompt.problem.id}\x1fsample={self.first.sample}\x1fturn={turn}")
        return Prompt(problem, "", (*self.prompt.token_ids, *self.token_ids), None, self.prompt.occurrence)

    def take(self, turn: Completion) -> None:
        """Append a turn that was sampled, as far as there is room: others that were sampled with it may have had more."""
        kept = min(len(turn.token_ids), self.room)
        whole = kept == len(turn.token_ids)
        self.token_ids += turn.token_ids[:kept]
        self.logprobs += turn.logprobs[:kept]
        self.turns.append(Turn("assistant", turn.text if whole else self._text(turn.token_ids[:kept]), kept))
        if not (whole and turn.stopped):
            self.finish_reason = "length"

    def asks(self) -> list[Any]:
        """The calls to be made now. Without any the episode is over."""
        if self.finish_reason is not None:
            return []
        asked = self.episodes.format.read(self.turns[-1].text)
        if not asked:
            self.finish_reason = "stop"
        elif sum(turn.sampled for turn in self.turns) >= self.episodes.max_turns:
            self.finish_reason = "max_turns"
        return [] if self.finish_reason is not None else asked

    def hear(self, calls: tuple[ToolCall, ...]) -> None:
        """Append the results, unless no token of the policy would fit behind them."""
        self.turns[-1] = replace(self.turns[-1], calls=calls)
        results = [call.result for call in calls]
        given, role = self.episodes.template.given(results)
        if len(given) >= self.room:
            self.finish_reason = "context_full"
            return
        self.token_ids += given
        self.logprobs += [0.0] * len(given)
        self.turns.append(Turn(role, "\n".join(results), len(given)))

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return replace(
            self.first, text=self._text(self.token_ids), token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason, turns=tuple(self.turns),
        )  # fmt: skip

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.episodes.template.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )  # type: ignore[no-any-return]

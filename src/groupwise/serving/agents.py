"""Agents: programs that know nothing but a base URL, and are trained by what they ask there.

Each episode is played by a program of its own, started with the address of a door and with a key, which names the episode. The policy
that is trained answers. A program's first request is the episode's prompt, which a run of it beforehand has shown: so a group's members
share it. A later request goes on from what was answered, and only what is new in it is rendered; the sampled tokens stay as they are.

``AgentPrograms``, what all programs have in common, opens a ``_Door`` for each batch: the address, and the ``_Program`` of each key,
which is a process. What one asks comes in by a ``_Handler`` as an ``_Exchange``, and waits in its program as a ``_Question``. A
``_Play`` is one episode, between the engine and a program: it answers the question with a turn, and takes the next one for what the
policy is told.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import queue
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config.schema import Config, PromptConfig, RolloutConfig
from groupwise.data.prompts import render
from groupwise.episodes.environments import Reply
from groupwise.episodes.formats import CallFormat
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import shortened
from groupwise.errors import ModelError, TrainingError, printable
from groupwise.importing import in_one_line
from groupwise.rewards.calling import Background, CallRaised, CallTimedOut
from groupwise.serving.answering import Answer
from groupwise.serving.asking import Ask, Refused, read_ask
from groupwise.serving.sampler import Choice, pieces_of
from groupwise.serving.server import ChatHandler, Server
from groupwise.serving.service import Calls, Exchange
from groupwise.types import Completion, FinishReason, Problem, Prompt, ToolCall

__all__ = ["AgentPrograms", "open_agents"]

logger = logging.getLogger("groupwise")

START_S = 60.0
"""Shortest time limit for a first request: a program may import much, while others do."""
KEPT_BYTES = 2**16
"""The end of what a program prints."""
_TOLD_LINES, _TOLD_CHARACTERS = 5, 1000
_FILES_EACH, _OTHER_FILES = 6, 256
"""Open files that a program which runs takes here (two pipes, what waits for them, and connections, mostly one), and those that all else
takes."""
_CONNECTIONS = 4096
"""Connections that a door keeps open at once; two for each program where that is more."""
_PASSED = (
    "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""All that a program finds of the environment of the run, beside PATH: no secret."""


def open_agents(config: Config, template: TurnTemplate, form: CallFormat, end_token_ids: Sequence[int]) -> AgentPrograms:
    """The programs of ``rollout.environment: {command: ...}``."""
    command = config.rollout.command
    assert command is not None
    agents = AgentPrograms(command, config.model.name, config.rollout, config.prompt, template, form, end_token_ids)
    agents.allow_files(max(config.completions_per_step, (config.evaluation.problems or 0) * config.evaluation.samples))
    return agents


class _Failed(Exception):
    """A program that does not play on: why its episode ends, and what went wrong."""

    def __init__(self, reason: FinishReason, why: str) -> None:
        super().__init__(why)
        self.reason: FinishReason = reason


class AgentPrograms:
    """See ``episodes.driver.Agents``."""

    def __init__(
        self, command: Sequence[str], name: str, rollout: RolloutConfig, prompt: PromptConfig, template: TurnTemplate, form: CallFormat,
        end_token_ids: Sequence[int],
    ) -> None:  # fmt: skip
        self.command, self.name, self.rollout, self.template, self.form = list(command), name, rollout, template, form
        self.prompt = prompt
        self._system: str | None = None
        self.timeout_s, self.end_token_ids = rollout.tool_timeout_s, frozenset(end_token_ids)
        self._calls = Calls(form, template, "")
        self._openings: dict[str, Ask] = {}
        self._noticed: set[str] = set()
        self._allowed = 0
        """Programs at once for which files may be open, or which it was said of that they may not."""
        self._lock = threading.Lock()

    def opening(
        self, problem: Problem, system: str | None
    ) -> tuple[list[dict[str, Any]], str | None, list[Mapping[str, Any]] | None]:
        """See ``Agents.opening``."""
        self.start_together([problem])
        self._system = system
        return self._calls.shown(self._openings[problem.id], system)

    def prompt_ids(self, problem: Problem, ask: Ask) -> tuple[int, ...]:
        """A request as the prompt of what follows. Raises ModelError or Refused where the policy cannot be shown it."""
        messages, system, schemas = self._calls.shown(ask, self._system)
        asked = replace(problem, question=messages)  # type: ignore[arg-type]
        return render(asked, self.template.tokenizer, self.prompt, system, schemas).token_ids

    def start_together(self, problems: Sequence[Problem]) -> None:
        """See ``Agents.start_together``."""
        unknown = [problem for problem in problems if problem.id not in self._openings]
        if not unknown:
            return
        with self._door() as door, Background(self.rollout.concurrent_tool_calls, "agent") as background:
            asked = [background.submit(partial(door.first_request, problem)) for problem in unknown]
            for problem, first in zip(unknown, asked, strict=True):
                self._openings[problem.id] = first.result()  # type: ignore[assignment]

    def allow_files(self, programs: int) -> None:
        """Raise the limit of open files as far as so many programs at once need it. No further: there are programs that close all that
        they might have open, one by one. Does nothing for a number that it was asked for before."""
        if programs <= self._allowed:
            return
        self._allowed = programs
        wanted = _FILES_EACH * programs + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):  # macOS has a limit beside these
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if (left := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < wanted:
            logger.warning(
                "%d agents at once may need %d open files, but this process may have %d: raise the limit before the run "
                "(`ulimit -n %d`), or lower rollout.prompts_per_step and evaluation.problems",
                programs, wanted, left, wanted,
            )  # fmt: skip

    @contextmanager
    def open(self, episodes: int) -> Iterator[Callable[[Prompt], _Play]]:
        """See ``Agents.open``."""
        self.allow_files(episodes)  # an evaluation's problems may be all that there are
        with self._door() as door:
            yield partial(_Play, self, door)

    @contextmanager
    def _door(self) -> Iterator[_Door]:
        door = _Door(self)
        server = Server(door, handler=_Handler, connections=max(_CONNECTIONS, 2 * self._allowed))
        door.url = server.url
        try:
            yield door
        finally:
            server.close()

    def is_opening(self, problem: Problem, ask: Ask) -> bool:
        """Whether a program's first request is that of the prompt."""
        first = self._openings[problem.id]
        return first.messages == ask.messages and _schemas(first) == _schemas(ask)

    def check(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Raises Refused for what an episode cannot have; says once that the run's settings of sampling are not the program's to choose."""
        for name, is_asked in (("n", ask.choices > 1), ("stop", bool(ask.stop)), ("tool_choice", ask.must_call)):
            if is_asked:
                raise Refused(
                    f"{name} cannot be honoured in training, where each request is one turn of an episode: leave it out", name
                )
        own = {"temperature": self.rollout.temperature, "top_p": self.rollout.top_p}
        for name in ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"):
            if body.get(name) is None or body[name] == own.get(name):
                continue
            with self._lock:
                told = name in self._noticed
                self._noticed.add(name)
            if not told:
                logger.warning(
                    "the agent asks with %s=%s: the run's own settings of sampling count in its place, so that what is sampled is what is "
                    "scored",
                    name,
                    printable(str(body[name]))[:40],
                )

    def environment(self, url: str, key: str) -> dict[str, str]:
        """What a program finds in its environment."""
        kept = {name: os.environ[name] for name in _PASSED if name in os.environ}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        return {**kept, "PATH": path, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}


class _Door:
    """Where the programs of one call ask. Their keys are known here, and each is answered as its own episode."""

    is_alive = True
    url = ""

    def __init__(self, agents: AgentPrograms) -> None:
        self.agents, self.name = agents, agents.name
        self._programs: dict[bytes, _Program] = {}
        """By a digest of their keys, so that no time tells how much of a key was right."""
        self._closed = False
        self._lock = threading.Lock()

    def start(self, problem: Problem) -> _Program:
        """Raises _Failed where it cannot be started."""
        key = secrets.token_hex(32)
        with self._lock:  # so that none is started behind ``close``
            if self._closed:
                raise _Failed("environment_error", "the run has ended")
            try:
                program = _Program(self.agents, self.url, key, problem)
            except OSError as error:
                raise _Failed("environment_error", f"the command cannot be started ({in_one_line(error)})") from error
            self._programs[_digest(f"Bearer {key}".encode())] = program
        return program

    def end(self, program: _Program) -> None:
        """Its key opens nothing any more."""
        program.close()
        with self._lock:
            self._programs = {digest: one for digest, one in self._programs.items() if one is not program}

    def program_of(self, authorization: bytes) -> _Program | None:
        with self._lock:
            return self._programs.get(_digest(authorization))

    def begin(self, body: object) -> Exchange:
        raise AssertionError("a request without a program's key was let in")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for program in self._programs.values():
                program.close()
            self._programs.clear()

    def first_request(self, problem: Problem, tries: int = 2) -> Ask:
        """What a program asks that is then ended. Raises TrainingError where none of so many ``tries`` asks."""
        try:
            program = self.start(problem)
            try:
                return program.first_question().ask
            finally:
                self.end(program)
        except _Failed as failed:
            if tries > 1:  # without a prompt the run cannot go on
                return self.first_request(problem, tries - 1)
            raise TrainingError(f"the agent of rollout.environment asked nothing on problem {problem.id}: {failed}") from failed


class _Handler(ChatHandler):
    """A connection of a program: which one, its key says."""

    def knows(self, authorization: bytes) -> bool:
        door = type(self).service
        assert isinstance(door, _Door)
        program = door.program_of(authorization)
        self.service = door if program is None else program
        return program is not None

    def _tell(self, exchange: Exchange) -> None:
        assert isinstance(exchange, _Exchange)
        exchange.is_there = self._is_there
        super()._tell(exchange)


class _Exchange(Exchange):
    """The answer is one turn of an episode, and comes at once."""

    refused: Refused | None = None
    is_there: Callable[[], bool] | None = None
    """Looks at the connection of who asked; None before its handler waits for the answer."""

    @property
    def is_awaited(self) -> bool:
        """Whether who asked still waits. The handler notices later that it has hung up, and it may ask again at once."""
        try:
            return self.choices[0].wanted and (self.is_there is None or self.is_there())
        except (OSError, ValueError):  # the connection was closed meanwhile
            return False

    @property
    def is_finished(self) -> bool:
        """Raises Refused where there is no answer."""
        if self.refused is not None:
            raise self.refused
        return self.choices[0].finish_reason is not None

    def refuse(self, refused: Refused) -> None:
        self.refused = refused
        self.news.put(None)


@dataclass(eq=False)
class _Question:
    """What a program asked. Who has hung up before the answer and asks the same again takes it in its own place."""

    ask: Ask
    exchange: _Exchange
    is_settled: bool = False


class _Program:
    """A process of the agent's, from construction until ``close``, and what it asks."""

    is_alive = True

    def __init__(self, agents: AgentPrograms, url: str, key: str, problem: Problem) -> None:
        """Raises OSError where it cannot be started."""
        self.agents, self.name = agents, agents.name
        self.printed, self.complained = bytearray(), bytearray()
        """The end of its output, and of its errors."""
        self._news: queue.SimpleQueue[_Question | int] = queue.SimpleQueue()
        self._waiting: list[_Question] = []
        self._unheard: tuple[Ask, Sequence[int], Completion] | None = None
        """The last answer, as ``_fill`` takes it, where nobody waited for it any more."""
        self._refusal: Refused | None = None
        self._lock = threading.Lock()
        row = {**problem.columns, "prompt": problem.question, "answer": problem.answer}
        with tempfile.TemporaryFile() as told:  # a pipe would hold up who writes, if the program does not read
            told.write(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n")
            told.seek(0)
            self._process = subprocess.Popen(
                agents.command, stdin=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=agents.environment(url, key),
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._watch, name="agent's output", daemon=True).start()

    def begin(self, body: object) -> Exchange:
        """See ``Answering.begin``."""
        ask = read_ask(body)
        assert isinstance(body, dict)
        self.agents.check(ask, body)
        with self._lock:
            exchange = self._exchange(ask)
            if self._unheard is not None and _is_same(self._unheard[0], ask):  # the answer is told again, and nothing new asked
                self._fill(exchange, *self._unheard[1:])
                self._unheard = None
                return exchange
            if self._refusal is not None:
                raise self._refusal
            self._waiting = [question for question in self._waiting if not question.is_settled]
            for question in self._waiting:
                if _is_same(question.ask, ask) and not question.exchange.is_awaited:
                    question.exchange.refuse(Refused("the same was asked again meanwhile", status=409))
                    question.exchange = exchange
                    return exchange
            self._waiting.append(_Question(ask, exchange))
            self._news.put(self._waiting[-1])
        return exchange

    def _exchange(self, ask: Ask) -> _Exchange:
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        choice = Choice("", (), ask.settings, (), False, partial(news.put, None))
        answer = Answer(
            ask.model, [choice], self.agents.end_token_ids, ask.tools, self.agents.form if ask.tools else None, logprobs=ask.logprobs,
            decode=lambda token: str(self.agents.template.tokenizer.decode([token])),
        )  # fmt: skip
        return _Exchange(ask, answer, [choice], news)

    def answer(self, question: _Question, before: Sequence[int], turn: Completion) -> Mapping[str, Any]:
        """Have it read a turn of the policy, behind so many tokens; returns the message as it was told."""
        with self._lock:
            question.is_settled = True
            self._unheard = None if question.exchange.is_awaited else (question.ask, before, turn)
            return self._fill(question.exchange, before, turn)

    def _fill(self, exchange: _Exchange, before: Sequence[int], turn: Completion) -> Mapping[str, Any]:
        """Have who waits there read ``turn``; returns the message."""
        (choice,) = exchange.choices
        choice.prompt_ids, choice.token_ids, choice.logprobs = tuple(before), list(turn.token_ids), list(turn.logprobs)
        choice.text = turn.text
        choice.pieces = pieces_of(self.agents.template.tokenizer, turn.token_ids) if exchange.ask.logprobs else []
        choice.finish_reason = "stop" if turn.stopped else "length"
        message: Mapping[str, Any] = exchange.answer.whole()["choices"][0]["message"]
        choice.on_news()
        return message

    def refuse(self, question: _Question | None, refused: Refused, ever: bool = False) -> None:
        """Answer ``question`` with an error, and with ``ever`` all that follow."""
        with self._lock:
            self._refusal = refused if ever else self._refusal
            if question is not None and not question.is_settled:
                question.is_settled = True
                question.exchange.refuse(refused)

    def hear(self, timeout_s: float) -> _Question | int:
        """What it asks next, or at its end its exit status. Raises _Failed where it does neither in time."""
        try:
            return self._news.get(timeout=timeout_s)
        except queue.Empty:
            raise _Failed("timeout", f"the agent neither asked nor ended within {timeout_s:g} seconds") from None

    def first_question(self) -> _Question:
        """Raises _Failed where it ends or waits before it asks."""
        news = self.hear(max(START_S, self.agents.timeout_s))
        if isinstance(news, int):
            raise _Failed("environment_error", f"it ended with exit status {news} before it asked{self.last_words()}")
        return news

    def last_words(self) -> str:
        """The end of its errors, as the end of a sentence."""
        lines = self.complained.decode("utf-8", "replace").strip().splitlines()[-_TOLD_LINES:]
        told = printable(" | ".join(" ".join(line.split()) for line in lines))[-_TOLD_CHARACTERS:]
        return f": {told}" if told else " and said nothing on stderr"

    def reward(self) -> float | None:
        """What its last line says. Raises ValueError for a reward that is no number."""
        lines = self.printed.decode("utf-8", "replace").strip().splitlines()
        try:
            said = json.loads(lines[-1]) if lines else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or "reward" not in said:
            return None
        reward = said["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(
                f'the last line of the agent has the reward {json.dumps(reward):.40}: it must be {{"reward": NUMBER}}'
            )
        return float(reward)

    def close(self) -> None:
        """End it, and what it started."""
        with self._lock:
            if self._process.returncode is None:
                self._kill()

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """Keep the end of what it prints; when it has ended, so must what it started."""
        pipes = {self._process.stdout: self.printed, self._process.stderr: self.complained}
        try:
            self._read(pipes)
        except OSError as error:  # as where no more files may be open; that it ended must be told all the same
            self.complained.extend(f"\nwhat it prints cannot be read ({in_one_line(error)})".encode())
            self.close()
        status = self._process.wait()
        with self._lock:
            self._kill()
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        self._news.put(status)

    def _read(self, pipes: Mapping[Any, bytearray]) -> None:
        """Until it has ended, or closed them."""
        with selectors.DefaultSelector() as selector:
            for pipe, kept in pipes.items():
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, kept)
            ended = False
            while selector.get_map():
                ready = selector.select(0.0 if ended else 0.5)
                if ended and not ready:  # a process that it left behind holds the pipes
                    break
                for key, _ in ready:
                    data = os.read(key.fd, KEPT_BYTES)
                    key.data.extend(data)
                    del key.data[:-KEPT_BYTES]
                    if not data:
                        selector.unregister(key.fileobj)
                ended = ended or self._has_ended()

    def _has_ended(self) -> bool:
        """If so, what it started is ended, too: it might print for ever."""
        with self._lock:
            if ended := self._process.poll() is not None:
                self._kill()
            return ended


class _Play:
    """One episode: see ``episodes.environments.Partner``. The program begins when the first turn has been sampled."""

    def __init__(self, agents: AgentPrograms, door: _Door, prompt: Prompt) -> None:
        self.agents, self.door, self.prompt = agents, door, prompt
        self.role: str | None = None
        self._program: _Program | None = None
        self._question: _Question | None = None
        """What is to be answered."""
        self._status: int | None = None
        self._failed = False
        self._ids = prompt.token_ids
        self._known: list[Mapping[str, Any]] = []
        """The conversation as the program must repeat it."""

    def reply(self, turn: Completion) -> Reply:
        """See ``Partner.reply``. Raises TrainingError where the program begins otherwise than the prompt says."""
        try:
            self._tell(turn)
            return self._hear()
        except _Failed as failed:
            self._failed = True
            kind = "timed_out" if failed.reason == "timeout" else "raised"
            call = ToolCall("agent", {}, shortened(f"error: {failed}"), kind)  # type: ignore[arg-type]
            return Reply(ended=failed.reason, calls=(call,))

    def reward(self, unheard: Completion | None) -> float | None:
        """See ``Partner.reward``. A program that fails because a limit has ended its episode has earned nothing."""
        try:
            if self._failed:
                return None
            if unheard is not None:
                self._tell(unheard)
            limited = self._status is None
            status = self._wind_down() if limited else self._status
            assert self._program is not None
            return 0.0 if limited and status != 0 else self._program.reward()
        except _Failed as failed:
            raise CallTimedOut(str(failed)) if failed.reason == "timeout" else CallRaised(str(failed)) from failed
        finally:
            if self._program is not None:
                self.door.end(self._program)

    def _tell(self, turn: Completion) -> None:
        """Answer what it asked."""
        if self._program is None:
            self._program = self.door.start(self.prompt.problem)
            self._question = self._program.first_question()
            if not self.agents.is_opening(self.prompt.problem, self._question.ask):
                raise TrainingError(
                    f"the agent of rollout.environment asked something else first on problem {self.prompt.problem.id} than before, but all "
                    "members of a group must start alike: leave the time and random numbers out of its first request"
                )
        assert self._question is not None
        message = self._program.answer(self._question, self._ids, turn)
        self._known = [*self._question.ask.messages, _heard(message)]
        self._ids = (*self._ids, *turn.token_ids)

    def _hear(self) -> Reply:
        """What it does next. Raises _Failed."""
        assert self._program is not None
        assert self._question is not None
        news = self._program.hear(self.agents.timeout_s)
        if isinstance(news, int):
            self._status = news
            if news != 0:
                raise _Failed("environment_error", f"the agent ended with exit status {news}{self._program.last_words()}")
            return Reply(ended="stop")
        tools, self._question = _schemas(self._question.ask), news
        known, now = self._known, news.ask.messages
        own = max((place + 1 for place, one in enumerate(now) if one["role"] == "assistant"), default=0)
        new = now[own:]
        alike = own == len(known) and all(_as_shown(a) == _as_shown(b) for a, b in zip(known, now, strict=False))
        elsewhere = not new or not alike or tools != _schemas(news.ask)
        if elsewhere and self.agents.rollout.rewritten_history != "fork":
            why = (
                "this request does not go on from the last answer, but an episode in training is one conversation with the same tools: "
                "with rollout.rewritten_history=fork it would go on from this one"
            )
            self._program.refuse(news, Refused(why, "messages"))
            raise _Failed("new_conversation", why)
        results = [one for one in new if one["role"] == "tool"]
        self.role = self.agents.template.role if new and len(results) == len(new) else "user"
        try:
            template, problem = self.agents.template, self.prompt.problem
            given = self.agents.prompt_ids(problem, news.ask) if elsewhere else tuple(template.given_messages(new))
        except (ModelError, Refused) as error:
            self._program.refuse(news, Refused(str(error), "messages"))
            raise _Failed("environment_error", str(error)) from error
        self._ids = given if elsewhere else (*self._ids, *given)
        answered = own and _as_shown(now[own - 1]) == _as_shown(known[-1])
        calls = _with_results(now[own - 1], results) if answered else ()
        return Reply(tuple(one["content"] for one in new), calls=calls, given_ids=given, rewritten=elsewhere)

    def _wind_down(self) -> int | None:
        """Its exit status after a limit has ended its episode: it may still say what that was worth. None where it does not end."""
        assert self._program is not None
        over = Refused("the episode has reached its limit of tokens or turns", "messages", code="context_length_exceeded")
        self._program.refuse(self._question, over, ever=True)
        try:
            while isinstance(news := self._program.hear(self.agents.timeout_s), _Question):
                self._program.refuse(news, over)
        except _Failed:
            return None
        return news


def _digest(authorization: bytes) -> bytes:
    return hashlib.sha256(authorization).digest()


def _schemas(ask: Ask) -> list[Mapping[str, Any]]:
    return [tool.schema for tool in ask.tools]


def _is_same(one: Ask, other: Ask) -> bool:
    return one.messages == other.messages and _schemas(one) == _schemas(other)


def _heard(message: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as a request repeats it, once that is read."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {"role": "assistant", "content": message["content"] or "", **({"tool_calls": calls} if calls else {})}


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def _with_results(asked: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls of a request's last turn that have results: by the ids that it gives both, or by place where those do not say it."""
    calls = _calls(asked)
    places = {call["id"]: place for place, call in enumerate(asked.get("tool_calls", ())) if call["id"]}
    named = [places[name] for one in results if (name := one.get("tool_call_id")) in places]
    if len(places) < len(calls) or len(set(named)) < len(results):
        named = list(range(min(len(calls), len(results))))
    return tuple(ToolCall(*calls[place], one["content"]) for place, one in zip(named, results, strict=False))


def _as_shown(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What of a message says whether it is the same: not the names of its calls, nor spaces at its ends, which templates trim, too."""
    return message["role"], message["content"].strip(), _calls(message)

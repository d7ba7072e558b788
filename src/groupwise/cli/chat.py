"""Talking to a model: keeps the conversation, streams the answers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from groupwise.config.schema import Config, PromptConfig
from groupwise.data.prompts import render, resolve_system
from groupwise.distributed import World
from groupwise.engines import make_engine
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.errors import ConfigError
from groupwise.models.adapters import load_trained
from groupwise.models.load import Policy, load_policy, with_base
from groupwise.tracking.text import visible
from groupwise.types import Message, Problem

__all__ = ["Speaker", "answer_dealt_lines", "answer_lines", "answer_of", "converse", "make_speaker"]

WELCOME = "Type a question and press Enter. /new forgets the conversation, /exit or Ctrl-D leaves."


@dataclass
class Speaker:
    """A policy with its engine, and the conversation so far."""

    policy: Policy
    engine: Engine
    prompt: PromptConfig
    system: str | None
    settings: SamplingSettings
    seed: int
    messages: list[Message] = field(default_factory=list)

    def answer(self, question: str, out: TextIO) -> str:
        """Stream the answer to ``question`` as the conversation's next turn; returns it.

        Raises ConfigError when the conversation leaves no room in the context.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        problem = Problem(f"chat:{len(self.messages) // 2}", asked, "")
        prompt = render(problem, self.policy.tokenizer, self.prompt, self.system)
        room = self.policy.context_length - len(prompt.token_ids)
        if room < 1:
            raise ConfigError(
                f"the conversation is {len(prompt.token_ids)} tokens long, but the context of {self.policy.name} is "
                f"{self.policy.context_length}: start a new one, or ask a shorter question"
            )
        settings = replace(self.settings, max_tokens=min(self.settings.max_tokens, room))
        # A model's text could steer a terminal; a file gets it as it is.
        clean: Any = visible if out.isatty() else str

        def show(piece: str) -> None:
            out.write(clean(piece))
            out.flush()

        completion = self.engine.stream(prompt, settings, seed=self.seed, on_text=show)
        out.write("\n")
        out.flush()
        self.messages = [*asked, {"role": "assistant", "content": completion.text}]
        return completion.text

    def forget(self) -> None:
        self.messages = []


def make_speaker(config: Config, max_tokens: int, temperature: float, greedy: bool, seed: int) -> Speaker:
    """Load the policy of ``config``; its prompt settings say how questions are put."""
    model, adapter = with_base(config.model)
    policy = load_policy(model)
    if adapter is not None:
        policy = load_trained(policy, adapter)
    system, _ = resolve_system(config.prompt, config.data)
    greedy = greedy or temperature == 0
    settings = SamplingSettings(max_tokens, temperature=1.0 if greedy else temperature, greedy=greedy)
    return Speaker(policy, make_engine(policy, config.rollout), config.prompt, system, settings, seed)


def answer_of(speaker: Speaker, question: str) -> str:
    """The answer to a question by itself."""
    speaker.forget()
    return speaker.answer(question, io.StringIO())


def answer_lines(speaker: Speaker, lines: Iterable[str], out: TextIO) -> None:
    """Each line that is not blank is a question by itself."""
    for line in lines:
        if line.strip():
            speaker.forget()
            speaker.answer(line.strip(), out)


def answer_dealt_lines(speaker: Speaker, lines: Sequence[str], out: TextIO, world: World) -> None:
    """As ``answer_lines``, divided among the processes of ``world``: the first one writes all answers, in the lines' order."""
    answers: dict[int, str] = {}
    for index in world.mine([len(line) for line in lines]):
        answer = io.StringIO()
        answer_lines(speaker, [lines[index]], answer)
        answers[index] = answer.getvalue()
    everywhere = {index: answer for part in world.gather(answers) for index, answer in part.items()}
    if world.is_first:
        clean: Any = visible if out.isatty() else str
        out.write("".join(clean(everywhere[index]) for index in range(len(lines))))
        out.flush()


def converse(speaker: Speaker, out: TextIO) -> None:
    """A conversation in the terminal, until /exit or the end of input; Ctrl-C stops an answer."""
    out.write(f"{speaker.policy.name}. {WELCOME}\n")
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            out.write("\n")
            return
        if question == "/exit":
            return
        if question == "/new":
            speaker.forget()
            out.write("(a new conversation)\n")
        elif question:
            _turn(speaker, question, out)


def _turn(speaker: Speaker, question: str, out: TextIO) -> None:
    try:
        speaker.answer(question, out)
    except KeyboardInterrupt:
        out.write("\n(stopped)\n")
    except ConfigError as full:
        speaker.forget()
        out.write(f"({full}; the conversation was forgotten)\n")

"""One model that answers chat completions: from a client's body to choices that are sampled."""

from __future__ import annotations

import copy
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from groupwise.chat import load_to_ask
from groupwise.config.schema import Config, PromptConfig
from groupwise.data.prompts import render, resolve_system
from groupwise.engines import Engine, make_engine
from groupwise.episodes import describe_tools
from groupwise.episodes.formats import FORMATS, CallFormat, format_of_template
from groupwise.episodes.templates import TurnTemplate
from groupwise.errors import ConfigError, ModelError
from groupwise.importing import in_one_line
from groupwise.models.load import Policy
from groupwise.serving.answering import Answer
from groupwise.serving.asking import Ask, Refused, read_ask
from groupwise.serving.sampler import Choice, FullError, Sampler
from groupwise.types import Problem

__all__ = ["Calls", "Exchange", "Service", "open_service"]


@dataclass
class Exchange:
    """A client's question while it is answered."""

    ask: Ask
    answer: Answer
    choices: list[Choice]
    news: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    @property
    def is_finished(self) -> bool:
        """Raises Refused where a choice failed."""
        finished = all(choice.finish_reason is not None for choice in self.choices)
        for choice in self.choices:
            if choice.error is not None:
                raise Refused(choice.error, status=500)
        return finished

    def wait(self, seconds: float) -> bool:
        """Whether there is news."""
        try:
            self.news.get(timeout=seconds)
            while not self.news.empty():  # all of it is looked at now
                self.news.get()
        except queue.Empty:
            return False
        return True

    def abandon(self) -> None:
        """Whoever asked has the answer, or does not wait for it any more."""
        for choice in self.choices:
            choice.wanted = False


class Service:
    """Answers for ``policy``, sampled by ``engine``.

    Args:
        name: what clients call the model.
        system: the system prompt of conversations that bring none.
        max_tokens: of an answer where the client names no limit.
        call_format: ``auto``, or a name of ``FORMATS``.
    """

    def __init__(
        self, policy: Policy, engine: Engine, prompt: PromptConfig, system: str | None, *, name: str, max_tokens: int,
        call_format: str = "auto",
    ) -> None:  # fmt: skip
        self.name, self.prompt, self.system, self.max_tokens = name, prompt, system, max_tokens
        self.context_length, self.rows = policy.context_length, policy.rows
        # The sampling thread has the policy's own tokenizer, and those who ask share this one: it is for one thread at a time.
        self._tokenizer, self._lock = copy.deepcopy(policy.tokenizer), threading.Lock()
        self._calls = Calls.of(self._tokenizer, policy.end_token_ids, prompt, call_format)
        self._lead = "" if self._calls.form is None else self._calls.form.openings[0]
        self._lead_ids = tuple(self._tokenizer(self._lead, add_special_tokens=False)["input_ids"])
        self.engine, self.sampler = engine, Sampler(engine, policy.tokenizer, policy.end_token_ids, policy.device)

    @property
    def is_alive(self) -> bool:
        return self.sampler.is_alive

    def begin(self, body: object) -> Exchange:
        """Have an answer sampled. Raises Refused."""
        ask = read_ask(body)
        if ask.model != self.name:
            raise Refused(
                f"there is no model {ask.model!r:.80} here: ask for {self.name!r}", "model", status=404, code="model_not_found"
            )
        prompt_ids, lead = self._prompt_ids(ask), ""
        if ask.must_call:
            prompt_ids, lead = prompt_ids + self._lead_ids, self._lead
        if not prompt_ids:
            raise Refused("the messages have no text, so there is nothing to answer: give one", "messages")
        if max(prompt_ids) >= self.rows:  # the engine would refuse it with all that are sampled beside it
            raise Refused("the messages have a special token that this model has no row for: take it out", "messages")
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise Refused(
                f"the messages are {len(prompt_ids)} tokens long, but the model's context is {self.context_length}: shorten them",
                "messages", code="context_length_exceeded",
            )  # fmt: skip
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        settings = replace(ask.settings, max_tokens=min(ask.limit or self.max_tokens, room))
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        tell = partial(news.put, None)
        follow = ask.stream or bool(ask.stop)
        names = [f"{seed}\x1f{index}" for index in range(ask.choices)]
        choices = [Choice(name, prompt_ids, settings, ask.stop, follow, tell, lead) for name in names]
        try:
            self.sampler.put(choices)
        except FullError:
            raise Refused("too many requests wait already: ask again later", status=429, code="queue_full") from None
        answer = Answer(
            self.name, choices, self.sampler.end_token_ids, ask.tools, self._calls.form if ask.tools else None,
            logprobs=ask.logprobs, decode=self._decode,
        )  # fmt: skip
        return Exchange(ask, answer, choices, news)

    def _decode(self, token: int) -> str:
        with self._lock:
            return str(self._tokenizer.decode([token]))

    def close(self) -> None:
        self.sampler.close()
        self.engine.close()

    def _prompt_ids(self, ask: Ask) -> tuple[int, ...]:
        messages, system, tools = self._calls.shown(ask, self.system)
        try:
            with self._lock:
                prompt = render(Problem("chat", messages, ""), self._tokenizer, self.prompt, system, tools)  # type: ignore[arg-type]
        except ModelError as error:
            why = in_one_line(error.__cause__ or error)
            raise Refused(f"the model's chat template refuses these messages ({why})", "messages") from error
        return prompt.token_ids


@dataclass(frozen=True, slots=True)
class Calls:
    """How a model is shown tools, calls and results."""

    form: CallFormat | None
    template: TurnTemplate | None
    """None where it can be shown none;"""
    why: str
    """for this reason."""

    @classmethod
    def of(cls, tokenizer: Any, end_token_ids: Sequence[int], prompt: PromptConfig, call_format: str) -> Calls:
        if prompt.style != "chat":
            return cls(None, None, f"its prompts have no turns (prompt.style is {prompt.style})")
        try:
            named = format_of_template(getattr(tokenizer, "chat_template", None)) if call_format == "auto" else call_format
            template = TurnTemplate(tokenizer, end_token_ids, prompt.template_arguments, FORMATS[named].native)
        except (ConfigError, ModelError) as error:
            return cls(None, None, str(error))
        return cls(FORMATS[named], template, "")

    def shown(self, ask: Ask, system: str | None) -> tuple[list[dict[str, Any]], str | None, list[Mapping[str, Any]] | None]:
        """Messages, system prompt and schemas for the chat template. Special tokens lose their meaning in what the user and tools
        say, as where that is appended to an episode. Raises Refused for tools that the model cannot be shown."""
        messages = [dict(message) for message in ask.messages]
        for one in messages:
            if one["role"] in ("user", "tool") and self.template is not None:
                one["content"] = self.template.harmless(one["content"])
        if not ask.tools and not any("tool_calls" in one or one["role"] == "tool" for one in messages):
            return messages, system, None
        if self.form is None or self.template is None:
            raise Refused(f"this model cannot be shown tools: {self.why}", "tools")
        messages = self.template.with_results(messages)
        if self.form.native:
            return messages, system, [tool.schema for tool in ask.tools] or None
        for one in messages:
            calls = [call["function"] for call in one.pop("tool_calls", ())]
            one["content"] = "\n".join(
                filter(None, (one["content"], *(self.form.write(c["name"], c["arguments"]) for c in calls)))
            )
        if ask.tools:
            described = describe_tools(ask.tools, self.form)
            own = messages.pop(0)["content"] if messages[0]["role"] == "system" else system
            messages.insert(0, {"role": "system", "content": "\n".join(filter(None, (own, described)))})
        return messages, system, None


def open_service(config: Config, max_tokens: int, name: str) -> Service:
    """The service of the model that ``config`` names, with the settings by which it is asked. Loads the weights."""
    policy = load_to_ask(config)
    system, _ = resolve_system(config.prompt, config.data)
    # The built-in engine would store frozen weights for many prompts at once, and a client asks one.
    engine = make_engine(policy, config.rollout, frozen=config.rollout.engine == "vllm")
    return Service(
        policy, engine, config.prompt, system, name=name, max_tokens=max_tokens,
        call_format=config.rollout.call_format,
    )  # fmt: skip

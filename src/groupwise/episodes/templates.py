"""What a model's chat template puts between a turn of the policy and its next, as tokens.

The tokens of the prompt and of all turns stay as they were sampled or given, and only what is new is rendered and appended. A template
that would have written the past otherwise (it drops the thinking of earlier turns, or moves text) is found before the run: what the policy
sees in training would then not be what a chat program shows it. Where the run forks there, the conversation is rendered again, as the
prompt of what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import ModelError
from groupwise.importing import in_one_line
from groupwise.types import Message

__all__ = ["Conversation", "TurnTemplate"]

_MARK = "groupwise-marks-a-turn"
_ANSWERS = ("It is done.", "<think>\nLet me see.\n</think>\n\nIt is done.")
"""What a policy may have said: without and with thinking."""


class TurnTemplate:
    """Renders what the policy is given between its turns.

    ``arguments``: what the template is given beside the messages, such as ``enable_thinking``. ``native``: whether the template describes
    the tools of prompts; of a tokenizer's templates by name that of ``tool_use`` then writes the results of tools, as it does the prompts.

    Raises ModelError for a tokenizer without a chat template, and for a template whose turns do not end with an end token.
    """

    def __init__(
        self, tokenizer: Any, end_token_ids: Sequence[int], arguments: Mapping[str, Any] | None = None, native: bool = True
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ModelError(
                "an episode needs a chat template, which says how turns are written, and the tokenizer has none: take an instruct model"
            )
        self.tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self._has_tool_use = native and isinstance(tokenizer.chat_template, Mapping) and "tool_use" in tokenizer.chat_template
        self._end_ids = tuple(end_token_ids)
        # An end token that the tokenizer does not have is no text.
        self._ends = [end for token in end_token_ids if (end := tokenizer.decode([token]))]
        # Not all have a role: those of a header may be marked in the table of added tokens alone.
        marked = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        self._special = sorted({*tokenizer.all_special_tokens, *marked, *self._ends} - {""}, key=len, reverse=True)
        self.role = "tool" if self._knows_tools() else "user"
        """The role of a tool's result. A template that does not know tools is given it as the user's words."""
        self._ended([{"role": self.role, "content": ""}])

    def given(self, texts: Sequence[str], role: str | None = None) -> list[int]:
        """The tokens that follow a turn of the policy up to its next. One message for each text; ``role``: another than a tool's."""
        return self.given_messages([{"role": role or "tool", "content": text} for text in texts])

    def given_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The same for messages, each in its role. Raises ModelError where the template refuses them."""
        end, tail = self._ended(messages)
        # Behind their end token, as the template has them: some tokenizers let it take the spaces that follow (Phi-3's have rstrip).
        whole: list[int] = self.tokenizer(end + tail, add_special_tokens=False)["input_ids"]
        if whole and whole[0] in self._end_ids:
            return whole[1:]
        return self.tokenizer(tail, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    def rewrites(self, role: str | None = None) -> str | None:
        """How the template changes what stands already when a conversation goes on; None where it only appends. ``role``: of what is given
        between turns. As in ``Conversation.go_on``, spaces around what the policy said are not looked at."""
        role = role or self.role
        tools = self._chosen_by(role)
        opened = self._render([_user("Go on.")], tools)
        for said in _ANSWERS:
            shown = opened
            messages = [_user("Go on."), _assistant(said), {"role": role, "content": "42"}]
            for _ in range(2):
                now, before = self._render(messages, tools), shown + said
                if not (now.startswith(shown) and now[len(shown) :].lstrip().startswith(said)):
                    alike = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(now))
                    first = max(0, alike - 20)
                    return f"{before[first : first + 60]!r} becomes {now[first : first + 60]!r}"
                shown = now
                messages += [_assistant(said), {"role": role, "content": "43"}]
        return None

    def _harmless_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """What the policy is given as the template takes it."""
        harmless = [{"role": m["role"], "content": self.harmless(m["content"])} for m in messages]
        return self.with_results(harmless)  # type: ignore[return-value]

    def with_results(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` with results of tools in the role that they have here. Where that is the user's, those that follow each other, and
        what the user says then, are one turn: many templates demand that turns of user and assistant alternate."""
        shown: list[dict[str, Any]] = []
        after_result = False
        for message in messages:
            role = self.role if message["role"] == "tool" else message["role"]
            if after_result and role == "user":
                shown[-1]["content"] += f"\n{message['content']}"
            else:
                shown.append({**message, "role": role})
            after_result = message["role"] == "tool" and role == "user"
        return shown

    def _after(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What stands after what the policy says."""
        tools = self._chosen_by(*(message["role"] for message in messages))
        text = self._render([_user("Go on."), _assistant(_MARK), *self._harmless_messages(messages)], tools)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise ModelError(
                "the chat template does not show what the policy said before it is answered: it cannot be used for episodes"
            )
        return after

    def _ended(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """The end token of the policy's turn, and what stands after it."""
        after = self._after(messages)
        ended = next((end for end in self._ends if after.startswith(end)), None)
        if ended is None:
            raise ModelError(
                f"the chat template writes {after[:20]!r} after a turn of the policy, and no end token of the model "
                f"({', '.join(self._ends)}): turns cannot be told apart, so use a model whose template ends them"
            )
        return ended, after[len(ended) :]

    def harmless(self, text: str) -> str:
        """A result cannot end its turn or begin another: what would be read as a special token loses that meaning."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _knows_tools(self) -> bool:
        messages = [_user("Go on."), _assistant("42"), {"role": "tool", "content": _MARK * 2}]
        try:
            return _MARK * 2 in self._render(messages, self._chosen_by("tool"))
        except ModelError:
            return False

    def _chosen_by(self, *roles: str) -> Sequence[Mapping[str, Any]] | None:
        """Tools by which a tokenizer chooses its template of ``tool_use`` where results of tools are among ``roles``; else None, for the
        one that it takes without tools."""
        return [] if self._has_tool_use and "tool" in roles else None

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation as text, up to where the policy's next turn begins. ``tools``: schemas that the template describes."""
        more = self._arguments if tools is None else {**self._arguments, "tools": [dict(tool) for tool in tools]}
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False, **more
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise ModelError(
                f"the chat template refuses a conversation in which the {messages[-1]['role']} answers the policy ({in_one_line(error)}): "
                "it cannot be used for episodes"
            ) from error
        return rendered


@dataclass
class Conversation:
    """A conversation as the chat template writes it, followed turn by turn to see where it writes the past otherwise."""

    template: TurnTemplate
    messages: list[Message]
    """All so far; at the beginning those of the prompt."""
    text: str
    """They as the template writes them, up to where the policy's turn begins."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas that the template describes."""

    def go_on(self, said: str, given: Sequence[str], role: str) -> list[int] | None:
        """After the policy ``said`` something and was ``given`` texts by ``role``: the whole conversation as tokens, up to the policy's
        next turn, where the template does not only append to what it wrote before; else None.

        Spaces at the ends of what the policy said are not looked at: many templates trim them.
        """
        template, before, said = self.template, self.text, self.template.harmless(said)
        new: list[Message] = [{"role": role, "content": text} for text in given]
        after = template._after(new)
        self.messages += [_assistant(said), *template._harmless_messages(new)]
        self.text = template._render(self.messages, self.tools)
        between = self.text[len(before) : len(self.text) - len(after)]
        if self.text == before + between + after and between.strip() == said.strip():
            return None
        return template.tokenizer(self.text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}

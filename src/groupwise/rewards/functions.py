"""The built-in reward functions: for the text's length, words and repetitions, for the answer's form, and for the right answer.

``builtin_rewards()`` gives them by the name that a config uses. The form is that of what follows a model's thoughts (``</think>``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, cast

from groupwise.data.answers import PLACEHOLDERS, AnswerStyle, Grade, extract_answer, grade
from groupwise.errors import RewardError, UncheckedAnswerError
from groupwise.rewards.scores import StepRewards
from groupwise.types import Message

__all__ = [
    "TAGS",
    "CompletionText",
    "accuracy",
    "boxed_format",
    "builtin_rewards",
    "correctness",
    "correctness_and_format",
    "environment",
    "environment_turns",
    "format",
    "is_well_formed",
    "keyword",
    "length",
    "overlong",
    "repetition_penalty",
    "soft_xml",
    "strict_xml",
    "text_of",
    "xml_count",
]

CompletionText = str | Sequence[Message] | Sequence[Mapping[str, object]]
"""A completion as reward functions receive it: a string for plain prompts, a list of messages for chat prompts."""


def text_of(completion: CompletionText) -> str:
    """The words of a completion in either form; several messages are joined by newlines. Of an episode, in which a tool or an environment
    answered, the policy's last message: nothing that it was given counts as its own.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    own = [message for message in completion if message.get("role", "assistant") == "assistant"]
    if own and len(own) < len(completion):
        return str(own[-1]["content"])
    return "\n".join(str(message["content"]) for message in completion)


def length(
    completions: Sequence[CompletionText],
    completion_ids: Sequence[Sequence[int]] | None = None,
    target: int = 200,
    unit: Literal["characters", "words", "tokens"] = "characters",
    bounded: bool = True,
    penalise_longer: bool = True,
    turns: Sequence[Sequence[Mapping[str, object]]] | None = None,
    **_: object,
) -> list[float]:
    """How near a completion's length is to `target`: 0 on the spot, falling linearly to -1 for an empty one or twice the target.

    `-min(1, |length - target| / target)`: longer ones stay at -1, so that one endless completion does not hide the differences
    within its group. `bounded: false` is the plain distance, `-|length - target|`, which has no lower end. With `penalise_longer: false`
    whatever reaches the target scores 0: `min(length / target, 1) - 1`. Words stand between blanks; tokens include the stop token.
    Of an episode the policy's last turn is measured, in each unit.

    >>> length(["a" * 25, "a" * 100], target=20)
    [-0.25, -1.0]
    >>> length(["a" * 25, "a" * 100], target=20, bounded=False)
    [-5.0, -80.0]
    >>> length(["only three words", "these are four words"], target=4, unit="words", penalise_longer=False)
    [-0.25, 0.0]
    """
    if target < 1:
        raise RewardError(f"length's target is {target}, but it must be at least 1")
    if unit not in ("characters", "words", "tokens"):
        raise RewardError(f"length's unit is {unit!r}, but it must be 'characters', 'words' or 'tokens'")
    if unit == "tokens":
        if completion_ids is None:
            raise RewardError("length counts tokens only where completion_ids are given; use unit='characters'")
        sizes = [_last_tokens(ids, one) for ids, one in zip(completion_ids, turns or [()] * len(completion_ids), strict=True)]
    else:
        texts = [text_of(completion) for completion in completions]
        sizes = [len(text.split()) if unit == "words" else len(text) for text in texts]
    distances = [abs(size - target) if penalise_longer else max(0, target - size) for size in sizes]
    return [0.0 - (min(1.0, distance / target) if bounded else distance) for distance in distances]


def _last_tokens(ids: Sequence[int], turns: Sequence[Mapping[str, object]]) -> int:
    """Tokens of the policy's last turn, whose words ``text_of`` gives."""
    return next((cast(int, turn["tokens"]) for turn in reversed(turns) if turn["role"] == "assistant"), len(ids))


def overlong(
    completions: Sequence[CompletionText],
    completion_ids: Sequence[Sequence[int]],
    max_completion_tokens: int | Sequence[int],
    cache_tokens: int | None = None,
    **_: object,
) -> list[float]:
    """0 up to `cache_tokens` before the token limit, then falling linearly to -1 at the limit: DAPO's soft overlong punishment.

    arXiv 2503.14476, eq. 13, where the limit is L_max (the run's `rollout.max_completion_tokens`) and the zone before it L_cache; by
    default a fifth of the limit, the paper's 4,096 of 20,480 tokens. Tokens include the stop token.
    """
    limits = [max_completion_tokens] * len(completion_ids) if isinstance(max_completion_tokens, int) else max_completion_tokens
    scores = []
    for ids, limit in zip(completion_ids, limits, strict=True):
        zone = max(1, limit // 5) if cache_tokens is None else cache_tokens
        if not 1 <= zone <= limit:
            raise RewardError(
                f"overlong's cache_tokens is {zone}, but it must be from 1 to the limit of {limit} tokens "
                "(rollout.max_completion_tokens); a fifth of the limit is usual"
            )
        scores.append(max(-1.0, min(0.0, (limit - zone - len(ids)) / zone)))
    return scores


def keyword(
    completions: Sequence[CompletionText],
    words: Sequence[str] = (),
    case_sensitive: bool = False,
    avoid: Sequence[str] = (),
    **_: object,
) -> list[float]:
    """The share of `words` that stand in a completion as whole words, less the share of those to `avoid`: -1 to 1.

    Repeating one changes nothing.

    >>> keyword(["Therefore 3, therefore 4", "therefores"], words=["therefore", "because"])
    [0.5, 0.0]
    >>> keyword(["Therefore 3", "Sorry, an error"], words=["therefore"], avoid=["sorry", "error", "wrong", "false"])
    [1.0, -0.5]
    """
    wanted, unwanted = _word_patterns(words, case_sensitive), _word_patterns(avoid, case_sensitive)
    if not wanted and not unwanted:
        raise RewardError("keyword needs words to look for: set arguments: {words: [therefore, because]}")
    return [_share_found(wanted, text) - _share_found(unwanted, text) for text in map(text_of, completions)]


def _word_patterns(words: Sequence[str], case_sensitive: bool) -> list[re.Pattern[str]]:
    listed = [words] if isinstance(words, str) else list(words)
    if others := [word for word in listed if not isinstance(word, str)]:
        raise RewardError(
            f"keyword's words have {others[0]!r}, which is no text: put quotes around it (in YAML yes, no and 42 are not)"
        )
    if not all(word.strip() for word in listed):
        raise RewardError("keyword needs words to look for, but one of them is blank: remove it")
    return [re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", 0 if case_sensitive else re.IGNORECASE) for word in listed]


def _share_found(patterns: Sequence[re.Pattern[str]], text: str) -> float:
    return sum(bool(pattern.search(text)) for pattern in patterns) / len(patterns) if patterns else 0.0


def repetition_penalty(completions: Sequence[CompletionText], ngram: int = 3, strength: float = 1.0, **_: object) -> list[float]:
    """`-strength` times the share of word n-grams that occurred before in the same completion: 0 to `-strength`.

    `-strength * (1 - distinct / all)` n-grams, over lower-cased words between blanks. Completions shorter than `ngram` words cannot
    repeat and score 0. As in arXiv 2502.03373 (there on tokens), one number for the whole completion.

    >>> repetition_penalty(["so it is so it is", "so it is not so"])  # "so it is" twice among four
    [-0.25, 0.0]
    """
    if ngram < 1 or strength < 0:
        raise RewardError(f"repetition_penalty's ngram is {ngram} and strength {strength}, but they must be at least 1 and 0")
    return [0.0 - strength * _repeated_share(text_of(completion).lower().split(), ngram) for completion in completions]


def _repeated_share(words: Sequence[str], ngram: int) -> float:
    grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def format(completions: Sequence[CompletionText], once: bool = True, **_: object) -> list[float]:
    """0.2 for each of `<reasoning>`, `</reasoning>`, `<answer>`, `</answer>` that stands exactly once, and not inside the other block:
    0 to 0.8.

    Partial credit: a model that gets one tag right already learns something. Which block comes first is not looked at. Without `once` a
    tag counts wherever and however often it stands, so that nothing is lost by going on after `</answer>`.

    >>> format(["<reasoning>2 + 2</reasoning> 4", "<answer>4</answer><answer>5</answer>"])
    [0.4, 0.0]
    >>> format(["<answer>4</answer><answer>5</answer>"], once=False)
    [0.4]
    """
    return [(_tags_once(text) if once else sum(tag in text for tag in TAGS)) / 5 for text in map(_said, completions)]


def strict_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: object) -> list[float]:
    """`score` where the completion is one reasoning block, then one answer block, both filled in, and nothing else; else 0."""
    return [score if _blocks_in_order(_said(completion), nothing_else=True) else 0.0 for completion in completions]


def soft_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: object) -> list[float]:
    """`score` where one filled reasoning block is followed by one filled answer block, whatever stands around them; else 0."""
    return [score if _blocks_in_order(_said(completion), nothing_else=False) else 0.0 for completion in completions]


def xml_count(
    completions: Sequence[CompletionText], tag_score: float = 0.125, trailing_penalty: float = 0.001, **_: object
) -> list[float]:
    """`tag_score` for each of the four tags that stands exactly once, on a line of its own, less `trailing_penalty` for every
    character after `</answer>`; never below 0. With the defaults 0 to 0.5.

    Partial credit on the way to `strict_xml`'s form with line breaks. With the floor, long text after the answer is not worse than no
    answer.

    >>> xml_count(["<reasoning>\\n4\\n</reasoning>\\n<answer>\\n4\\n</answer>\\n", "<answer>\\n4\\n</answer>\\nBye."])
    [0.5, 0.246]
    """
    if tag_score < 0 or trailing_penalty < 0:
        raise RewardError(
            f"xml_count's tag_score is {tag_score} and trailing_penalty {trailing_penalty}, but neither may be below 0: the penalty "
            "is already taken off"
        )
    return [
        max(0.0, tag_score * _tags_on_own_lines(text) - trailing_penalty * _trailing(text)) for text in map(_said, completions)
    ]


def boxed_format(completions: Sequence[CompletionText], score: float = 0.5, **_: object) -> list[float]:
    r"""`score` where exactly one `\boxed{}` stands in the completion, closed and filled in; else 0."""
    return [score if _one_filled_box(_said(completion)) else 0.0 for completion in completions]


def _said(completion: CompletionText) -> str:
    """What follows the thoughts, which may quote tags and draft answers; nothing where they never end. Where the chat template has
    written ``<think>``, the completion has their end alone."""
    text = text_of(completion)
    thoughts, _, rest = text.rpartition("</think>")
    if text.lstrip().startswith("<think>"):
        return rest if thoughts else ""
    return text if "<think>" in thoughts else rest


def _tags_once(text: str) -> int:
    return sum(_stands(tag, text) for tag in TAGS)


def _tags_on_own_lines(text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return sum(_stands(tag, text) and tag in lines for tag in TAGS)


def _stands(tag: str, text: str) -> bool:
    """Once, and not within the other block: an answer inside the reasoning is no answer after it."""
    opening, closing = TAGS[2:] if tag in TAGS[:2] else TAGS[:2]
    begin, end = text.find(opening), text.rfind(closing)
    return text.count(tag) == 1 and not (begin != -1 and begin < text.find(tag) < end)


def _trailing(text: str) -> int:
    """Characters after the last closing answer tag, blanks at both ends aside."""
    _, closed, after = text.rpartition(TAGS[-1])
    return len(after.strip()) if closed else 0


def _blocks_in_order(text: str, nothing_else: bool) -> bool:
    # Positions instead of a regular expression: linear in the length, however many half-open tags a model produces.
    if _tags_once(text) < len(TAGS):
        return False
    starts = [text.index(tag) for tag in TAGS]
    if starts != sorted(starts):
        return False
    ends = [start + len(tag) for start, tag in zip(starts, TAGS, strict=True)]
    before, reasoning, between, answer, after = (
        text[start:end].strip() for start, end in zip([0, *ends], [*starts, len(text)], strict=True)
    )
    return _filled(reasoning) and _filled(answer) and not (nothing_else and (before or between or after))


def _filled(content: str) -> bool:
    """A copy of the prompt's placeholder is not an answer."""
    return content not in PLACEHOLDERS


def _one_filled_box(text: str) -> bool:
    return text.count("\\boxed") == 1 and extract_answer(text, "boxed") is not None


def is_well_formed(text: str, style: AnswerStyle) -> bool:
    """Exactly the form asked for. xml: one filled reasoning block, then one filled answer block, and nothing else but white
    space; boxed: exactly one filled ``\\boxed{}``; plain: exactly one ``####`` with something after it. A model's thoughts are no
    part of it."""
    text = _said(text)
    if style == "xml":
        return _blocks_in_order(text, nothing_else=True)
    if style == "boxed":
        return _one_filled_box(text)
    _, mark, answer = text.partition("####")
    return bool(mark and answer.strip()) and "####" not in answer


def correctness(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: object,
) -> list[float]:
    r"""2.0 where the answer is exactly the reference, 1.5 where it is equal to it as a number or as LaTeX, else 0.

    Only an answer in the place that was asked for counts (the last `<answer>` block, or `\boxed{}`): a right number elsewhere
    in the text scores 0. Where a row has several reference answers (`accepted_answers`), any of them will do.

    >>> correctness(["<answer>72</answer>", "<answer>72.0</answer>", "72"], answer=["72"] * 3)
    [2.0, 1.5, 0.0]
    """
    graded = _grades(completions, accepted_answers or answer, answer_style)
    return [2.0 if one.exact else 1.5 if _sure(one, one.strict) else 0.0 for one in graded]


def accuracy(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    lenient: bool = False,
    in_format: bool = False,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: object,
) -> list[float]:
    """1 where the answer is right, else 0. `lenient` also takes the last number of a completion that ignores the format; `in_format`
    takes a right answer only in a completion that is exactly in the form asked for (`is_well_formed`), so that neither pays alone.

    Raises:
        RewardError: both are asked for.

    >>> texts = ["<reasoning>2 + 2</reasoning><answer>4</answer>", "<answer>4</answer>", "4"]
    >>> [accuracy(texts, ["4"] * 3, lenient=lenient, in_format=exact) for lenient, exact in ((True, False), (False, False), (False, True))]
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if lenient and in_format:
        raise RewardError(
            "accuracy has lenient and in_format, but an answer that may stand anywhere needs no format: take one of them"
        )
    graded = _grades(completions, accepted_answers or answer, answer_style)
    right = [float(_sure(one, one.lenient if lenient else one.strict)) for one in graded]
    if not in_format:
        return right
    styles = _styles(completions, answer_style)
    return [
        points * is_well_formed(text_of(completion), style)
        for points, completion, style in zip(right, completions, styles, strict=True)
    ]


def correctness_and_format(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: object,
) -> list[float]:
    """The sum of `correctness` and `format`: 0 to 2.8."""
    right = correctness(completions, answer, answer_style, accepted_answers)
    return [points + tags for points, tags in zip(right, format(completions), strict=True)]


def _grades(
    completions: Sequence[CompletionText], references: Sequence[str | Sequence[str]], answer_style: Sequence[str] | None
) -> list[Grade]:
    styles = _styles(completions, answer_style)
    return [
        grade(text_of(completion), reference, style)
        for completion, reference, style in zip(completions, references, styles, strict=True)
    ]


def _styles(completions: Sequence[CompletionText], answer_style: Sequence[str] | None) -> Sequence[AnswerStyle]:
    return ["xml"] * len(completions) if answer_style is None else cast(Sequence[AnswerStyle], answer_style)


def _sure(graded: Grade, verdict: bool | None) -> bool:
    """The verdict, or ``UncheckedAnswerError``: what nobody could check is no 0."""
    if verdict is None:
        raise UncheckedAnswerError(graded.failure)
    return verdict


def environment(
    completions: Sequence[CompletionText], environment_reward: Sequence[float | None] | None = None, **_: object
) -> list[float | None]:
    """What the environment gave for the episode (`rollout.environment`): the sum over its turns, and its `get_reward()`."""
    return [None] * len(completions) if environment_reward is None else list(environment_reward)


def environment_turns(
    completions: Sequence[CompletionText],
    turns: Sequence[Sequence[Mapping[str, object]]] | None = None,
    environment_reward: Sequence[float | None] | None = None,
    **_: object,
) -> list[StepRewards | None]:
    """What the environment gave, turn by turn: each turn's reward at its end, and that of `get_reward()` at the end of the last."""
    if turns is None or environment_reward is None:
        return [None] * len(completions)
    return [None if whole is None else _by_turn(one, whole) for one, whole in zip(turns, environment_reward, strict=True)]


def _by_turn(turns: Sequence[Mapping[str, object]], whole: float) -> StepRewards:
    ends = list(accumulate(cast(int, turn["tokens"]) for turn in turns))
    own = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    rewards = [cast(float, turns[i]["reward"] or 0.0) for i in own]
    rewards[-1] += whole - math.fsum(rewards)
    return StepRewards(rewards, [ends[i] for i in own], unit="tokens")


def builtin_rewards() -> dict[str, Callable[..., Sequence[float | StepRewards | None]]]:
    """All built-in functions by name; the first sentence of each docstring says what it gives."""
    functions = (
        correctness,
        accuracy,
        format,
        correctness_and_format,
        strict_xml,
        soft_xml,
        xml_count,
        boxed_format,
        environment,
        environment_turns,
        length,
        overlong,
        keyword,
        repetition_penalty,
    )
    return {function.__name__: function for function in functions}

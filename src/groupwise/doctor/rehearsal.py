"""Rules that try things out before the run: reward functions on made-up completions, the end token, room for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from groupwise.data.prompts import worked_completion
from groupwise.data.sources import has_answers
from groupwise.doctor.findings import Evidence, Example
from groupwise.errors import RewardError
from groupwise.rewards import functions
from groupwise.rewards.suite import RewardFailure
from groupwise.training.setup import Prepared
from groupwise.types import Completion, FinishReason, Group, Problem, Turn

__all__ = [
    "Rehearsal",
    "answer_too_long",
    "blind_reward",
    "cut_for_the_judge",
    "memory_short",
    "reward_fails",
    "unpaid_end",
    "untaught_end",
]

TRIED = 16
KINDS = ("right", "wrong", "empty", "gibberish", "right, then on to the limit")
ENDED = 4
"""The kinds that end by themselves; the last one is cut at the token limit."""
REASONING = "Step by step."
GIBBERISH = "la la la la la"


@dataclass(frozen=True)
class Rehearsal:
    """A run that has been prepared, and what its rewards say to completions whose worth is known: one of each of ``KINDS``."""

    prepared: Prepared
    tried: int = TRIED
    """Problems that completions are made up for."""

    @cached_property
    def problems(self) -> Sequence[Problem]:
        prompts = self.prepared.train_prompts
        return [prompts[i].problem for i in range(min(self.tried, len(prompts)))]

    @cached_property
    def scored(self) -> list[Group | RewardFailure | RewardError]:
        """For each of the first problems a completion of each kind, scored; by functions alone, since a reward model's weights are not
        loaded for a trial."""
        rewards = self.prepared.rewards.without_weights()
        if rewards is None:
            return []
        pairs = [(self.prepared.train_prompts[i], self.completions(i)) for i in range(len(self.problems))]
        # Functions that compare problems must see them together; otherwise one by one, to tell what went well before a failure.
        parts = [pairs] if rewards.sees_batches else [[pair] for pair in pairs]
        results: list[Group | RewardFailure | RewardError] = []
        for part in parts:
            try:
                results += rewards.score_each(part)
            except RewardError as error:
                results.append(error)
                break  # the run would stop here too
        return results

    def completions(self, index: int) -> list[Completion]:
        problem, style = self.problems[index], self.prepared.answer_style
        others = (p for p in self.problems if p.answer not in problem.accepted)
        other = next(others, replace(problem, answer="12345.678"))
        reasoned = problem.columns.get("solution")
        if str(reasoned or "").strip() in ("", problem.answer):
            reasoned = REASONING  # rows without one are answered in the whole form too
        right = worked_completion(replace(problem, columns={**problem.columns, "solution": reasoned}), style)  # type: ignore[arg-type]
        wrong = worked_completion(replace(problem, answer=other.answer, columns={}), style)  # type: ignore[arg-type]
        ended = [self._completion(text, sample) for sample, text in enumerate((right, wrong, "", GIBBERISH))]
        left = self.prepared.config.rollout.max_completion_tokens - len(ended[0].token_ids)
        return [*ended, self._completion(right + "\n" + "la " * max(left, len(GIBBERISH.split())), len(ended), stopped=False)]

    def _completion(self, text: str, sample: int, stopped: bool = True) -> Completion:
        """As an engine gives it: with its end token, unless it is cut. That of an episode is its one turn, and earned nothing."""
        tokenizer, rollout = self.prepared.tokenizer, self.prepared.config.rollout
        end = [tokenizer.eos_token_id] if stopped and tokenizer.eos_token_id is not None else []
        ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], *end)
        turns = (Turn("assistant", text, len(ids)),) if rollout.has_episodes else ()
        reward = None if rollout.environment is None else 0.0
        finish_reason: FinishReason = "stop" if stopped else "length"
        return Completion(text, ids, (0.0,) * len(ids), finish_reason, sample, turns=turns, reward=reward)

    @property
    def groups(self) -> list[Group]:
        return [one for one in self.scored if isinstance(one, Group)]


def reward_fails(rehearsal: Rehearsal) -> Evidence | None:
    failures = [one for one in rehearsal.scored if not isinstance(one, Group)]
    if not failures:
        return None
    messages = [one.message if isinstance(one, RewardFailure) else str(one) for one in failures]
    return Evidence(
        f"{messages[0]} ({len(failures)} of {len(rehearsal.scored)} problems that were tried)",
        numbers={"failures": len(failures)},
        examples=tuple(Example("tried before the run", message) for message in messages[:3]),
    )


OF_NO_ANSWER = (functions.keyword, functions.length, functions.overlong, functions.repetition_penalty)
"""Built-in rewards that no answer decides: made-up completions may well all earn the same."""


def judged_elsewhere(rehearsal: Rehearsal) -> bool:
    """Whether a reward model or an environment has a say, which before the run is not known, or no answer is right."""
    rewards, config = rehearsal.prepared.rewards, rehearsal.prepared.config
    named = config.rollout.environment is not None
    # One of the user's own that takes what the environment gave, as any with **columns does, may look at it too.
    played = any(
        (one.is_environment or (named and not one.built_in and one.takes("environment_reward"))) and one.weight
        for one in rewards.rewards
    )
    return bool(rewards.models) or played or not has_answers(config.data)


def blind_reward(rehearsal: Rehearsal) -> Evidence | None:
    """A right answer earns no more than a wrong one, or than nothing at all."""
    groups = rehearsal.groups
    if not groups or judged_elsewhere(rehearsal):
        return None
    blind = [g for g in groups if g.rewards[0] <= max(g.rewards[1:ENDED])]
    if len(blind) < 0.5 * len(groups):
        return None
    same = sum(1 for g in groups if len({*g.rewards[:ENDED]}) == 1)
    said = f"; in {same} all four scored the same" if same else ""
    # What an own function looks for, such as code that runs, may be in none of the four, and so may the words of `keyword`.
    certain = same == len(groups) and all(
        one.built_in and one.function not in OF_NO_ANSWER for one in rehearsal.prepared.rewards.rewards if one.weight
    )
    return Evidence(
        f"in {len(blind)} of {len(groups)} problems that were tried a worked right answer earned no more than a wrong one, an "
        f"empty one or nonsense{said}",
        numbers={"blind": len(blind), "tried": len(groups)},
        examples=tuple(reward_examples(blind[0])),
        severity="critical" if certain else None,
    )


def unpaid_end(rehearsal: Rehearsal) -> Evidence | None:
    """A right answer that goes on until it is cut earns as much as one that ends."""
    told = [g for g in rehearsal.groups if g.rewards[0] > max(g.rewards[1:ENDED])]  # of others the rules above speak
    if not told or judged_elsewhere(rehearsal) or any(g.rewards[0] > g.rewards[ENDED] for g in told):
        return None
    return Evidence(
        f"in all {len(told)} problems that were tried a right answer that went on to the token limit earned as much as one that ended",
        numbers={"tried": len(told)},
        examples=tuple(reward_examples(told[0], (ENDED, 0))),
    )


def reward_examples(group: Group, kinds: Sequence[int] = (0, 1, 2)) -> list[Example]:
    where = f"problem {group.prompt.problem.id}"
    texts = [one.text for one in group.completions]
    texts[ENDED] = f"{texts[ENDED][: len(texts[0]) + 30]}..."
    return [Example(where, texts[k], f"{KINDS[k]}: reward {group.rewards[k]:g}") for k in kinds]


def answer_too_long(rehearsal: Rehearsal) -> Evidence | None:
    """Worked answers that do not fit the token limit: the policy would be cut before it can be right."""
    limit, tokenizer = rehearsal.prepared.config.rollout.max_completion_tokens, rehearsal.prepared.tokenizer
    lengths = []
    for problem in rehearsal.prepared.problems.train[:200]:
        text = worked_completion(problem, rehearsal.prepared.answer_style)  # type: ignore[arg-type]
        lengths.append((len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1, problem, text))
    over = [one for one in lengths if one[0] > limit]
    if len(over) < 0.1 * len(lengths) or not has_answers(rehearsal.prepared.config.data):
        return None
    longest = max(length for length, _, _ in lengths)
    return Evidence(
        f"{len(over)} of {len(lengths)} worked answers are longer than rollout.max_completion_tokens = {limit} (the longest has "
        f"{longest} tokens)",
        numbers={"longer": len(over), "longest": longest},
        examples=tuple(Example(f"problem {p.id}", text, f"{length} tokens") for length, p, text in over[:3]),
    )


def cut_for_the_judge(rehearsal: Rehearsal) -> Evidence | None:
    """Prompts that, with a completion of full length, are more than a reward model reads: it would judge without their beginning."""
    prepared = rehearsal.prepared
    limit = prepared.config.rollout.max_completion_tokens
    for name, judge in prepared.rewards.models.items():
        prompts = [prepared.train_prompts[i] for i in range(len(rehearsal.problems))]
        asked = [p.text if p.messages is None else [dict(m) for m in p.messages] for p in prompts]
        worked = [worked_completion(p.problem, prepared.answer_style) for p in prompts]  # type: ignore[arg-type]
        needed = max(judge.count_tokens(prompt, "") for prompt in asked) + limit
        cut = sum(judge.count_tokens(prompt, text) > judge.max_input_tokens for prompt, text in zip(asked, worked, strict=True))
        if needed > judge.max_input_tokens:
            worse = f"; {cut} of {len(asked)} worked answers are cut already" if cut else ""
            return Evidence(
                f"the reward model {name!r} reads at most {judge.max_input_tokens} tokens, but a prompt and a completion of "
                f"rollout.max_completion_tokens = {limit} come to about {needed}{worse}",
                numbers={"needed": needed, "reads": judge.max_input_tokens, "cut": cut},
                severity="warning" if cut else None,
            )
    return None


def memory_short(rehearsal: Rehearsal) -> Evidence | None:
    """A plan is off by a tenth or less, so that a run which needs more than that beyond what is free will end early."""
    short = rehearsal.prepared.short_of_memory
    if short is None:
        return None
    return Evidence(
        short.sentence,
        numbers={"needed_bytes": short.needed, "free_bytes": short.free},
        severity="critical" if short.needed > 1.1 * short.free else None,
        remedy=f"{short.remedy[0].upper()}{short.remedy[1:]}.",
    )


def untaught_end(rehearsal: Rehearsal) -> Evidence | None:
    """Where the chat template ends a turn with another token than the tokenizer's eos, a warm start teaches the wrong one."""
    from groupwise.models.load import end_token_ids

    prepared, tokenizer = rehearsal.prepared, rehearsal.prepared.tokenizer
    ends = end_token_ids(tokenizer, prepared.hf_config)
    names = [tokenizer.convert_ids_to_tokens(end) for end in ends]
    closing = closing_token(rehearsal)
    if prepared.config.prompt.style == "chat" and closing is None:
        return Evidence(
            f"the chat template puts none of the model's end tokens ({', '.join(map(repr, names)) or 'it has none'}) after an answer: "
            "completions will hardly end by themselves",
            severity="critical" if not ends else None,
        )
    if prepared.config.warm_start.steps and closing is not None and closing != tokenizer.eos_token_id:
        shown = tokenizer.convert_ids_to_tokens(closing)
        return Evidence(
            f"the warm start ends its examples with {tokenizer.eos_token!r}, but the chat template ends a turn with {shown!r}"
        )
    return None


def closing_token(rehearsal: Rehearsal) -> int | None:
    """The end token that the template writes after the assistant's words."""
    from groupwise.models.load import end_token_ids

    tokenizer = rehearsal.prepared.tokenizer
    ends = set(end_token_ids(tokenizer, rehearsal.prepared.hf_config))
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two"}]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:
        return None
    tail = rendered.rpartition("two")[2]
    return next((i for i in tokenizer(tail, add_special_tokens=False)["input_ids"] if i in ends), None)

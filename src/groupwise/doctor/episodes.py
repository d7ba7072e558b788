"""Rules about episodes: whether tools are called, whether calls fit and their tools work, and whether calling is paid."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from groupwise.doctor.findings import Evidence, Series, completions_between, mean, series, three
from groupwise.tracking.reading import CompletionRecord, RunRecord
from groupwise.types import ToolCall

__all__ = ["calls_in_a_loop", "invalid_calls", "never_calls", "pays_without_the_tool", "tool_errors"]

HARDLY = 0.02
"""Calls per completion below which a tool is not used."""
MANY = 0.25
"""Share of calls, or of episodes with calls, from which on a fault is no slip."""
FEW_EPISODES, FEW_GROUPS = 8, 5
"""Recorded episodes, and groups, that a comparison takes at least."""
MARKS = ("<tool_call>", "<call>", "<function", "<|python_tag|>", '{"name":', "```tool")
"""How models write calls; one that stands in a turn without calls is of a format that the run does not read."""


def never_calls(run: RunRecord) -> Evidence | None:
    """There are tools, and the policy does not use them: from the start on, or no more."""
    calls = series(run, "episodes/calls")
    has_tools = bool(run.config and run.config.rollout.tools) or any(value > 0 for value in calls.values)
    if len(calls) < 3 or not has_tools or calls.late >= HARDLY:
        return None
    late = completions_between(run, calls.late_steps)
    unread = Counter(mark for record in late for mark in MARKS if not record.calls and mark in "".join(record.said.split()))
    mark, count = unread.most_common(1)[0] if unread else ("", 0)
    form = run.config.rollout.call_format if run.config else "auto"
    seen = f"; {count} of {len(late)} recorded completions contain {mark!r}, which is no call by rollout.call_format={form}"
    return Evidence(
        f"in steps {calls.late_steps[0]} to {calls.late_steps[1]} a completion made {calls.late:.2g} calls on average "
        f"({calls.first:.2g} in the first steps){seen if count else ''}",
        calls.late_steps,
        {"calls_first": calls.first, "calls_late": calls.late},
        three(late, where=lambda r: not unread or mark in "".join(r.said.split())),
    )


def calls_in_a_loop(run: RunRecord) -> Evidence | None:
    """Episodes in which a call is made again right after it was answered, and answered the same."""
    calling = [record for record in recorded_late(run) if record.calls]
    looping = [record for record in calling if repeats(record.calls)]
    if len(calling) < FEW_EPISODES or len(looping) < MANY * len(calling):
        return None
    most = max(repeats(record.calls) for record in looping)
    steps = late_steps(run)
    return Evidence(
        f"in steps {steps[0]} to {steps[1]} {len(looping)} of {len(calling)} recorded episodes with calls made the same call again right "
        f"after its result, up to {most} times",
        steps,
        {"share": len(looping) / len(calling), "most": most},
        three(looping, remark=lambda r: f"{repeats(r.calls)} calls repeated"),
    )


def repeats(calls: Sequence[ToolCall]) -> int:
    """How many calls are the one before over again, with the same result."""
    return sum(
        (a.name, a.result, as_key(a)) == (b.name, b.result, as_key(b)) for a, b in pairwise(calls)
    )  # rolling a die again is no loop


def as_key(call: ToolCall) -> str:
    return json.dumps(call.arguments, sort_keys=True, default=str)


def invalid_calls(run: RunRecord) -> Evidence | None:
    """Calls that cannot be made: more and more of them, or most from the start on."""
    invalid = series(run, "episodes/invalid_calls")
    if len(invalid) < 3 or not (invalid.late >= 2 * MANY or (invalid.late >= MANY / 2 and invalid.rises(by=0.1))):
        return None
    return _of_calls(run, invalid, ("invalid",), "could not be made", "invalid")


def tool_errors(run: RunRecord) -> Evidence | None:
    """Calls that were made, and in which the tool raised, returned no text or took too long."""
    failed = series(run, "episodes/failed_calls")
    if len(failed) < 3 or failed.late < MANY:
        return None
    return _of_calls(run, failed, ("raised", "timed_out"), "failed in the tool", "failed")


def _of_calls(run: RunRecord, shares: Series, failures: Sequence[str], what: str, name: str) -> Evidence:
    late = completions_between(run, shares.late_steps)

    def told(record: CompletionRecord) -> list[str]:
        return [call.result for call in record.calls if call.failure in failures]

    counts = Counter(result for record in late for result in told(record))
    often, count = counts.most_common(1)[0] if counts else ("", 0)
    same = f"; of {counts.total()} recorded ones {count} were answered the same" if counts else ""
    return Evidence(  # what tools wrote stands in examples alone, which a report without texts leaves out
        f"at the end {shares.late:.0%} of the calls {what} ({shares.early:.0%} at the beginning){same}",
        shares.late_steps,
        {f"{name}_early": shares.early, f"{name}_late": shares.late},
        three(
            sorted(late, key=lambda r: often not in told(r)),
            where=lambda r: bool(told(r)),
            remark=lambda r: f"told {(often if often in told(r) else told(r)[0])[:120]!r}",
        ),
    )


def pays_without_the_tool(run: RunRecord) -> Evidence | None:
    """Within groups those who call nothing are paid more than those who call: compared where both are, since problems differ."""
    groups: dict[tuple[int, str, int], list[CompletionRecord]] = defaultdict(list)
    for record in recorded_late(run):
        if record.reward is not None:
            groups[record.step, record.problem, record.occurrence].append(record)
    apart = []
    for group in groups.values():
        with_calls = [r.reward for r in group if r.calls and r.reward is not None]
        without = [r.reward for r in group if not r.calls and r.reward is not None]
        if with_calls and without:
            apart.append(mean(without) - mean(with_calls))
    if len(apart) < FEW_GROUPS:
        return None
    gain = mean(apart)
    error = math.sqrt(sum((one - gain) ** 2 for one in apart) / (len(apart) - 1) / len(apart))
    if gain <= max(2 * error, 1e-6):
        return None
    steps, calls = late_steps(run), series(run, "episodes/calls")
    falls = calls.falls() and calls.late < 0.5 * calls.early
    course = f"; calls per completion went from {calls.early:.2g} to {calls.late:.2g}" if len(calls) else ""
    return Evidence(
        f"in steps {steps[0]} to {steps[1]}, in {len(apart)} recorded groups that have both, completions without a call were paid "
        f"{gain:.3g} more than those with one{course}",
        steps,
        {"gain": gain, "groups": len(apart)},
        three([r for r in recorded_late(run) if not r.calls and (r.reward or 0) > 0]),
        "warning" if falls else None,
    )


def recorded_late(run: RunRecord) -> list[CompletionRecord]:
    """The recorded episodes of the last fifth of the steps; none where there are no tools."""
    return completions_between(run, late_steps(run)) if len(series(run, "episodes/calls")) else []


def late_steps(run: RunRecord) -> tuple[int, int]:
    return series(run, "episodes/calls").late_steps

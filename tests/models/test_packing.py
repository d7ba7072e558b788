"""Group packing: every token in its place, and every causal pair of tokens in exactly one block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.models import attention, blocked_attention
from groupwise.models.attention import plan_rectangles
from groupwise.models.blocked_attention import plan_blocks
from groupwise.models.packing import Packed, beginning_to_share, pack, pack_prompts, rows_in

from .slow import SHAPES, Groups, random_groups


def counted_pairs(packed: Packed, window: int | None = None) -> Tensor:
    """``[R + 1, R + 1]``: how many times the rectangles let row i attend to row j; the last row is padding's."""
    rows = len(packed.token_ids_R)
    counts = torch.zeros(rows + 1, rows + 1, dtype=torch.long)
    plan, start = plan_rectangles(packed.spans, window), 0
    assert len(plan.places.unique()) == rows
    for block in plan.blocks:
        before, keys = block.key_rows[: block.prefix].tolist(), block.key_rows[block.prefix :].view(block.sequences, -1)
        for place, row in enumerate(block.query_rows.tolist()):
            if plan.places[row] == start + place:
                seen = torch.tensor([*before, *keys[place // block.queries].tolist()])[block.mask[place % block.queries]]
                assert len(seen.unique()) == len(seen)
                counts[row, seen] += 1
        start += len(block.query_rows)
    return counts[:rows, :rows]


def counted_pairs_in_two_parts(packed: Packed, window: int | None = None) -> Tensor:
    """The same for the plan of blocked attention."""
    rows = len(packed.token_ids_R)
    plan = plan_blocks(packed.spans, rows, window)
    counts = torch.zeros(rows + 1, rows + 1, dtype=torch.long)
    for block in plan.own:
        queries, keys = block.query_rows.view(block.sequences, -1), block.key_rows.view(block.sequences, -1)
        for a in range(block.sequences):
            for i in range(block.queries):
                low = 0 if block.low is None else int(block.low[i])
                for j in keys[a, low : block.offset + i + 1].tolist():
                    counts[queries[a, i], j] += 1
    for part in plan.shared:
        for i in range(part.count):
            low = 0 if part.low is None else int(part.low[i])
            for j in [row for first, count in part.seen for row in range(first, first + count)][low:]:
                counts[part.first + i, j] += 1
    return counts[:rows, :rows]


def causal_pairs(groups: Groups, window: int = 10**6, common: int = 0) -> Tensor:
    """``[R, R]`` by definition: a row sees itself, the earlier rows of its own sequence, and its group's whole prompt, as far back as
    the window goes. The first ``common`` rows are of every prompt."""
    owner: list[tuple[int, int]] = [(-1, -1)] * common  # (group, completion), -1 for the prompt
    place: list[int] = [*range(common)]
    rows = [(g, -1, range(common, len(prompt))) for g, (prompt, _) in enumerate(groups)]
    for g, (prompt, completions) in enumerate(groups):
        rows += [(g, c, range(len(prompt), len(prompt) + len(ids) - 1)) for c, ids in enumerate(completions)]
    for g, c, places in rows if common else sorted(rows, key=lambda row: row[:2]):
        owner += [(g, c)] * len(places)
        place += places

    def sees(i: int, j: int) -> bool:
        own, other = owner[i], owner[j]
        return j <= i and other in (own, (own[0], -1), (-1, -1)) and place[i] - place[j] < window

    return torch.tensor([[sees(i, j) for j in range(len(owner))] for i in range(len(owner))])


@pytest.mark.parametrize(("query_block", "budget"), [(256, 262_144), (8, 600), (8, 1), (1, 40), (7, 10_000)])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 30])
@pytest.mark.parametrize(
    ("shapes", "common"),
    [
        (SHAPES, 0), (SHAPES, 2), (((12, (5, 1, 17)), (11, (8, 2)), (30, (1,)), (21, (26,))), 10),
        (((1, (1,)), (1, (2, 1)), (16, (9, 8, 17))), 0), (((17, ()), (8, ())), 0), (((17, ()), (8, ())), 7),
    ],
)  # fmt: skip
def test_blocks_cover_each_causal_pair_once(
    shapes: tuple[tuple[int, tuple[int, ...]], ...], common: int, query_block: int, budget: int, window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (blocked_attention, attention):
        monkeypatch.setattr(module, "QUERY_BLOCK", query_block)
        monkeypatch.setattr(module, "SCORE_BUDGET", budget)
    groups = random_groups(shapes, common=common)
    packed = pack(groups, common)
    expected = causal_pairs(groups, window or 10**6, common).long()
    assert torch.equal(counted_pairs(packed, window), expected)
    assert torch.equal(counted_pairs_in_two_parts(packed, window), expected)
    for block in plan_rectangles(packed.spans, window).blocks:
        assert block.queries <= query_block
        assert block.mask.shape[0] == block.queries
        assert block.sequences == 1 or block.sequences * block.mask.numel() <= budget
    plan = plan_blocks(packed.spans, len(packed.token_ids_R), window)
    for own in plan.own:
        assert own.queries <= query_block
        assert own.sequences == 1 or own.sequences * own.queries * own.keys <= budget
    assert all(part.count == 1 or part.count * rows_in(part.seen) <= budget for part in plan.shared)


@pytest.mark.parametrize("common", [0, 2])
def test_each_token_is_predicted_from_the_one_before_it(common: int) -> None:
    groups = random_groups(common=common)
    packed = pack(groups, common)
    sequences = [(prompt, completion) for prompt, completions in groups for completion in completions]
    expected_before, expected_positions, expected_sequence, expected_targets = [], [], [], []
    for n, (prompt, completion) in enumerate(sequences):
        expected_before += (prompt + completion)[len(prompt) - 1 : -1]
        expected_positions += range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        expected_sequence += [n] * len(completion)
        expected_targets += completion
    assert packed.targets_T.tolist() == expected_targets
    assert packed.token_ids_R[packed.predict_rows_T].tolist() == expected_before
    assert packed.positions_R[packed.predict_rows_T].tolist() == expected_positions
    assert packed.sequence_T.tolist() == expected_sequence
    assert packed.lengths_N.tolist() == [len(completion) for _, completion in sequences]
    assert packed.longest == max(len(prompt) + len(completion) - 1 for prompt, completion in sequences)


def test_a_prompt_lies_there_once_and_last_tokens_are_no_inputs() -> None:
    groups = random_groups()
    packed = pack(groups)
    rows, positions, last = [], [], []
    for prompt, completions in groups:
        rows += prompt
        positions += range(len(prompt))
        last.append(len(rows) - 1)
        for completion in completions:
            rows += completion[:-1]
            positions += range(len(prompt), len(prompt) + len(completion) - 1)
    assert packed.token_ids_R.tolist() == rows
    assert packed.positions_R.tolist() == positions
    assert packed.last_rows.tolist() == last


def test_what_prompts_begin_with_lies_there_once_and_each_prompt_keeps_a_token() -> None:
    groups = [([1, 2, 3, 4], [[7, 8], [9]]), ([1, 2], [[5, 6]]), ([1, 2, 4], [[5]])]
    assert beginning_to_share(groups) == 1, "all begin with two tokens, and one prompt has no more"
    packed = pack(groups, 1)
    assert packed.token_ids_R.tolist() == [1, 2, 3, 4, 2, 2, 4, 7, 5]
    assert packed.positions_R.tolist() == [0, 1, 2, 3, 1, 1, 2, 4, 2]
    assert packed.last_rows.tolist() == [3, 4, 6]
    with pytest.raises(AssertionError, match="one token of its own"):
        pack(groups, 2)
    with pytest.raises(AssertionError, match="begin with the same"):
        pack([([1, 2], [[7]]), ([2, 2], [[7]])], 1)


def test_a_beginning_is_shared_where_it_saves_a_fiftieth_of_the_rows() -> None:
    def groups(completion: int) -> Groups:
        return [([1, 2, last], [[5] * (completion + 1)]) for last in (3, 4)]

    assert beginning_to_share(groups(47)) == 2, "2 of 100 rows"
    assert beginning_to_share(groups(48)) == 0, "2 of 102 rows"
    assert beginning_to_share(groups(1)[:1]) == 0, "one prompt shares nothing"
    assert beginning_to_share([]) == 0
    assert beginning_to_share([([1, 2], [[5]]), ([3, 2], [[5]])]) == 0


def test_prompts_alone() -> None:
    packed = pack_prompts([[4, 5, 6], [7]])
    assert packed.token_ids_R.tolist() == [4, 5, 6, 7]
    assert packed.positions_R.tolist() == [0, 1, 2, 0]
    assert packed.last_rows.tolist() == [2, 3]
    assert len(packed.targets_T) == 0


@pytest.mark.parametrize("group", [([], [[1]]), ([1], [[2], []])])
def test_empty_sequences_are_refused(group: tuple[list[int], list[list[int]]]) -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        pack([group])

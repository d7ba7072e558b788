"""Micro-batches hold every completion once, keep to the budget, and keep groups together where they fit."""

from hypothesis import given
from hypothesis import strategies as st

from groupwise.batching import cut_batch

GROUPS = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=6)


def cost(sizes, parts):
    """A part computes its prompt once, and each of its completions."""
    return sum(sizes[part.group][0] + sum(sizes[part.group][1][member] for member in part.members) for part in parts)


@given(GROUPS, st.integers(1, 200))
def test_every_completion_is_in_one_micro_batch_in_order(sizes, budget):
    found = [(part.group, member) for parts in cut_batch(sizes, budget) for part in parts for member in part.members]
    assert found == [(group, member) for group, (_, lengths) in enumerate(sizes) for member in range(len(lengths))]


@given(GROUPS, st.integers(1, 200))
def test_the_budget_is_kept_but_for_single_completions_that_exceed_it(sizes, budget):
    for parts in cut_batch(sizes, budget):
        alone = len(parts) == 1 and len(parts[0].members) == 1
        assert cost(sizes, parts) <= budget or alone


@given(GROUPS, st.integers(1, 200))
def test_a_group_that_fits_is_not_cut(sizes, budget):
    cuts = cut_batch(sizes, budget)
    for group, (prompt, lengths) in enumerate(sizes):
        if prompt + sum(lengths) <= budget:
            assert sum(part.group == group for parts in cuts for part in parts) == 1


def test_a_roomy_budget_makes_one_micro_batch():
    assert len(cut_batch([(10, [5, 5]), (3, [2])], budget=25)) == 1
    assert len(cut_batch([(10, [5, 5]), (3, [2])], budget=24)) == 2

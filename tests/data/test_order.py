from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.data import order
from groupwise.data.order import problems_for_step

EXPECTED_ORDER = [4, 6, 2, 9, 7, 3, 0, 8, 1, 5]
COUNTS = st.integers(1, 60)
SIZES = st.integers(1, 40)


@settings(max_examples=300, deadline=None)
@given(COUNTS, SIZES, st.integers(0, 30), st.integers(0, 2**31), st.booleans())
def test_a_step_repeats_nothing_unless_it_must(count: int, size: int, step: int, seed: int, shuffle: bool) -> None:
    chosen = problems_for_step(count, size, step, seed, shuffle)
    assert len(chosen) == size
    assert all(0 <= index < count for index in chosen)
    if size <= count:
        assert len(set(chosen)) == size
    assert chosen == problems_for_step(count, size, step, seed, shuffle)


@settings(max_examples=200, deadline=None)
@given(COUNTS, SIZES, st.integers(0, 2**31), st.booleans())
def test_every_epoch_holds_every_problem_once(count: int, size: int, seed: int, shuffle: bool) -> None:
    epochs = 4
    steps = -(-epochs * count // size)
    sequence = [index for step in range(steps) for index in problems_for_step(count, size, step, seed, shuffle)]
    for epoch in range(epochs):
        assert sorted(sequence[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_step_across_the_end_of_an_epoch_repeats_nothing() -> None:
    for count, size in ((21, 10), (25, 10), (15, 10), (11, 10)):
        for seed in range(30):
            for step in range(count):
                assert len(set(problems_for_step(count, size, step, seed))) == size


def test_a_late_step_is_no_more_work_than_an_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in epochs that are shuffled: at most those since an epoch and a step last began together, which is every eighth here."""
    shuffled: list[tuple[int, ...]] = []
    permutation = order._permutation

    def shuffle(*words: int) -> tuple[int, ...]:
        shuffled.append(words)
        assert len(shuffled) <= 9
        return permutation(*words)

    monkeypatch.setattr(order, "_permutation", shuffle)
    assert sorted(problems_for_step(8, 8, 10**7, seed=0)) == list(range(8))
    assert len(shuffled) == 1
    for step in range(10**7, 10**7 + 9):
        shuffled.clear()
        assert len(set(problems_for_step(9, 8, step, seed=0))) == 8


def test_more_places_than_problems_shares_them_evenly() -> None:
    counts = Counter(problems_for_step(3, 8, 0, seed=1))
    assert sorted(counts.values()) == [2, 3, 3]


def test_order_depends_on_seed_and_epoch_and_not_on_anything_else() -> None:
    whole = problems_for_step(1000, 1000, 0, seed=0)
    assert whole != problems_for_step(1000, 1000, 0, seed=1)
    assert whole != problems_for_step(1000, 1000, 1, seed=0)
    assert whole == [i for step in range(10) for i in problems_for_step(1000, 100, step, seed=0)]


def test_the_order_of_today_is_the_order_of_tomorrow() -> None:
    # Numbers written down once: a change here would silently change every resumed run.
    assert problems_for_step(10, 10, 0, seed=7) == EXPECTED_ORDER


def test_positions_are_uniform() -> None:
    firsts = Counter(problems_for_step(5, 1, 0, seed=seed)[0] for seed in range(5000))
    assert all(850 < firsts[i] < 1150 for i in range(5))  # 5 sigma is 141


def test_file_order_without_shuffling() -> None:
    assert problems_for_step(5, 3, 0, seed=9, shuffle=False) == [0, 1, 2]
    assert problems_for_step(5, 3, 1, seed=9, shuffle=False) == [3, 4, 0]

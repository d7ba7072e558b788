"""pass@k, majority@k, clustered intervals and p-values: closed forms, plain enumeration, and simulation."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from groupwise.evaluation.figures import (
    clustered_interval,
    holm,
    majority_at_k,
    mcnemar_p_value,
    paired_interval,
    pass_at_k,
    sign_flip_p_value,
)
from groupwise.metrics import Max, Min, wilson_interval


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right in range(n + 1):
        samples = [i < right for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plain_formula_is_not():
    n, k, p = 10, 5, 0.15
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    plain = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert plain < 1 - (1 - p) ** k - 0.02


def test_pass_at_1_is_the_mean_and_large_numbers_do_not_overflow():
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_at_k(8, 6, 3) == 1.0
    assert 0 < pass_at_k(10_000, 3, 5_000) < 1
    with pytest.raises(AssertionError):
        pass_at_k(4, 1, 5)


def test_majority_by_hand():
    answers, right = ["7", "7", "8", "9", None], [True, True, False, False, False]
    assert majority_at_k(answers, right, 5) == 1.0
    assert majority_at_k(answers, right, 1) == 2 / 5
    # pairs: 77 right; 7 with 8, with 9 or twice: a tie, half; 7 with nothing: right; the rest wrong
    assert majority_at_k(answers, right, 2) == pytest.approx((1 + 4 * 0.5 + 2 * 1) / 10)
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["8", "8", "7"], [False, False, True], 3) == 0.0


def test_majority_does_not_depend_on_the_order_of_samples():
    answers, right = ["a", "b", "a", "c", "b", "d"], [False, True, False, False, True, False]
    for shift in range(6):
        turned = majority_at_k(answers[shift:] + answers[:shift], right[shift:] + right[:shift], 4)
        assert turned == pytest.approx(majority_at_k(answers, right, 4))


def test_many_subsets_are_drawn_and_come_close():
    answers, right = ["r"] * 12 + list("abcdefgh") + ["w"] * 10, [True] * 12 + [False] * 18
    exact = np.mean([majority_at_k([answers[i] for i in s], [right[i] for i in s], 3) for s in combinations(range(30), 3)])
    assert math.comb(30, 3) > 2000
    assert majority_at_k(answers, right, 3) == pytest.approx(exact, abs=0.03)
    assert majority_at_k(answers, right, 3) == majority_at_k(answers, right, 3)


@pytest.mark.parametrize(("right", "n"), [(0, 7), (3, 7), (7, 7), (81, 263)])
def test_with_one_sample_each_the_interval_is_wilsons(right, n):
    scores = [1.0] * right + [0.0] * (n - right)
    assert clustered_interval(scores) == pytest.approx(wilson_interval(right, n))
    assert clustered_interval(scores, samples=8) == pytest.approx(wilson_interval(right, n)), "samples that agree add nothing"


def test_samples_that_tell_problems_apart_are_worth_less_than_independent_ones():
    same = clustered_interval([0.5] * 40, samples=4)
    assert same == pytest.approx(wilson_interval(80, 160)), "no difference between problems: each sample counts"
    mixed = clustered_interval([0.25, 0.75] * 20, samples=4)
    split = clustered_interval([0.0, 1.0] * 20, samples=4)
    widths = [high - low for low, high in (same, mixed, split)]
    assert widths == sorted(widths)
    assert split == pytest.approx(wilson_interval(20, 40))


def test_the_clustered_interval_covers_and_the_naive_one_does_not():
    """Problems differ (chances drawn from Beta(0.5, 1.5), mean 1/4): 60 problems with 8 samples each."""
    draw = np.random.default_rng(1)
    held = naive = 0
    for _ in range(2000):
        scores = draw.binomial(8, draw.beta(0.5, 1.5, size=60)) / 8
        low, high = clustered_interval(scores.tolist(), 8)
        held += low <= 0.25 <= high
        low, high = wilson_interval(float(scores.sum() * 8), 480)
        naive += low <= 0.25 <= high
    assert 0.93 <= held / 2000 <= 0.97
    assert naive / 2000 < 0.80


@pytest.mark.parametrize(("broken", "fixed"), [(0, 0), (0, 3), (2, 2), (4, 9), (1, 60)])
def test_with_single_samples_the_permutation_test_is_mcnemars(broken, fixed):
    differences = [-1] * broken + [1] * fixed + [0] * 5
    assert sign_flip_p_value(differences) == pytest.approx(mcnemar_p_value(broken, fixed), rel=1e-9)


@pytest.mark.parametrize("differences", [[3, -1, 2], [1, 1, 1, 0, -2], [4, -4], [0, 0], [2, 5, -1, 3, 3, -2, 1]])
def test_the_permutation_test_counts_all_exchanges(differences):
    observed = abs(sum(differences))
    totals = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert sign_flip_p_value(differences) == pytest.approx(sum(t >= observed for t in totals) / len(totals))
    assert sign_flip_p_value([-d for d in differences]) == pytest.approx(sign_flip_p_value(differences))


def test_under_no_difference_p_values_are_not_too_small():
    draw = np.random.default_rng(2)
    p_values = []
    for _ in range(400):
        chance = draw.uniform(size=40)
        p_values.append(sign_flip_p_value((draw.binomial(4, chance) - draw.binomial(4, chance)).tolist()))
    assert np.mean(np.array(p_values) <= 0.05) <= 0.075


@pytest.mark.parametrize(("fixed", "broken", "n"), [(0, 0, 12), (9, 1, 40), (30, 0, 30)])
def test_the_paired_interval_is_bonett_and_prices(fixed, broken, n):
    up, down = (fixed + 1) / (n + 2), (broken + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    expected = (max(-1.0, up - down - half), min(1.0, up - down + half))
    assert paired_interval([1.0] * fixed + [-1.0] * broken + [0.0] * (n - fixed - broken)) == pytest.approx(expected)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_paired_interval_covers(samples):
    draw, held = np.random.default_rng(3), 0
    for _ in range(2000):
        chance = draw.beta(0.6, 1.0, size=30)
        better = chance + 0.3 * (1 - chance)
        differences = (draw.binomial(samples, better) - draw.binomial(samples, chance)) / samples
        low, high = paired_interval(differences.tolist())
        held += low <= 0.3 * (1 - 0.6 / 1.6) <= high
    assert 0.93 <= held / 2000 <= 0.995


@pytest.mark.parametrize("kind", [Max, Min])
def test_what_is_no_number_stays_so_in_either_order(kind):
    nan, one = kind(math.nan), kind(1.0)
    assert all(math.isnan(found.value) for found in (nan + one, one + nan, one + nan + one, nan + nan))
    assert (kind(2.0) + one).value == (one + kind(2.0)).value == {Max: 2.0, Min: 1.0}[kind]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5]) == [0.5]
    assert holm([]) == []

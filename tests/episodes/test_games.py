"""The game of quickstart-game: what it answers, what play is worth, and that its examples are games."""

import statistics

import pytest

from groupwise.episodes.games import COST, LARGEST, HigherOrLower, fewest_guesses, rows


def begun(secret):
    game = HigherOrLower()
    game.reset(str(secret))
    return game


def play(secret, choose):
    """Guesses and reward of a player that is told the numbers that are left."""
    game, total, guesses, done = begun(secret), 0.0, 0, False
    while not done:
        _, reward, done, _ = game.step(str(choose(game.low, game.high)))
        total, guesses = total + reward, guesses + 1
    return guesses, total


def test_halving_takes_the_fewest_guesses_and_earns_what_they_leave():
    played = [play(secret, lambda low, high: (low + high) // 2) for secret in range(1, LARGEST + 1)]
    assert statistics.fmean(guesses for guesses, _ in played) == fewest_guesses()
    assert all(total == pytest.approx(1 - COST * guesses) for guesses, total in played)
    assert max(guesses for guesses, _ in played) == 7
    one_by_one = statistics.fmean(play(secret, lambda low, high: low)[0] for secret in range(1, LARGEST + 1))
    assert one_by_one == (LARGEST + 1) / 2


@pytest.mark.parametrize("said", ["", "65", "0", "31", "32.5", "my guess is 40", "40 or 41", "-40", "9999999999"])
def test_what_is_no_number_that_is_left_costs_twice_and_tells_nothing(said):
    game = begun(50)
    assert game.step("31") == ("Higher: from 32 to 64.", -COST, False, {})
    assert game.step(said) == ("Say one number from 32 to 64.", -2 * COST, False, {})
    assert game.step("60") == ("Lower: from 32 to 59.", -COST, False, {})
    assert game.step(" 50\n") == ("Right.", 1 - COST, True, {})


def test_examples_are_games_that_take_any_number_that_is_left():
    made = list(rows(400))
    for row in made:
        game = begun(row["answer"])
        *before, last = [game.step(turn) for turn in row["script"]]
        assert last[2]
        assert all(reward == -COST and not done for _, reward, done, _ in before)
    mean = statistics.fmean(len(row["script"]) for row in made)
    harmonic = sum(1 / n for n in range(1, LARGEST + 1))
    by_chance = 2 * (1 + 1 / LARGEST) * harmonic - 3  # comparisons of a successful search in a random binary tree
    assert abs(mean - by_chance) < 0.3
    assert len({row["question"] for row in made}) == 400
    assert made == list(rows(400))

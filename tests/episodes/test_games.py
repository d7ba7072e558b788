"""The game of quickstart-game: what it answers, what play is worth, and that its examples are games."""

import math
import statistics
from functools import cache

import pytest

from groupwise.episodes.games import LARGEST, NAMED, HigherOrLower, fewest_guesses, guesses_lost, rows


def begun(secret):
    game = HigherOrLower()
    game.reset(str(secret))
    return game


def play(secret, choose):
    """Guesses and rewards of a player that is told the numbers that are left."""
    game, rewards, done = begun(secret), [], False
    while not done:
        _, reward, done, _ = game.step(str(choose(game.low, game.high)))
        rewards.append(reward)
    return rewards


def middle(low, high):
    return (low + high) // 2


@cache
def by_hand(numbers):
    """Guesses that the best play needs for each of so many numbers, added up: by trying every first guess."""
    return numbers + min((by_hand(i) + by_hand(numbers - 1 - i) for i in range(numbers)), default=0)


def test_halving_takes_the_fewest_guesses():
    played = [play(secret, middle) for secret in range(1, LARGEST + 1)]
    assert statistics.fmean(len(rewards) for rewards in played) == fewest_guesses() == by_hand(LARGEST) / LARGEST
    assert all(fewest_guesses(n) == pytest.approx(by_hand(n) / n) for n in range(1, LARGEST + 1))
    assert max(len(rewards) for rewards in played) == 7


def test_the_middle_loses_nothing_and_other_guesses_what_they_make_games_longer_on_average():
    assert all(sum(play(secret, middle)) == pytest.approx(1) for secret in range(1, LARGEST + 1))
    lowest = [play(secret, lambda low, high: low) for secret in range(1, LARGEST + 1)]
    for first in (1, 5, 17, 40, 64):  # this guess, then halving
        longer = []
        for secret in range(1, LARGEST + 1):
            said = iter([first])
            longer.append(play(secret, lambda low, high, said=said: next(said, middle(low, high))))
        mean = statistics.fmean(len(rewards) for rewards in longer)
        lost = [1 - sum(rewards) for rewards in longer]
        assert lost == [pytest.approx(mean - fewest_guesses())] * LARGEST, "whichever number it was"
    # All that is lost comes to what the games are longer, whatever was played.
    assert statistics.fmean(map(len, lowest)) - fewest_guesses() == pytest.approx(
        statistics.fmean(1 - sum(rewards) for rewards in lowest)
    )


@pytest.mark.parametrize("said", ["", "65", "0", "31", "32.5", "my guess is 40", "40 or 41", "-40", "9999999999"])
def test_what_is_no_number_that_is_left_loses_itself_and_tells_nothing(said):
    game = begun(50)
    assert game.step("31")[0] == "32 40 48 56 64"
    assert game.step(said) == ("32 40 48 56 64", -1, False, {})
    assert game.step("60")[0] == "32 39 46 52 59"
    assert game.step(" 50\n")[2]


@pytest.mark.parametrize("low", [1, 7, 30])
@pytest.mark.parametrize("numbers", [1, 2, 3, 4, 5, 6, 7, 20, 35])
def test_the_ends_and_the_middle_are_named(low, numbers):
    game = begun(low)
    game.low, game.high = low, low + numbers - 1
    named = [int(number) for number in game.step("none")[0].split()]
    assert named == sorted(set(named))
    assert len(named) == min(NAMED, numbers)
    assert (named[0], named[-1]) == (game.low, game.high)
    assert any(abs(number - (game.low + game.high) / 2) <= 0.5 for number in named)


def test_a_guess_is_paid_at_its_end_for_what_it_lost_and_for_no_luck():
    def turn(role, text, tokens):
        return {"role": role, "text": text, "tokens": tokens}

    game = [
        turn("assistant", "32", 3),
        turn("user", "33 41", 20),
        turn("assistant", "20", 3),
        turn("user", "", 20),
        turn("assistant", "50", 2),
    ]
    (paid,) = guesses_lost(["50"], turns=[game], answer=["50"])
    assert paid.unit == "tokens"
    assert paid.ends == [3, 26, 48]
    assert paid.rewards[:2] == pytest.approx([0, -1])
    assert -0.01 > paid.rewards[2] > -0.1, "found by luck, and near the middle of 33 to 64"
    assert math.isclose(
        paid.rewards[2],
        begun(51).step("50")[1] * 0 - 1 - (17 * fewest_guesses(17) + 14 * fewest_guesses(14)) / 32 + fewest_guesses(32),
    )


def test_examples_are_games_that_take_any_number_that_is_named():
    made = list(rows(400))
    taken = []
    for row in made:
        game = begun(row["answer"])
        for guess in row["script"]:
            named = [game.low] if game.low == game.high else [int(n) for n in game.step("none")[0].split()]
            taken.append((named.index(int(guess)), len(named)))
            done = game.step(guess)[2]
            assert done == (guess == row["script"][-1])
    of_five = [place for place, named in taken if named == NAMED]
    assert all(abs(of_five.count(place) / len(of_five) - 1 / NAMED) < 0.03 for place in range(NAMED))
    assert abs(statistics.fmean(len(row["script"]) for row in made) - 7.6) < 0.3
    assert len({row["question"] for row in made}) == 400
    assert made == list(rows(400))

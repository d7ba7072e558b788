"""How work is dealt: everything once, alike everywhere, and nobody much longer at it than the others."""

from hypothesis import given
from hypothesis import strategies as st

from groupwise.distributed import World, deal

costs = st.lists(st.floats(min_value=0, max_value=1e6), max_size=40)
hands = st.integers(min_value=1, max_value=9)


@given(costs, hands)
def test_every_piece_is_dealt_once_and_each_hand_is_in_order(costs, hands):
    dealt = deal(costs, hands)
    assert len(dealt) == hands
    assert sorted(index for hand in dealt for index in hand) == list(range(len(costs)))
    assert all(hand == sorted(hand) for hand in dealt)


@given(costs, hands)
def test_no_hand_holds_more_than_four_thirds_of_the_best_bounds(costs, hands):
    """Graham's bound, against a lower bound of the best: the mean, and the largest piece, and the two that must share a hand."""
    loads = [sum(costs[i] for i in hand) for hand in deal(costs, hands)]
    ordered = sorted(costs, reverse=True)
    shared = ordered[hands - 1] + ordered[hands] if len(ordered) > hands else 0.0
    best = max([sum(costs) / hands, shared, *ordered[:1]])
    assert max(loads) <= (4 / 3) * best * (1 + 1e-9) or max(loads) - min(loads) <= ordered[hands] * (1 + 1e-9)


def test_equal_pieces_make_equal_hands():
    assert sorted(map(len, deal([7.0] * 12, 4))) == [3, 3, 3, 3]
    assert deal([9, 1, 1, 1, 1, 1, 4], 2) == [[0], [1, 2, 3, 4, 5, 6]]


def test_a_world_of_one_takes_everything_in_order_whatever_it_costs():
    world = World()
    assert world.assigned([3, 9, 1]) == [0, 1, 2]
    assert world.all_gather_object("x") == ["x"]
    assert world.on_rank0(lambda: 5) == 5

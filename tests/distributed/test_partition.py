"""How work is divided: everything once, alike everywhere, and nobody much longer at it than the others."""

from hypothesis import given
from hypothesis import strategies as st

from groupwise.distributed import World, partition

costs = st.lists(st.floats(min_value=0, max_value=1e6), max_size=40)
parts = st.integers(min_value=1, max_value=9)


@given(costs, parts)
def test_every_piece_is_in_one_part_and_each_part_is_in_order(costs, parts):
    divided = partition(costs, parts)
    assert len(divided) == parts
    assert sorted(index for part in divided for index in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in divided)


@given(costs, parts)
def test_no_part_holds_more_than_four_thirds_of_the_best_bounds(costs, parts):
    """Graham's bound, against a lower bound of the best: the mean, and the largest piece, and the two that must share a part."""
    loads = [sum(costs[i] for i in part) for part in partition(costs, parts)]
    ordered = sorted(costs, reverse=True)
    shared = ordered[parts - 1] + ordered[parts] if len(ordered) > parts else 0.0
    best = max([sum(costs) / parts, shared, *ordered[:1]])
    assert max(loads) <= (4 / 3) * best * (1 + 1e-9) or max(loads) - min(loads) <= ordered[parts] * (1 + 1e-9)


def test_equal_pieces_make_equal_parts():
    assert sorted(map(len, partition([7.0] * 12, 4))) == [3, 3, 3, 3]
    assert partition([9, 1, 1, 1, 1, 1, 4], 2) == [[0], [1, 2, 3, 4, 5, 6]]


def test_a_world_of_one_takes_everything_in_order_whatever_it_costs():
    world = World()
    assert world.assigned([3, 9, 1]) == [0, 1, 2]
    assert world.all_gather_object("x") == ["x"]
    assert world.on_rank0(lambda: 5) == 5

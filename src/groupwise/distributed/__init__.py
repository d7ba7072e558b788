"""Several processes that train as one: who does what, what they tell each other, and what happens when one of them fails."""

from groupwise.distributed.open import is_first_process, join_world, open_world, together, told_once, world_size
from groupwise.distributed.sharding import Sharding
from groupwise.distributed.world import World, partition

__all__ = [
    "Sharding", "World", "is_first_process", "join_world", "open_world", "partition", "together", "told_once", "world_size",
]  # fmt: skip

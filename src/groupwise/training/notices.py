"""What goes on inside a process and belongs in the log, which the first process alone writes."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.distributed import World

__all__ = ["Notices"]


class Notices:
    """Sentences from whichever process: the first one's are said at once, the others' when all come together."""

    def __init__(self, world: World, say: Callable[[str], object]) -> None:
        self.world, self.say = world, say
        self._unsaid: list[str] = []

    def note(self, sentence: str) -> None:
        """Of this process alone."""
        if self.world.size > 1:
            sentence = f"process {self.world.rank} of {self.world.size}: {sentence}"
        if self.world.is_first:
            self.say(sentence)
        else:
            self._unsaid.append(sentence)

    def exchange(self) -> None:
        """For all at once: what the others have noted is said by the first process."""
        unsaid, self._unsaid = self._unsaid, []
        for sentence in (s for part in self.world.gather(unsaid) for s in part):
            if self.world.is_first:
                self.say(sentence)

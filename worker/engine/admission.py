"""Whether a sequence that waits may start, by the blocks that it and others are expected to need. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence as Running

from .blocks import BlockAllocator
from .expected import ExpectedOutput
from .sequence import Sequence


class Admission:
    """Compares what a sequence may need with what is free and promised to nobody.

    Args:
        running: the sequences with K/V, kept by the scheduler.
        max_running: how many of them there may be.
    """

    def __init__(self, blocks: BlockAllocator, running: Running[Sequence], max_running: int) -> None:
        self.expected = ExpectedOutput()
        self._blocks = blocks
        self._running = running
        self._max_running = max_running

    def fits(self, sequence: Sequence, hits: list[int], promised: int) -> bool:
        """Whether a waiting sequence, of which the cache has `hits`, may start now. One alone always may.

        Args:
            promised: free blocks that what runs is expected to take.
        """
        if not self._running:
            return True
        if len(self._running) >= self._max_running:
            return False
        return self._need(sequence, hits) <= self._blocks.num_free - promised

    def would_fit(self, sequence: Sequence, hits: list[int], promised: int, *, without: list[Sequence]) -> bool:
        """`fits`, if those `without` which it may run gave up their places."""
        others = len(self._running) - len(without)
        room = self._blocks.num_free - promised + sum(map(self._size, without))
        return not others or (others < self._max_running and self._need(sequence, hits) <= room)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence is expected to take beyond those that it has."""
        return self._size(sequence) - len(sequence.block_table)

    def _size(self, sequence: Sequence) -> int:
        """Blocks that a running sequence is expected to hold in the end."""
        return max(self._blocks.blocks_for(self.expected.tokens(sequence)), len(sequence.block_table))

    def _need(self, sequence: Sequence, hits: list[int]) -> int:
        """Free blocks that a waiting sequence is expected to take; of its `hits` those that nobody owns now."""
        owned = sum(not self._blocks.is_free(block) for block in hits)
        return self._blocks.blocks_for(self.expected.tokens(sequence)) - owned

"""All sequences of a worker, those that run and those that wait, each in order. Pure Python.

The order is lane (rt, std, batch), then age; long waits lead up the lanes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from ...shared.messages import LANES, Lane
from .sequence import Sequence

_RANK: dict[Lane, int] = {lane: rank for rank, lane in enumerate(LANES)}
_YIELDS = _RANK["batch"]  # sequences of this rank make room for those before them

_by_order = attrgetter("order")


def yields(running: Sequence, waiting: Sequence) -> bool:
    """Whether one that runs gives up its place to one that waits."""
    return running.order[0] == _YIELDS > waiting.order[0]


class Roster:
    """Who is here, and in what order they go.

    Args:
        ageing: steps of waiting after which a sequence goes up a lane.

    Attributes:
        running: those with K/V, in order.
        waiting: the others, in order.
    """

    def __init__(self, ageing: int) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._ageing = ageing
        self._by_rid: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def rids(self) -> list[str]:
        return list(self._by_rid)

    def get(self, rid: str) -> Sequence | None:
        return self._by_rid.get(rid)

    def add(self, sequence: Sequence) -> None:
        sequence.order = (_RANK[sequence.lane], sequence.arrival)
        self._by_rid[sequence.rid] = sequence
        insort(self.waiting, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        del self._by_rid[sequence.rid]
        (self.running if sequence.running else self.waiting).remove(sequence)
        sequence.running = False

    def start(self, sequence: Sequence) -> None:
        """One that waited runs from now on."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_by_order)
        sequence.running = True

    def send_back(self, sequence: Sequence) -> None:
        """One that ran waits again."""
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_by_order)
        sequence.running = False

    def age(self, sequences: Iterable[Sequence]) -> None:
        """Count a step of waiting for each; who has waited long goes up a lane."""
        moved = False
        for sequence in sequences:
            sequence.waited += 1
            if sequence.waited % self._ageing == 0 and sequence.order[0] > 0:
                sequence.order = (sequence.order[0] - 1, sequence.arrival)
                moved = True
        if moved:
            self.running.sort(key=_by_order)
            self.waiting.sort(key=_by_order)

    def check_integrity(self) -> None:
        """Assert that no sequence is lost."""
        for sequence in self.waiting:
            assert not sequence.block_table, "a waiting sequence owns blocks"
            assert not sequence.num_computed, "a waiting sequence has computed tokens"
        held = sorted(sequence.rid for sequence in (*self.waiting, *self.running))
        assert held == sorted(self._by_rid), "a sequence is lost, or stands in two places"

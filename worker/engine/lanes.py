"""The order in which sequences go: by lane, then by age; long waits lead up the lanes. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ...shared.messages import LANES, Lane
from .sequence import Sequence

_RANK: dict[Lane, int] = {lane: rank for rank, lane in enumerate(LANES)}
_YIELDS = _RANK["batch"]  # sequences of this rank make room for those before them

by_order = attrgetter("order")


def first_order(sequence: Sequence) -> tuple[int, int]:
    """The place of a sequence that has not waited yet; the lower goes first."""
    return _RANK[sequence.lane], sequence.arrival


def yields(running: Sequence, waiting: Sequence) -> bool:
    """Whether one that runs gives up its place to one that waits."""
    return running.order[0] == _YIELDS > waiting.order[0]


def age(sequences: Iterable[Sequence], ageing: int) -> bool:
    """Count a step of waiting for each; one that has waited `ageing` of them goes up a lane. Whether any has."""
    moved = False
    for sequence in sequences:
        sequence.waited += 1
        if sequence.waited % ageing == 0 and sequence.order[0] > 0:
            sequence.order = (sequence.order[0] - 1, sequence.arrival)
            moved = True
    return moved

"""Which node of a cluster has a key: hash slots, and the map of them that any node tells."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from redis.crc import key_slot

from .address import Node
from .connections import RefusedForNow

# Commands of no key: any node answers them.
_KEYLESS = frozenset({"TIME", "PING", "INFO", "SCRIPT LOAD", "CLUSTER SLOTS"})


@lru_cache(maxsize=4096)
def slot_of(key: str | bytes) -> int:
    """The hash slot of a key: of what stands in its braces, where it has some."""
    return key_slot(key.encode() if isinstance(key, str) else key)


def key_of(args: Sequence[Any]) -> str | bytes | None:
    """The first key of a command as redis-py gives it; None when it has none."""
    command = args[0]
    if command in _KEYLESS:
        return None
    if command in ("EVAL", "EVALSHA"):
        key = args[3]
    elif command == "XREAD":
        key = next(after for before, after in pairwise(args) if before in ("STREAMS", b"STREAMS"))
    else:
        key = args[1]
    assert isinstance(key, (str, bytes)), f"{command} is not known to take a key at its place"
    return key


class SlotMap:
    """Ranges of slots and the primaries that serve them, as `CLUSTER SLOTS` tells.

    Args:
        reply: `[first, last, [host, port, …], replicas…]` of each range; an empty host is the one that was asked.
    """

    def __init__(self, reply: Sequence[Sequence[Any]], asked: Node) -> None:
        ranges = sorted((first, last, _primary(primary, asked)) for first, last, primary, *_ in reply)
        self._first = [first for first, _, _ in ranges]
        self._last = [last for _, last, _ in ranges]
        self._nodes = [node for _, _, node in ranges]

    @property
    def primaries(self) -> list[Node]:
        """Each once, in order."""
        return sorted(set(self._nodes))

    def node(self, slot: int) -> Node:
        """Raises RefusedForNow where no node serves the slot."""
        place = bisect_right(self._first, slot) - 1
        if place < 0 or self._last[place] < slot:
            raise RefusedForNow(f"no node of the cluster serves slot {slot}")
        return self._nodes[place]


def _primary(told: Sequence[Any], asked: Node) -> Node:
    host, port = told[0] or b"", int(told[1])
    host = host.decode() if isinstance(host, bytes) else host
    return (asked[0] if host in ("", "?") else host), port

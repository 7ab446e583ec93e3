"""Hearing that a stream has moved, for a loop that has other things to do: a blocking read that stays in flight.

ask: XREAD BLOCK ─────────────────────────► Redis answers when something comes, or a second later with nothing
     step, step, step: one poll of the socket each, and no round trip

A command names keys of one slot, so in a cluster there is a read for each slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .clients import BLOCK_MS, Client, is_cluster, node_of
from .listening import readable
from .slots import slot_of


class StreamWatch:
    """Reads entries of many streams, on connections of its own.

    Args:
        client: of `clients.connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sharded = is_cluster(client)
        self._reads: dict[int, tuple[Any, Any]] = {}  # slot (0 for all) → pool and connection of the read in flight

    def news(self, after: Mapping[str, bytes], wait_s: float = 0.0) -> dict[str, bytes]:
        """The newest entry of each stream that moved; none when nothing came within `wait_s`.

        Args:
            after: stream → the entry behind which to read. A read that is in flight keeps those it began with, so that
                what is reported may be known already.
            wait_s: at most; also less, when a read came back with nothing.

        Raises:
            TRANSIENT: Redis is away; the next call reads anew.
        """
        moved: dict[str, bytes] = {}
        try:
            for slot, streams in self._by_slot(after).items():
                if slot not in self._reads:
                    self._ask(slot, {stream: after[stream] for stream in streams})
            waiting = {connection: slot for slot, (_, connection) in self._reads.items()}
            for connection in readable(list(waiting), wait_s):
                reply = connection.read_response()
                self._give_back(waiting[connection])
                moved |= {stream.decode(): entries[-1][0] for stream, entries in reply or ()}
        except BaseException:
            self.close()
            raise
        return moved

    def close(self) -> None:
        """Give up the reads in flight."""
        for slot, (_, connection) in list(self._reads.items()):
            connection.disconnect()
            self._give_back(slot)

    def _by_slot(self, streams: Iterable[str]) -> dict[int, list[str]]:
        if not self._sharded:
            return {0: list(streams)}
        groups: dict[int, list[str]] = {}
        for stream in streams:
            groups.setdefault(slot_of(stream), []).append(stream)
        return groups

    def _ask(self, slot: int, after: Mapping[str, bytes]) -> None:
        pool = node_of(self._client, next(iter(after))).connection_pool
        connection = pool.get_connection()
        self._reads[slot] = pool, connection
        connection.send_command("XREAD", "BLOCK", BLOCK_MS, "STREAMS", *after, *after.values())

    def _give_back(self, slot: int) -> None:
        pool, connection = self._reads.pop(slot)
        pool.release(connection)

"""Hearing that a stream has moved, for a loop that has other things to do: a blocking read that stays in flight.

ask: XREAD BLOCK ─────────────────────────► Redis answers when something comes, or a second later with nothing
     step, step, step: one poll of the socket each, and no round trip
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .clients import BLOCK_MS, Client


class StreamWatch:
    """Reads entries of many streams, on a connection of its own.

    Args:
        client: of `clients.connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection: Any = None  # while a read is in flight

    def news(self, after: Mapping[str, bytes], wait_s: float = 0.0) -> dict[str, bytes]:
        """The newest entry of each stream that moved; none when nothing came within `wait_s`.

        Args:
            after: stream → the entry behind which to read. A read that is in flight keeps those it began with, so that
                what is reported may be known already.
            wait_s: at most; also less, when a read came back with nothing.

        Raises:
            TRANSIENT: Redis is away; the next call reads anew.
        """
        try:
            connection = self._ask(after) if self._connection is None else self._connection
            if not connection.can_read(wait_s):
                return {}
            reply = connection.read_response()
        except BaseException:
            self.close()
            raise
        self._give_back()
        return {stream.decode(): entries[-1][0] for stream, entries in reply or ()}

    def close(self) -> None:
        """Give up the read in flight."""
        if self._connection is not None:
            self._connection.disconnect()
            self._give_back()

    def _ask(self, after: Mapping[str, bytes]) -> Any:
        self._connection = connection = self._client.connection_pool.get_connection()
        connection.send_command("XREAD", "BLOCK", BLOCK_MS, "STREAMS", *after, *after.values())
        return connection

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        self._client.connection_pool.release(connection)

"""Messages of Redis's channels, for a loop on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from .clients import Client

AT_ONCE = 1000  # messages that one call returns at most: a flood must not keep its loop from everything else


class Channels:
    """Subscriptions on a connection of their own. What is said while it is broken is lost, and `messages` has raised.

    Args:
        client: of `clients.connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection: Any = None
        self._early: deque[bytes] = deque()  # messages that came before a confirmation

    def subscribe(self, names: Collection[str]) -> None:
        """Hear these channels, too; returns when Redis has confirmed it.

        Raises:
            TRANSIENT: Redis is away, and no channel is subscribed any more.
        """
        self._change("SUBSCRIBE", names)

    def unsubscribe(self, names: Collection[str]) -> None:
        """Hear these no more. Raises as `subscribe`."""
        if self._connection is not None:
            self._change("UNSUBSCRIBE", names)

    def messages(self, wait_s: float) -> list[bytes]:
        """What was said since the last call; waits for the first message, `wait_s` at most.

        Raises:
            TRANSIENT: Redis is away, and no channel is subscribed any more.
        """
        assert self._connection is not None, "subscribe first: nobody would speak"
        heard = list(self._early)
        self._early.clear()
        try:
            while len(heard) < AT_ONCE and self._connection.can_read(0 if heard else wait_s):
                heard += self._receive()
        except BaseException:
            self.close()
            raise
        return heard

    def close(self) -> None:
        """Hear nothing more."""
        self._early.clear()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.disconnect()  # a subscribed one is of no use to anybody else
            self._client.connection_pool.release(connection)

    def _change(self, command: str, names: Collection[str]) -> None:
        try:
            if self._connection is None:
                self._connection = self._client.connection_pool.get_connection()
            self._connection.send_command(command, *names)
            kind, missing = command.lower().encode(), len(names)
            while missing:
                reply = self._connection.read_response()
                if reply[0] == b"message":
                    self._early.append(reply[2])
                missing -= reply[0] == kind
        except BaseException:
            self.close()
            raise

    def _receive(self) -> list[bytes]:
        kind, _, data = self._connection.read_response()
        return [data] if kind == b"message" else []

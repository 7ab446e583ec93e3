"""Messages of Redis's channels, for a loop on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import redis.exceptions

from .clients import Client, is_cluster, node_of
from .listening import readable

AT_ONCE = 1000  # messages that one call returns at most: a flood must not keep its loop from everything else


class Dialect:
    """How channels are spoken of: a cluster's are sharded, each heard at the node of its slot alone."""

    def __init__(self, sharded: bool) -> None:
        prefix = "S" if sharded else ""
        self.subscribe, self.unsubscribe = f"{prefix}SUBSCRIBE", f"{prefix}UNSUBSCRIBE"
        self.message = b"smessage" if sharded else b"message"
        self.taken_away = b"sunsubscribe" if sharded else b""
        self.sharded = sharded

    def commands(self, verb: str, names: Collection[str]) -> list[tuple[str, ...]]:
        """One for all names, or one for each where they may be of several slots."""
        return [(verb, name) for name in names] if self.sharded else [(verb, *names)]

    def heard(self, reply: Any) -> bytes | None:
        """What a message says; None for a confirmation.

        Raises:
            redis.exceptions.ConnectionError: the channel's slot went to another node.
        """
        if reply[0] == self.message:
            return bytes(reply[2])
        if reply[0] == self.taken_away:
            raise redis.exceptions.ConnectionError(f"the slot of {reply[1].decode()} went to another node")
        return None


class Channels:
    """Subscriptions on connections of their own. What is said while one is broken is lost, and `messages` has raised.

    Args:
        client: of `clients.connect`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._dialect = Dialect(is_cluster(client))
        self._connections: dict[Any, Any] = {}  # by the server's pool
        self._early: deque[bytes] = deque()  # messages that came before a confirmation

    def subscribe(self, names: Collection[str]) -> None:
        """Hear these channels, too; returns when Redis has confirmed it.

        Raises:
            TRANSIENT: Redis is away, and no channel is subscribed any more.
        """
        self._change(self._dialect.subscribe, names)

    def unsubscribe(self, names: Collection[str]) -> None:
        """Hear these no more. Raises as `subscribe`."""
        if self._connections:
            self._change(self._dialect.unsubscribe, names)

    def messages(self, wait_s: float) -> list[bytes]:
        """What was said since the last call; waits for the first message, `wait_s` at most.

        Raises:
            TRANSIENT: Redis is away, and no channel is subscribed any more.
        """
        assert self._connections, "subscribe first: nobody would speak"
        connections = list(self._connections.values())
        heard = list(self._early)
        self._early.clear()
        try:
            while len(heard) < AT_ONCE and (ready := readable(connections, 0 if heard else wait_s)):
                for connection in ready:
                    said = self._dialect.heard(connection.read_response())
                    heard += [said] if said is not None else []
        except BaseException:
            self.close()
            raise
        return heard

    def close(self) -> None:
        """Hear nothing more."""
        self._early.clear()
        for pool, connection in self._connections.items():
            connection.disconnect()  # a subscribed one is of no use to anybody else
            pool.release(connection)
        self._connections = {}

    def _change(self, verb: str, names: Collection[str]) -> None:
        try:
            for connection, group in self._by_server(names):
                for command in self._dialect.commands(verb, group):
                    connection.send_command(*command)
                self._confirm(connection, verb.lower().encode(), len(group))
        except BaseException:
            self.close()
            raise

    def _confirm(self, connection: Any, kind: bytes, missing: int) -> None:
        while missing:
            reply = connection.read_response()
            if reply[0] == kind:
                missing -= 1
            elif (said := self._dialect.heard(reply)) is not None:
                self._early.append(said)

    def _by_server(self, names: Collection[str]) -> Iterator[tuple[Any, list[str]]]:
        groups: dict[Any, list[str]] = {}
        for name in names:
            groups.setdefault(node_of(self._client, name).connection_pool, []).append(name)
        for pool, group in groups.items():
            if pool not in self._connections:
                self._connections[pool] = pool.get_connection()
            yield self._connections[pool], group

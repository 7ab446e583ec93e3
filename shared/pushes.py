"""What is published to one process: a connection of our own for each server that has a channel of it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from . import keys
from .channels import Dialect
from .clients import TRANSIENT, AsyncClient, is_cluster, node_of_async
from .failpoints import failpoint

log = logging.getLogger(__name__)


class Pushes:
    """Hears the channels of one reader.

    Args:
        name: the reader's, as at submit.
        heard: called with each message.
        connected: called when all channels are subscribed, at first and after each outage: what was said meanwhile
            was not heard.
    """

    def __init__(
        self,
        client: AsyncClient,
        shards: int,
        name: str,
        heard: Callable[[bytes], None],
        connected: Callable[[], None],
    ) -> None:
        self._client = client
        self._dialect = Dialect(is_cluster(client))
        self._shards = shards
        self._name = name
        self._heard = heard
        self._connected = connected

    async def listen(self) -> None:
        """Hear for ever."""
        pause = 0.05
        while True:
            try:
                async with self._subscribed() as connections:
                    self._connected()
                    pause = 0.05
                    await self._hear_all(connections)
            except TRANSIENT as e:
                log.warning("text pushes stopped, reading instead: %s", e)
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def _hear_all(self, connections: Sequence[Any]) -> None:
        """Hear each of them until one is broken: what it would say may be said at another node then."""
        if len(connections) == 1:
            return await self._hear_one(connections[0])
        tasks = [asyncio.create_task(self._hear_one(connection)) for connection in connections]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear_one(self, connection: Any) -> None:
        while True:
            said = self._dialect.heard(await connection.read_response(timeout=math.inf))
            if said is not None:
                self._heard(said)

    @asynccontextmanager
    async def _subscribed(self) -> AsyncIterator[list[Any]]:
        """Connections of our own that hear our channels. redis-py's PubSub starts a timer for each message."""
        connections: dict[Any, Any] = {}  # by the server's pool
        try:
            for pool, names in (await self._channels()).items():
                connections[pool] = connection = await pool.get_connection()
                failpoint("api.subscribe")
                for command in self._dialect.commands(self._dialect.subscribe, names):
                    await connection.send_command(*command)
                for _ in names:
                    await connection.read_response()
            yield list(connections.values())
        finally:
            for pool, connection in connections.items():
                await connection.disconnect(nowait=True)  # a subscribed one is of no use to anybody else
                await pool.release(connection)

    async def _channels(self) -> dict[Any, list[str]]:
        """The names of our channels, by the pool of the server that has them."""
        names: dict[Any, list[str]] = {}
        for shard in range(self._shards):
            name = keys.reader_channel(shard, self._name)
            names.setdefault((await node_of_async(self._client, name)).connection_pool, []).append(name)
        return names

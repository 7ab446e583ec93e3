"""`cluster.py` for asyncio."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.commands import AsyncCoreCommands

from .address import Address, Node
from .cluster import by_node, map_of
from .connections import async_node_pool
from .slots import SlotMap, key_of, slot_of

_Commands: Any = AsyncCoreCommands  # typed for a client of one server


class AsyncClusterClient(_Commands):  # type: ignore[misc]
    """As a `redis.asyncio.Redis`, for commands whose keys are of one slot; `mget` and `delete` take those of several.

    Args:
        connections: to each node, at most; further calls wait for one.
    """

    def __init__(self, address: Address, name: str, connections: int) -> None:
        self._address = address
        self._name = name
        self._connections = connections
        self._clients: dict[Node, redis.asyncio.Redis] = {}
        self._map: SlotMap | None = None  # None: to be read before the next command
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> AsyncClusterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients = {}

    async def locate(self) -> None:
        """Read the map, if there is none: `node_of` and `nodes` stand on it until the next await.

        Raises:
            redis.exceptions.ConnectionError: no node tells it.
        """
        async with self._asking:
            if self._map is None:
                self._map = await self._ask_for_map()

    def node_of(self, key: str | bytes) -> redis.asyncio.Redis:
        """The client of the node that has a key. Raises redis.exceptions.ConnectionError where none has its slot."""
        assert self._map is not None, "locate first"
        return self._client(self._map.node(slot_of(key)))

    def nodes(self) -> list[redis.asyncio.Redis]:
        """The clients of all primaries."""
        assert self._map is not None, "locate first"
        return [self._client(node) for node in self._map.primaries]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        await self.locate()
        key = key_of(args)
        client = self.nodes()[0] if key is None else self.node_of(key)
        return await client.execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = False) -> AsyncClusterPipeline:
        """Commands that are sent together to each node; no transaction spans nodes."""
        assert not transaction, "a transaction over several nodes there is not"
        return AsyncClusterPipeline(self)

    async def mget(self, keys: Iterable[str | bytes]) -> Any:
        pipe = self.pipeline()
        for key in keys:
            pipe.get(key)
        return await pipe.execute()

    async def delete(self, *names: str | bytes) -> Any:
        pipe = self.pipeline()
        for name in names:
            pipe.execute_command("DEL", name)
        return sum(await pipe.execute())

    def _client(self, node: Node) -> redis.asyncio.Redis:
        if node not in self._clients:
            pool = async_node_pool(self._address, node, self._name, self._connections, self._forget_map)
            self._clients[node] = redis.asyncio.Redis.from_pool(pool)
        return self._clients[node]

    def _forget_map(self) -> None:
        self._map = None

    async def _ask_for_map(self) -> SlotMap:
        nodes = list({*self._clients, *self._address.nodes})
        trouble: BaseException | None = None
        for node in random.sample(nodes, len(nodes)):
            pool = async_node_pool(self._address, node, self._name, 1, lambda: None)
            try:
                async with redis.asyncio.Redis.from_pool(pool) as client:
                    return SlotMap(await map_of(client), node)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as e:
                trouble = e
        raise redis.exceptions.ConnectionError(f"no node of the cluster answers: {trouble}") from trouble


class AsyncClusterPipeline(_Commands):  # type: ignore[misc]
    """Commands to several nodes, one message to each, all at once; the replies in the order of the commands."""

    def __init__(self, cluster: AsyncClusterClient) -> None:
        self._cluster = cluster
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **options: Any) -> AsyncClusterPipeline:
        self._commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send all.

        Raises:
            redis.exceptions.ConnectionError: a node does not answer; others may have.
        """
        commands, self._commands = self._commands, []
        await self._cluster.locate()
        groups = by_node(self._cluster, commands)
        pipes = [client.pipeline(transaction=False) for client, _ in groups]
        for pipe, (_, places) in zip(pipes, groups, strict=True):
            for place in places:
                args, options = commands[place]
                pipe.execute_command(*args, **options)
        replies: list[Any] = [None] * len(commands)
        results = await asyncio.gather(*(pipe.execute(raise_on_error) for pipe in pipes), return_exceptions=True)
        for (_, places), got in zip(groups, results, strict=True):
            if isinstance(got, BaseException):
                raise got
            for place, reply in zip(places, got, strict=True):
                replies[place] = reply
        return replies

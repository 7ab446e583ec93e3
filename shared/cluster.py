"""A client of a Redis Cluster: each command goes to the node that has its key's slot, and nothing is repeated.

redis-py's own client repeats commands, and follows ASK: while a slot moves, a script would run where only some of its
keys are, and tell a worker that its request is gone. Here MOVED and ASK are errors like a lost connection: whoever
called tries again, over a map that was read anew. A script's one declared key, its shard's prefix, never exists, so
as long as a slot moves every script in it is answered with ASK, and waits until all its keys are at one node.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import redis
import redis.exceptions
from redis.commands import CoreCommands

from .address import Address, Node
from .connections import node_pool
from .slots import SlotMap, key_of, slot_of

_Commands: Any = CoreCommands  # typed for a client of one server


class ClusterClient(_Commands):  # type: ignore[misc]
    """As a `redis.Redis`, for commands whose keys are of one slot; `mget` and `delete` take those of several."""

    def __init__(self, address: Address, name: str) -> None:
        self._address = address
        self._name = name
        self._clients: dict[Node, redis.Redis] = {}
        self._map: SlotMap | None = None  # None: to be read before the next command

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients = {}

    def node_of(self, key: str | bytes) -> redis.Redis:
        """The client of the node that has a key.

        Raises:
            redis.exceptions.ConnectionError: no node tells the map, or none has the slot.
        """
        return self._client(self._read_map().node(slot_of(key)))

    def nodes(self) -> list[redis.Redis]:
        """The clients of all primaries."""
        return [self._client(node) for node in self._read_map().primaries]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        key = key_of(args)
        client = self.nodes()[0] if key is None else self.node_of(key)
        return client.execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = False) -> ClusterPipeline:
        """Commands that are sent together to each node; no transaction spans nodes."""
        assert not transaction, "a transaction over several nodes there is not"
        return ClusterPipeline(self)

    def mget(self, keys: Iterable[str | bytes]) -> Any:
        pipe = self.pipeline()
        for key in keys:
            pipe.get(key)
        return pipe.execute()

    def delete(self, *names: str | bytes) -> Any:
        pipe = self.pipeline()
        for name in names:
            pipe.execute_command("DEL", name)
        return sum(pipe.execute())

    def _client(self, node: Node) -> redis.Redis:
        if node not in self._clients:
            pool = node_pool(self._address, node, self._name, self._forget_map)
            self._clients[node] = redis.Redis.from_pool(pool)
        return self._clients[node]

    def _forget_map(self) -> None:
        self._map = None

    def _read_map(self) -> SlotMap:
        if self._map is None:
            self._map = self._ask_for_map()
        return self._map

    def _ask_for_map(self) -> SlotMap:
        nodes = list({*self._clients, *self._address.nodes})
        trouble: BaseException | None = None
        for node in random.sample(nodes, len(nodes)):
            try:
                with redis.Redis.from_pool(node_pool(self._address, node, self._name, lambda: None)) as client:
                    return SlotMap(map_of(client), node)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as e:
                trouble = e
        raise redis.exceptions.ConnectionError(f"no node of the cluster answers: {trouble}") from trouble


class ClusterPipeline(_Commands):  # type: ignore[misc]
    """Commands to several nodes, one message to each; the replies in the order of the commands."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **options: Any) -> ClusterPipeline:
        self._commands.append((args, options))
        return self

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send all, node by node.

        Raises:
            redis.exceptions.ConnectionError: a node does not answer; others may have.
        """
        commands, self._commands = self._commands, []
        replies: list[Any] = [None] * len(commands)
        for client, places in by_node(self._cluster, commands):
            pipe = client.pipeline(transaction=False)
            for place in places:
                args, options = commands[place]
                pipe.execute_command(*args, **options)
            for place, reply in zip(places, pipe.execute(raise_on_error), strict=True):
                replies[place] = reply
        return replies


def map_of(client: Any) -> Any:
    """`CLUSTER SLOTS` of a client of either kind, as it comes."""
    client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
    return client.execute_command("CLUSTER SLOTS")


def by_node(cluster: Any, commands: Sequence[tuple[Any, ...]]) -> list[tuple[Any, list[int]]]:
    """The clients of the nodes that commands go to, and the places of each one's in the sequence.

    Args:
        cluster: has `node_of` and `nodes` of a map that is there.
        commands: (args, options) of each.
    """
    places: dict[int, tuple[Any, list[int]]] = {}
    for place, (args, _) in enumerate(commands):
        key = key_of(args)
        client = cluster.nodes()[0] if key is None else cluster.node_of(key)
        places.setdefault(id(client), (client, []))[1].append(place)
    return list(places.values())

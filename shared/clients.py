"""Clients of Redis, and what stands between them and the rest: no command is ever repeated by the library.

redis-py 8 repeats any command up to ten times, also one that ran and whose reply was lost. Here nothing is repeated
but the scripts, each of which may run twice and change nothing the second time. Two kinds of connection: for commands,
with a short limit, and for blocking reads (BLOCK at most a second), each its own.

What Redis may answer, and what is done about it:
    NOSCRIPT      scripts are gone (restart, SCRIPT FLUSH, a promoted replica): loaded again, the whole call repeated
    LOADING, READONLY, connection lost, timeout: the connection is dropped, the call repeated until its limit
    MISCONF (its disk is full), NOREPLICAS, BUSY (somebody's script), MASTERDOWN: the same
    UNBLOCKED     what a blocking read waited on was demoted to a replica: the same
    CLUSTERDOWN, MOVED, ASK, TRYAGAIN: the same, over a map of the cluster that was read anew
    NOGROUP       a stream without its group holds nothing of ours; the script that hands over makes it
    OOM           memory is full: `Overloaded` at submit; what ends, frees or says that we live goes on (`allow-oom`)
    NOPERM, WRONGPASS, NOAUTH: the user's rights are not those of deploy/users.acl: refused at start
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
import redis.asyncio
import redis.exceptions

from . import address
from .async_cluster import AsyncClusterClient
from .cluster import ClusterClient
from .connections import RefusedForNow as RefusedForNow
from .connections import async_pool, pool
from .errors import ConfigError, Overloaded, StoreUnavailable

BLOCK_MS = 1000  # the longest a blocking read waits; its socket timeout stands well above it

TRANSIENT = (
    redis.exceptions.ConnectionError,  # LOADING and RefusedForNow are some of these
    redis.exceptions.TimeoutError,
    OSError,
)
UNAVAILABLE = (*TRANSIENT, redis.exceptions.OutOfMemoryError)  # what a later try may find mended

# A command as a script, since only scripts may say that they write also when the memory is full.
_ALWAYS = "#!lua flags=allow-oom\nreturn redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))"

# redis-py types each reply as all that any option could make of it. What a reply is, is said where it is decoded.
Client: TypeAlias = Any  # a redis.Redis or ClusterClient of `connect`
AsyncClient: TypeAlias = Any  # a redis.asyncio.Redis or AsyncClusterClient of `connect_async`


def _address(url: str) -> address.Address:
    try:
        return address.parse(url)
    except ValueError as e:
        raise ConfigError(f"the Redis URL {e}, got {address.redacted(url)!r}") from e


def connect(url: str, name: str = "headrace") -> Client:
    """A client for commands and bounded blocking reads, in bytes; nothing is retried by the library.

    Args:
        url: see `address.py`.

    Raises:
        ConfigError: it is no such URL.
    """
    where = _address(url)
    return ClusterClient(where, name) if where.kind == "cluster" else redis.Redis.from_pool(pool(where, name))


def connect_async(url: str, name: str = "headrace", connections: int = 64) -> AsyncClient:
    """The same for asyncio. At most `connections` at once (to each node); further calls wait for one, 20 s at most."""
    where = _address(url)
    if where.kind == "cluster":
        return AsyncClusterClient(where, name, connections)
    return redis.asyncio.Redis.from_pool(async_pool(where, name, connections))


def is_cluster(client: Client | AsyncClient) -> bool:
    """Whether keys of several shards may lie at several nodes."""
    return isinstance(client, (ClusterClient, AsyncClusterClient))


def node_of(client: Client, key: str) -> Client:
    """The client of the node that has a key: where there is but one server, `client`. May raise TRANSIENT."""
    return client.node_of(key) if isinstance(client, ClusterClient) else client


async def node_of_async(client: AsyncClient, key: str) -> AsyncClient:
    """As `node_of`."""
    if not isinstance(client, AsyncClusterClient):
        return client
    await client.locate()
    return client.node_of(key)


def nodes(client: Client) -> list[Client]:
    """A client of each primary. May raise TRANSIENT."""
    return list(client.nodes()) if isinstance(client, ClusterClient) else [client]


async def nodes_async(client: AsyncClient) -> list[AsyncClient]:
    """As `nodes`."""
    if not isinstance(client, AsyncClusterClient):
        return [client]
    await client.locate()
    return list(client.nodes())


class Patience:
    """Waits between tries of one call, longer each time, until its limit. `limit_s` None waits as long as it takes."""

    def __init__(self, limit_s: float | None) -> None:
        self._until = None if limit_s is None else time.monotonic() + limit_s
        self._pause = 0.02

    def next_pause(self, error: BaseException) -> float:
        """Seconds to wait before the next try.

        Raises:
            StoreUnavailable: the limit is over.
        """
        if self._until is not None and time.monotonic() + self._pause > self._until:
            raise StoreUnavailable(f"Redis does not answer: {error}") from error
        pause, self._pause = self._pause, min(1.0, self._pause * 2)
        return pause

    def wait(self, error: BaseException) -> None:
        time.sleep(self.next_pause(error))

    async def wait_async(self, error: BaseException) -> None:
        await asyncio.sleep(self.next_pause(error))


@contextmanager
def starting() -> Iterator[None]:
    """What a role asks of Redis before it works. That Redis goes away meanwhile is a line of the log, and a new start.

    Raises:
        StoreUnavailable: it went away.
    """
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as e:
        raise StoreUnavailable(f"Redis went away: {e}") from e


def write_always(client: Any, command: str, key: str, *args: str | bytes | int) -> Any:
    """A command that writes one key, also when the memory is full: for what is small and keeps the deployment alive.

    `client` is one of these, of either kind, or a pipeline of one.
    """
    return client.eval(_ALWAYS, 1, key, command, *args)


def as_overloaded(error: BaseException) -> Overloaded | None:
    """What to tell a client when the store's memory is full; None for any other error."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Overloaded("The queue's memory is full; try again later.", retry_after_s=5, code="memory_full")
    return None

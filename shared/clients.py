"""Connections to Redis, and what stands between them and the rest: no command is ever repeated by the library.

redis-py 8 repeats any command up to ten times, also one that ran and whose reply was lost. Here nothing is repeated
but the scripts, each of which may run twice and change nothing the second time. Two kinds of connection: for commands,
with a short limit, and for blocking reads (BLOCK at most a second), each its own.

What Redis may answer, and what is done about it:
    NOSCRIPT      scripts are gone (restart, SCRIPT FLUSH): loaded again, the whole call repeated
    LOADING, READONLY, connection lost, timeout: the connection is dropped, the call repeated until its limit
    MISCONF (its disk is full), NOREPLICAS, BUSY (somebody's script), MASTERDOWN, CLUSTERDOWN: the same
    OOM           memory is full: `Overloaded` at submit; what ends, frees or says that we live goes on (`allow-oom`)
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.backoff
import redis.connection
import redis.exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.retry import Retry

from .errors import ConfigError, Overloaded, StoreUnavailable

COMMAND_TIMEOUT_S = 5.0
BLOCK_MS = 1000  # the longest a blocking read waits; its socket timeout stands well above it


class RefusedForNow(redis.exceptions.ConnectionError):
    """Redis answers, and takes no command or no write until somebody has mended it; as with LOADING, try again."""


# Both kinds of parser look an error's first word up here; redis-py would make plain errors of these.
_REFUSALS = dict.fromkeys(("MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN"), RefusedForNow)


class _Parser(redis.connection.DefaultParser):  # type: ignore[misc, valid-type]
    EXCEPTION_CLASSES = redis.connection.DefaultParser.EXCEPTION_CLASSES | _REFUSALS


class _AsyncParser(redis.asyncio.connection.DefaultParser):  # type: ignore[misc, valid-type]
    EXCEPTION_CLASSES = redis.asyncio.connection.DefaultParser.EXCEPTION_CLASSES | _REFUSALS


TRANSIENT = (
    redis.exceptions.ConnectionError,  # LOADING and RefusedForNow are some of these
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    OSError,
)
UNAVAILABLE = (*TRANSIENT, redis.exceptions.OutOfMemoryError)  # what a later try may find mended

# A command as a script, since only scripts may say that they write also when the memory is full.
_ALWAYS = "#!lua flags=allow-oom\nreturn redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))"

# redis-py types each reply as all that any option could make of it. What a reply is, is said where it is decoded.
Client: TypeAlias = Any  # a redis.Redis of `connect`
AsyncClient: TypeAlias = Any  # a redis.asyncio.Redis of `connect_async`


def _options(name: str) -> dict[str, Any]:
    return {"socket_timeout": COMMAND_TIMEOUT_S, "socket_connect_timeout": 2.0, "client_name": name, "protocol": 2}


def connect(url: str, name: str = "headrace") -> Client:
    """A client for commands and bounded blocking reads, in bytes; nothing is retried by the library."""
    try:
        return redis.Redis.from_url(
            url, retry=Retry(redis.backoff.NoBackoff(), 0), parser_class=_Parser, **_options(name)
        )
    except ValueError as e:
        raise ConfigError(f"--redis-url (HEADRACE_REDIS_URL): {e}, got {url!r}") from e


def connect_async(url: str, name: str = "headrace", connections: int = 64) -> AsyncClient:
    """The same for asyncio. At most `connections` at once; further calls wait for one, 20 s at most."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            retry=AsyncRetry(redis.backoff.NoBackoff(), 0),
            parser_class=_AsyncParser,
            **_options(name),
        )
    except ValueError as e:
        raise ConfigError(f"--redis-url (HEADRACE_REDIS_URL): {e}, got {url!r}") from e
    return redis.asyncio.Redis.from_pool(pool)


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

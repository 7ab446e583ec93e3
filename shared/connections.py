"""Pools of connections to one server, or to whichever server is the primary now; in bytes, and nothing is repeated.

What a server says that is no reply becomes an error here, and the connection is dropped with it: the next one is made
anew, which may be to another server (a name, a virtual address or the sentinels tell which).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.backoff
import redis.connection
import redis.exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.retry import Retry

from .address import Address, Node

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0


class RefusedForNow(redis.exceptions.ConnectionError):
    """Redis answers, and takes no command or no write until somebody has mended it; as with LOADING, try again."""


class SlotMoved(RefusedForNow):
    """MOVED: another node of the cluster has the slot; which, is asked before the next try."""


class SlotMoves(RefusedForNow):
    """ASK: the slot is on its way to another node. Not followed: a script would find only some of its keys there."""


# Both kinds of parser look an error's first word up here; redis-py would make plain errors of most of these.
_WORDS = ("READONLY", "MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "UNBLOCKED")
_REFUSALS = dict.fromkeys(_WORDS, RefusedForNow) | {"MOVED": SlotMoved, "ASK": SlotMoves}


class _Parser(redis.connection.DefaultParser):  # type: ignore[misc, valid-type]
    EXCEPTION_CLASSES = redis.connection.DefaultParser.EXCEPTION_CLASSES | _REFUSALS


class _AsyncParser(redis.asyncio.connection.DefaultParser):  # type: ignore[misc, valid-type]
    EXCEPTION_CLASSES = redis.asyncio.connection.DefaultParser.EXCEPTION_CLASSES | _REFUSALS


class _ToPrimary:
    """Mixed into a connection: asks each time it connects where the primary is, and the server whether it is one.

    The sentinels name the old primary until they have agreed on the new one. Should it be back by then, as a replica
    that has heard nothing yet, it would say of everything that it is not there.
    """

    def __init__(self, *, find: Callable[[], Node], **options: Any) -> None:
        super().__init__(**options)
        self._find = find

    def _connect(self) -> Any:
        self.host, self.port = self._find()
        return super()._connect()  # type: ignore[misc]

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)  # type: ignore[misc]
        self.send_command("HELLO", check_health=False)  # type: ignore[attr-defined]
        _check_primary(self.read_response(), self.host, self.port)  # type: ignore[attr-defined]


class _AsyncToPrimary:
    """As `_ToPrimary`."""

    def __init__(self, *, find: Callable[[], Awaitable[Node]], **options: Any) -> None:
        super().__init__(**options)
        self._find = find

    async def _connect(self) -> Any:
        self.host, self.port = await self._find()
        return await super()._connect()  # type: ignore[misc]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)  # type: ignore[misc]
        await self.send_command("HELLO", check_health=False)  # type: ignore[attr-defined]
        _check_primary(await self.read_response(), self.host, self.port)  # type: ignore[attr-defined]


def _check_primary(hello: Any, host: str, port: int) -> None:
    """HELLO, of a server that sentinels named: name and value, one after the other. Every user may say it."""
    if dict(zip(hello[::2], hello[1::2], strict=True))[b"role"] != b"master":
        raise RefusedForNow(f"{host}:{port} is not the primary, or not any more")


class _OfCluster:
    """Mixed into a connection: tells of its trouble, after which the map of the cluster is not to be trusted."""

    def __init__(self, *, on_trouble: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_trouble = on_trouble

    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[misc]
        except (redis.exceptions.RedisError, OSError):
            self._on_trouble()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
            self._on_trouble()
            raise


class _AsyncOfCluster:
    """As `_OfCluster`."""

    def __init__(self, *, on_trouble: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_trouble = on_trouble

    async def _connect(self) -> Any:
        try:
            return await super()._connect()  # type: ignore[misc]
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            self._on_trouble()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
            self._on_trouble()
            raise


# The pools say that they take the first of these only.
_PLAIN: Any = redis.connection.Connection
_TLS: Any = redis.connection.SSLConnection
_UNIX: Any = redis.connection.UnixDomainSocketConnection
_ASYNC_PLAIN: Any = redis.asyncio.connection.Connection
_ASYNC_TLS: Any = redis.asyncio.connection.SSLConnection
_ASYNC_UNIX: Any = redis.asyncio.connection.UnixDomainSocketConnection


def pool(address: Address, name: str) -> redis.ConnectionPool:
    """Connections to a server, or to the primary that sentinels name."""
    options: dict[str, Any] = _options(address, name, _Parser) | {"retry": Retry(redis.backoff.NoBackoff(), 0)}
    if address.path:
        return redis.ConnectionPool(connection_class=_UNIX, path=address.path, **options)
    plain = _PLAIN if address.tls is None else _TLS
    if address.kind == "sentinel":
        to_primary: Any = type("ToPrimary", (_ToPrimary, plain), {})
        return redis.ConnectionPool(connection_class=to_primary, find=lambda: find_primary(address), **options)
    host, port = address.nodes[0]
    return redis.ConnectionPool(connection_class=plain, host=host, port=port, **options)


def async_pool(address: Address, name: str, connections: int) -> redis.asyncio.BlockingConnectionPool:
    """The same for asyncio. At most `connections` at once; further calls wait for one, 20 s at most."""
    options: dict[str, Any] = _options(address, name, _AsyncParser)
    options["retry"] = AsyncRetry(redis.backoff.NoBackoff(), 0)
    options["max_connections"] = connections
    blocking = redis.asyncio.BlockingConnectionPool
    if address.path:
        return blocking(connection_class=_ASYNC_UNIX, path=address.path, **options)
    plain = _ASYNC_PLAIN if address.tls is None else _ASYNC_TLS
    if address.kind == "sentinel":
        to_primary: Any = type("AsyncToPrimary", (_AsyncToPrimary, plain), {})
        return blocking(connection_class=to_primary, find=lambda: find_primary_async(address), **options)
    host, port = address.nodes[0]
    return blocking(connection_class=plain, host=host, port=port, **options)


def node_pool(address: Address, node: Node, name: str, on_trouble: Callable[[], None]) -> redis.ConnectionPool:
    """Connections to one node of a cluster."""
    options: dict[str, Any] = _options(address, name, _Parser) | {"retry": Retry(redis.backoff.NoBackoff(), 0)}
    of_cluster = type("OfCluster", (_OfCluster, _PLAIN if address.tls is None else _TLS), {})
    host, port = node
    return redis.ConnectionPool(connection_class=of_cluster, host=host, port=port, on_trouble=on_trouble, **options)


def async_node_pool(
    address: Address, node: Node, name: str, connections: int, on_trouble: Callable[[], None]
) -> redis.asyncio.BlockingConnectionPool:
    """As `node_pool`."""
    options: dict[str, Any] = _options(address, name, _AsyncParser)
    options["retry"] = AsyncRetry(redis.backoff.NoBackoff(), 0)
    of_cluster = type("AsyncOfCluster", (_AsyncOfCluster, _ASYNC_PLAIN if address.tls is None else _ASYNC_TLS), {})
    host, port = node
    return redis.asyncio.BlockingConnectionPool(
        connection_class=of_cluster, host=host, port=port, on_trouble=on_trouble, max_connections=connections, **options
    )


def find_primary(address: Address) -> Node:
    """Ask the sentinels, in any order, until one knows the primary.

    Raises:
        redis.exceptions.ConnectionError: none answers, or none knows it.
    """
    trouble: BaseException | None = None
    for sentinel in random.sample(address.nodes, len(address.nodes)):
        try:
            with redis.Redis.from_pool(pool(_sentinel(address, sentinel), "headrace-find")) as client:
                reply = _ask(client, address)
        except (redis.exceptions.RedisError, OSError) as e:
            trouble = e
            continue
        if reply:
            return _node(reply)
    raise _not_found(address, trouble)


async def find_primary_async(address: Address) -> Node:
    """As `find_primary`."""
    trouble: BaseException | None = None
    for sentinel in random.sample(address.nodes, len(address.nodes)):
        try:
            async with redis.asyncio.Redis.from_pool(async_pool(_sentinel(address, sentinel), "find", 1)) as client:
                reply = await _ask(client, address)
        except (redis.exceptions.RedisError, OSError) as e:
            trouble = e
            continue
        if reply:
            return _node(reply)
    raise _not_found(address, trouble)


def _sentinel(address: Address, sentinel: Node) -> Address:
    return Address("server", (sentinel,), login=address.sentinel_login, tls=address.tls)


def _ask(sentinel: Any, address: Address) -> Any:
    return sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", address.service)


def _node(reply: Any) -> Node:
    host, port = reply
    return host.decode(), int(port)


def _not_found(address: Address, trouble: BaseException | None) -> redis.exceptions.ConnectionError:
    sentinels = ", ".join(f"{host}:{port}" for host, port in address.nodes)
    error = redis.exceptions.ConnectionError(
        f"no sentinel of {sentinels} knows a primary called {address.service!r}" + (f" ({trouble})" if trouble else "")
    )
    error.__cause__ = trouble
    return error


def _options(address: Address, name: str, parser: type[Any]) -> dict[str, Any]:
    limits = {"socket_timeout": COMMAND_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
    return (
        limits | {"client_name": name, "protocol": 2, "parser_class": parser} | {**address.login, **(address.tls or {})}
    )

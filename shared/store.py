"""What a process checks of Redis before it trusts it: version, eviction, memory, schema."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.exceptions

from . import keys
from .clients import TRANSIENT, Client, Patience, connect, is_cluster, nodes
from .errors import ConfigError, StoreRefused
from .settings import StoreSettings

FLOOR = {"redis": (7, 0), "valkey": (7, 2)}
ADMIT_BELOW = 0.8  # of the memory; above it the door closes, finishing and cleaning go on
TEXT_SHARE = 0.25  # of the memory, for finished text that somebody may still ask for

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """A Redis that was checked.

    Attributes:
        memory: bytes that it may use, of a cluster each node; 0 means that nothing bounds it (the operator said so).
        server: name and version.
    """

    shards: int
    memory: int
    server: str

    @property
    def text_budget(self) -> int:
        """Bytes of finished text that one shard keeps."""
        return int((self.memory or 4 << 30) * TEXT_SHARE / self.shards)


def open_store(settings: StoreSettings, wait_s: float = 10.0) -> Store:
    """Check the queue's Redis and join its schema, or found it.

    Raises:
        StoreRefused: too old, evicts, unbounded memory, another schema, no rights, or no such kind of server.
        StoreUnavailable: it does not answer within `wait_s`.
        ConfigError: the URL is no URL.
    """
    if not settings.redis_url:
        raise ConfigError("--redis-url (HEADRACE_REDIS_URL) is not set: name the Redis that all roles share")
    with connect(settings.redis_url) as client:
        return _patiently("--redis-url", wait_s, lambda: _check(client, settings))


def check_control(settings: StoreSettings, wait_s: float = 10.0) -> None:
    """Check the Redis of batches and files, where it is another than the queue's. Raises as `open_store`."""
    if settings.control_url == settings.redis_url:
        return
    with connect(settings.control_url) as client:
        _patiently("--control-redis-url", wait_s, lambda: _check_server(client, "--control-redis-url"))


def _patiently(flag: str, wait_s: float, check: Callable[[], T]) -> T:
    """Do the check; again while the server does not answer. What no waiting mends is refused at once."""
    patience = Patience(wait_s)
    while True:
        try:
            return check()
        except redis.exceptions.AuthenticationError as e:
            raise StoreRefused(f"{flag}: Redis refuses the user or password: {e}") from e
        except redis.exceptions.NoPermissionError as e:
            raise StoreRefused(f"{flag}: Redis does not let this user do what this role needs: {e}") from e
        except TRANSIENT as e:
            if certificate := _refused_certificate(e):
                raise StoreRefused(f"{flag}: the server's certificate is not accepted: {certificate}") from e
            patience.wait(e)


def _refused_certificate(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def _check(client: Client, settings: StoreSettings) -> Store:
    checked = [_check_server(node, "--redis-url", clustered=is_cluster(client)) for node in _nodes(client)]
    memories = [settings.redis_memory or memory for _, memory in checked]
    if 0 in memories:
        raise StoreRefused(
            "Redis has no maxmemory, so nothing tells when it is full. "
            "Set it (CONFIG SET maxmemory 2gb), or say what may be used with --redis-memory 2gb"
        )
    shards = max(keys.DEFAULT_SHARDS, keys.SHARDS_OF_NODE * len(checked)) if is_cluster(client) else keys.DEFAULT_SHARDS
    return Store(_join_schema(client, shards), min(memories), checked[0][0])


def _nodes(client: Client) -> list[Client]:
    try:
        return nodes(client)
    except redis.exceptions.NoPermissionError:
        raise
    except redis.exceptions.ResponseError as e:
        raise StoreRefused(f"--redis-url: redis+cluster:// names a server that is in no cluster ({e})") from e


def _check_server(client: Client, flag: str, *, clustered: bool = False) -> tuple[str, int]:
    """One server's name with version, and its maxmemory in bytes."""
    info: Mapping[str, Any] = client.info()
    server = _check_version(info)
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise StoreRefused(
            f"{flag}: Redis evicts keys (maxmemory-policy {policy}): requests would vanish. "
            "Set it to noeviction: CONFIG SET maxmemory-policy noeviction"
        )
    if info.get("cluster_enabled") and not clustered:
        raise StoreRefused(f"{flag}: this server is a node of a cluster; name the queue's as redis+cluster://")
    return server, int(info.get("maxmemory", 0))


def _check_version(info: Mapping[str, Any]) -> str:
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR[name]:
        floor = ".".join(map(str, FLOOR[name]))
        raise StoreRefused(f"{name} {version} is too old: {floor} is the oldest that has what headrace needs")
    return f"{name} {version}"


def _join_schema(client: Client, shards: int) -> int:
    """The number of shards, which the first process to come decides for good."""
    client.hsetnx(keys.SCHEMA, "major", str(keys.SCHEMA_MAJOR))
    client.hsetnx(keys.SCHEMA, "shards", str(shards))
    major, joined = client.hmget(keys.SCHEMA, ["major", "shards"])
    if int(major or 0) != keys.SCHEMA_MAJOR:
        raise StoreRefused(
            f"Redis holds schema {int(major or 0)}, this release speaks {keys.SCHEMA_MAJOR}: "
            "run roles of one release, or use another Redis or database"
        )
    return int(joined or 0)

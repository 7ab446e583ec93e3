"""What a process checks of Redis before it trusts it: version, eviction, memory, schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis.exceptions

from . import keys
from .clients import TRANSIENT, Client, Patience, connect
from .errors import ConfigError, StoreRefused
from .settings import StoreSettings

FLOOR = {"redis": (7, 0), "valkey": (7, 2)}
ADMIT_BELOW = 0.8  # of the memory; above it the door closes, finishing and cleaning go on
TEXT_SHARE = 0.25  # of the memory, for finished text that somebody may still ask for


@dataclass(frozen=True, slots=True)
class Store:
    """A Redis that was checked. `memory` is in bytes; 0 means that nothing bounds it (the operator said so)."""

    shards: int
    memory: int
    server: str  # name and version

    @property
    def text_budget(self) -> int:
        """Bytes of finished text that one shard keeps."""
        return int((self.memory or 4 << 30) * TEXT_SHARE / self.shards)


def open_store(settings: StoreSettings, wait_s: float = 10.0) -> Store:
    """Check the queue's Redis and join its schema, or found it.

    Raises:
        StoreRefused: too old, evicts, unbounded memory, or another schema.
        StoreUnavailable: it does not answer within `wait_s`.
        ConfigError: the URL is no URL.
    """
    if not settings.redis_url:
        raise ConfigError("--redis-url (HEADRACE_REDIS_URL) is not set: name the Redis that all roles share")
    patience = Patience(wait_s)
    with connect(settings.redis_url) as client:
        while True:
            try:
                return _check(client, settings)
            except redis.exceptions.AuthenticationError as e:
                raise StoreRefused(f"--redis-url: Redis refuses the user or password: {e}") from e
            except TRANSIENT as e:
                patience.wait(e)


def _check(client: Client, settings: StoreSettings) -> Store:
    info: Mapping[str, Any] = client.info()
    server = _check_version(info)
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise StoreRefused(
            f"Redis evicts keys (maxmemory-policy {policy}): requests would vanish. "
            "Set it to noeviction: CONFIG SET maxmemory-policy noeviction"
        )
    memory = settings.redis_memory or int(info.get("maxmemory", 0))
    if memory == 0:
        raise StoreRefused(
            "Redis has no maxmemory, so nothing tells when it is full. "
            "Set it (CONFIG SET maxmemory 2gb), or say what may be used with --redis-memory 2gb"
        )
    return Store(_join_schema(client), memory, server)


def _check_version(info: Mapping[str, Any]) -> str:
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR[name]:
        floor = ".".join(map(str, FLOOR[name]))
        raise StoreRefused(f"{name} {version} is too old: {floor} is the oldest that has what headrace needs")
    return f"{name} {version}"


def _join_schema(client: Client) -> int:
    """The number of shards, which the first process to come decides for good."""
    client.hsetnx(keys.SCHEMA, "major", str(keys.SCHEMA_MAJOR))
    client.hsetnx(keys.SCHEMA, "shards", str(keys.DEFAULT_SHARDS))
    major, shards = client.hmget(keys.SCHEMA, ["major", "shards"])
    if int(major or 0) != keys.SCHEMA_MAJOR:
        raise StoreRefused(
            f"Redis holds schema {int(major or 0)}, this release speaks {keys.SCHEMA_MAJOR}: "
            "run roles of one release, or use another Redis or database"
        )
    return int(shards or 0)

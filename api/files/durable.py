"""What a client was told is on the disk: Redis's append-only file is flushed before the answer."""

from __future__ import annotations

from typing import Literal

import redis.exceptions

from ...shared.clients import AsyncClient
from ...shared.errors import ConfigError, StoreUnavailable

MARK = "hr:file:flushed"
LIMIT_MS = 3000  # with `everysec` a flush is due within one second, and two on a busy disk

Durability = Literal["strict", "relaxed"]


class Flush:
    """Waits until what was written to Redis before is on its disk."""

    def __init__(self, redis_client: AsyncClient, waits: bool) -> None:
        self._redis = redis_client
        self._waits = waits

    @classmethod
    async def open(cls, redis_client: AsyncClient, durability: Durability) -> Flush:
        """Find out how this Redis can be waited for.

        Raises:
            ConfigError: `strict` is asked for, and it cannot.
        """
        try:
            await _wait(redis_client)
            return cls(redis_client, waits=True)
        except redis.exceptions.ResponseError as e:
            if durability == "relaxed" or await _flushes_always(redis_client):
                return cls(redis_client, waits=False)
            raise ConfigError(
                f"files and batches are to be on the disk before a client is answered, and this Redis cannot say so "
                f"({e}): set appendonly yes on Redis or Valkey 7.2 or newer, or appendfsync always, or accept the loss "
                "of the last seconds with --durability relaxed"
            ) from e

    async def wait(self) -> None:
        """Raises StoreUnavailable when the disk does not keep up, or the server that is the primary now has no file."""
        try:
            flushed = not self._waits or await _wait(self._redis)
        except redis.exceptions.ResponseError as e:
            raise StoreUnavailable(f"Redis cannot flush its append-only file: {e}") from e
        if not flushed:
            raise StoreUnavailable(f"Redis did not flush its append-only file within {LIMIT_MS} ms")


async def _wait(redis_client: AsyncClient) -> bool:
    # WAITAOF waits for the writes of its own connection, so it gets one of its own, behind all that came before.
    async with redis_client.pipeline(transaction=False) as pipe:
        pipe.set(MARK, "1")
        pipe.execute_command("WAITAOF", 1, 0, LIMIT_MS)
        _, (local, _) = await pipe.execute()
    return bool(local)


async def _flushes_always(redis_client: AsyncClient) -> bool:
    try:
        config = await redis_client.config_get("append*")
    except redis.exceptions.ResponseError:
        return False
    return bool(config.get("appendonly") == "yes" and config.get("appendfsync") == "always")

"""Changes of one Redis hash that are judged and written in one step: watched, read, judged, written, or judged anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import redis.exceptions
from redis.asyncio.client import Pipeline

from ..shared.clients import TRANSIENT, AsyncClient, Patience
from ..shared.failpoints import failpoint

T = TypeVar("T")
Fields = dict[bytes, bytes]


async def update(
    client: AsyncClient, key: str, change: Callable[[Pipeline, Fields, int], T], limit_s: float | None = 5.0
) -> T:
    """Apply `change` to the hash `key` in one transaction; again when somebody else was faster.

    Args:
        change: is given the transaction to put its commands on, the fields as they stand, and the time (ms of Redis's
            clock). It may run several times, also after its commands were executed and the reply was lost: then it
            must find that it has nothing left to do. Whatever it raises ends the update with nothing written.

    Returns:
        What `change` returned.

    Raises:
        StoreUnavailable: Redis did not answer within `limit_s`.
    """
    patience = Patience(limit_s)
    while True:
        try:
            async with client.pipeline(transaction=True) as pipe:
                await pipe.watch(key)
                fields = await pipe.hgetall(key)
                seconds, micros = await pipe.time()
                pipe.multi()
                result = change(pipe, fields, int(seconds) * 1000 + int(micros) // 1000)
                failpoint("watched.judged")
                await pipe.execute()
                failpoint("watched.written")
                return result
        except redis.exceptions.WatchError:
            continue
        except TRANSIENT as e:
            await patience.wait_async(e)

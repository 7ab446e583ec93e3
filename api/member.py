"""A replica among the processes of the deployment: its heartbeats, and the watch over its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..shared.clients import AsyncClient, connect, connect_async
from ..shared.failpoints import failpoint
from ..shared.health import Health, Progress
from ..shared.registry import Membership, ProcessInfo
from .errors import STORE_ERRORS
from .metrics import Metrics
from .settings import ApiSettings

log = logging.getLogger(__name__)


@asynccontextmanager
async def listed(settings: ApiSettings, info: ProcessInfo, metrics: Metrics) -> AsyncIterator[Membership]:
    """Be listed for the time of the block, as ready until it says otherwise."""
    client, membership = connect_async(settings.redis_url, "api-member", connections=2), Membership(info)
    membership.update("ready")
    progress = Progress(settings.lease_s)
    with Health(membership, lambda: connect(settings.redis_url, "api-health")) as health:
        health.watch(progress)
        tasks = [asyncio.create_task(_beat(membership, client, metrics)), asyncio.create_task(progress.tick())]
        try:
            yield membership
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await membership.leave_async(client)
            except STORE_ERRORS as e:
                log.info("this replica is listed until its heartbeat runs out: %s", e)
            await client.aclose()


async def _beat(membership: Membership, client: AsyncClient, metrics: Metrics) -> None:
    while True:
        membership.update(stats=metrics.stats())
        try:
            failpoint("api.beat")
            await membership.beat_async(client)
        except STORE_ERRORS as e:
            log.warning("this replica's heartbeat was not written: %s", e)
        await asyncio.sleep(Membership.BEAT_EVERY_S)

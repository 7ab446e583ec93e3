"""`headrace batch`: a process of drivers, and the sweep that finds batches which nobody drives.

main thread    heartbeat ─ sweep: batches whose lease is old, expired files ─ … until SIGTERM
drivers        RQ ─► one slice of one batch ─► RQ
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial

from ...shared import logs
from ...shared.clients import UNAVAILABLE, Client, connect
from ...shared.errors import StoreUnavailable
from ...shared.failpoints import failpoint
from ...shared.health import Health, Progress
from ...shared.registry import Membership, ProcessInfo
from ...shared.signals import StopSignal
from ...shared.store import Store, check_control, open_store
from ..services import load_template, open_services
from .answerer import QueueAnswerer
from .driver import BatchDriver
from .model import Batch
from .settings import BatchSettings
from .slices import enqueue_slice
from .stores import Stores, open_stores
from .worker import DriverThread

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 2.0
CLEAN_EVERY_S = 300.0
POLL_S = 0.1


def run(settings: BatchSettings) -> int:
    """Drive batches until SIGTERM: then each slice commits what it has and lets go. A second signal ends at once.

    Raises:
        ConfigError: a setting is wrong, or the data folder is not the deployment's.
        StoreUnavailable: Redis does not answer.
    """
    logs.setup("batch", settings.log_level, settings.log_json)
    stop = StopSignal()
    load_template(settings.chat_template)
    store = open_store(settings)
    check_control(settings)
    return asyncio.run(_run(settings, store, stop))


async def _run(settings: BatchSettings, store: Store, stop: StopSignal) -> int:
    membership = Membership(ProcessInfo("batch", extra={"drivers": settings.batch_drivers}))
    progress = Progress(settings.lease_s)
    async with open_stores(settings) as stores:
        drivers = _start_drivers(settings, store, stop)
        sweeper = asyncio.create_task(_sweep(stores))
        with (
            connect(settings.redis_url, "headrace-batch-member") as client,
            Health(membership, lambda: connect(settings.redis_url, "headrace-batch-health")) as health,
        ):
            health.serve(settings.health_host, settings.health_port)
            for loop in [progress, *(driver.progress for driver in drivers)]:
                health.watch(loop)
            membership.update("ready")
            log.info("driving up to %d batches at once", len(drivers))
            ticker = asyncio.create_task(progress.tick())
            while not stop.draining and not sweeper.done() and all(driver.is_alive() for driver in drivers):
                await _beat(membership, client, drivers)
            # One of them has died of a mistake of ours; whoever supervises starts us again.
            failed = not stop.draining
            await _end(sweeper)
            membership.update("draining")
            for driver in drivers:
                driver.stop()
            while not stop.immediate and any(driver.is_alive() for driver in drivers):
                await _beat(membership, client, drivers)
            ticker.cancel()
            _leave(membership, client)
    return 1 if failed else 0


def _start_drivers(settings: BatchSettings, store: Store, stop: StopSignal) -> list[DriverThread]:
    url = settings.control_url
    drivers = []
    for i in range(settings.batch_drivers):
        name = f"batch-{uuid.uuid4().hex[:8]}-{i}"
        drive = partial(_drive, settings, store, stop, name)
        drivers.append(DriverThread(name, connect(url, "headrace-rq"), drive, settings.batch_lease_s))
        drivers[-1].start()
    return drivers


async def _drive(settings: BatchSettings, store: Store, stop: StopSignal, name: str, batch_id: str) -> Batch | None:
    """One slice, with connections of its own: it runs on a loop of its own."""
    async with open_stores(settings) as stores, open_services(settings, store, name) as services:
        answerer = QueueAnswerer(services.inference)
        driver = BatchDriver(stores.batches, answerer, services.backend.models, settings, lambda: stop.draining)
        return await driver.drive(batch_id)


async def _sweep(stores: Stores) -> None:
    """For ever: have batches driven whose driver is gone, and remove what is over."""
    clean_at = 0.0
    while True:
        try:
            if time.monotonic() >= clean_at:
                clean_at = time.monotonic() + CLEAN_EVERY_S
                await asyncio.to_thread(stores.files.remove_leftovers)
                await stores.batches.remove_leftovers()
            failpoint("batch.sweep")
            for batch in await stores.batches.due():
                if await asyncio.to_thread(enqueue_slice, stores.rq, batch):
                    log.warning("%s was driven by nobody, and is enqueued again", batch.id)
            await stores.files.purge_expired()
        except (StoreUnavailable, *UNAVAILABLE) as e:
            log.warning("the sweep waits for Redis: %s", e)
        await asyncio.sleep(SWEEP_EVERY_S)


async def _end(sweeper: asyncio.Task[None]) -> None:
    sweeper.cancel()
    (died_of,) = await asyncio.gather(sweeper, return_exceptions=True)
    if not isinstance(died_of, asyncio.CancelledError):
        log.error("the sweep died", exc_info=died_of)


async def _beat(membership: Membership, client: Client, drivers: Sequence[DriverThread]) -> None:
    if membership.due():
        driving, slices = sum(driver.driving for driver in drivers), sum(driver.slices for driver in drivers)
        membership.update(stats={"driving": driving, "slices": slices})
        try:
            await asyncio.to_thread(membership.beat, client)
        except UNAVAILABLE as e:
            log.warning("this process's heartbeat was not written: %s", e)
    await asyncio.sleep(POLL_S)


def _leave(membership: Membership, client: Client) -> None:
    try:
        membership.leave(client)
    except UNAVAILABLE as e:
        log.info("this process is listed until its heartbeat runs out: %s", e)

"""The threads of a driver process: each an RQ worker that runs its slices in place, on an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import redis
import redis.exceptions
from rq import SimpleWorker
from rq.timeouts import TimerDeathPenalty

from ...shared.clients import TRANSIENT
from .model import Batch
from .slices import enqueue_slice, slice_queue

log = logging.getLogger(__name__)

Drive = Callable[[str], Awaitable[Batch | None]]

_thread: ContextVar[DriverThread] = ContextVar("driver thread")


class _SliceWorker(SimpleWorker):
    """Runs jobs in this thread. Signals and the process's title belong to the main thread."""

    death_penalty_class = TimerDeathPenalty  # without a limit it does nothing; the other one uses SIGALRM
    max_connection_wait_time = 2.0

    def _install_signal_handlers(self) -> None:
        pass

    def procline(self, message: str) -> None:
        pass

    def stop(self) -> None:
        """Take no further job; RQ looks at this between its reads."""
        self._stop_requested = True


class DriverThread(threading.Thread):
    """One of a process's drivers.

    Args:
        connection: of this thread alone, to RQ's Redis.
        drive: drives a batch for one slice; called in this thread's loop.
    """

    WORKER_TTL_S = 17  # RQ reads for 15 s less, so a stop is heard within two seconds

    def __init__(self, name: str, connection: redis.Redis, drive: Drive) -> None:
        super().__init__(name=name, daemon=True)
        self._connection = connection
        self._drive = drive
        self._stopping = threading.Event()
        self._worker: _SliceWorker | None = None

    def stop(self) -> None:
        """Take no further slice; the one that runs ends by itself."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    def run(self) -> None:
        _thread.set(self)
        while not self._stopping.is_set():
            try:
                self._work()
            except TRANSIENT as e:
                log.warning("the batch queue does not answer: %s", e)
                time.sleep(1.0)

    def _work(self) -> None:
        queue = slice_queue(self._connection)
        self._worker = _SliceWorker(
            [queue],
            name=self.name,
            connection=self._connection,
            serializer=queue.serializer,
            default_worker_ttl=self.WORKER_TTL_S,
        )
        if not self._stopping.is_set():
            self._worker.work(logging_level="WARNING", with_scheduler=False)

    def drive(self, batch_id: str) -> None:
        """One slice; a batch that has not ended is enqueued again, behind those that wait."""
        batch = asyncio.run(_await(self._drive(batch_id)))
        if batch is not None and not batch.ended:
            enqueue_slice(self._connection, batch)


def drive_slice(batch_id: str) -> None:
    """The RQ job."""
    _thread.get().drive(batch_id)


async def _await(work: Awaitable[Batch | None]) -> Batch | None:
    return await work

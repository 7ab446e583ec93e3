"""The threads of a driver process: each an RQ worker that runs its slices in place, on an event loop of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from rq import Queue, SimpleWorker
from rq.exceptions import InvalidJobOperation, NoSuchJobError, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty

from ...shared.clients import UNAVAILABLE, Client
from ...shared.errors import StoreUnavailable
from ...shared.failpoints import failpoint
from ...shared.health import Progress
from .model import Batch
from .slices import QUEUE, enqueue_slice

log = logging.getLogger(__name__)

Drive = Callable[[str], Coroutine[Any, Any, Batch | None]]

RETRY_S = 1.0

# What RQ cannot write down: its Redis does not do its part, or has lost the job meanwhile.
UNWRITTEN = (*UNAVAILABLE, InvalidJobOperation, NoSuchJobError)

_thread: ContextVar[DriverThread] = ContextVar("driver thread")


class _SliceQueue(Queue):
    """Ends its worker's loop on a stop: RQ itself would read on until a job comes, for it is told by a signal."""

    @classmethod
    def dequeue_any(cls, *args: Any, **kwargs: Any) -> Any:
        if _thread.get().stopping:
            raise StopRequested
        return super().dequeue_any(*args, **kwargs)


class _Brief(logging.Filter):
    """That Redis is away takes a line of the log, not RQ's page for each of its workers."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(error := record.exc_info[1], UNWRITTEN):
            record.msg, record.args, record.exc_info = f"{record.getMessage()} {error}", None, None
        return True


logging.getLogger("rq.worker").addFilter(_Brief())


class _SliceWorker(SimpleWorker):
    """Runs jobs in this thread. Signals, the process's title and remote commands are not RQ's here."""

    queue_class = _SliceQueue
    death_penalty_class = TimerDeathPenalty  # without a limit it does nothing; the default uses SIGALRM
    max_connection_wait_time = 2.0

    def _install_signal_handlers(self) -> None:
        """Only the main thread may."""

    def heartbeat(self, *args: Any, **kwargs: Any) -> None:
        """Bare, the first thing of each turn: RQ would wait for its Redis for ever, told to stop or not."""
        if not args and not kwargs and _thread.get().stopping:
            raise StopRequested
        super().heartbeat(*args, **kwargs)

    def procline(self, message: str) -> None:
        """The title says the role."""

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """What RQ could not write down itself is no mistake of ours: one line says it."""
        error = exc_info[1]
        if isinstance(error, UNWRITTEN):
            log.warning("RQ's Redis does not do its part, and the slice %s was not ended there: %s", job.id, error)
        else:
            super().handle_exception(job, *exc_info)

    def subscribe(self) -> None:
        """No further thread to listen for commands to a process that forks."""


class DriverThread(threading.Thread):
    """One of a process's drivers.

    Args:
        connection: to RQ's Redis; this thread's alone.
        drive: drives a batch for one slice.
        lease_s: of a batch.
    """

    WORKER_TTL_S = 16  # RQ reads for 15 s less at a time, so a stop is heard within one

    def __init__(self, name: str, connection: Client, drive: Drive, lease_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._connection = connection
        self._drive = drive
        self._stopping = threading.Event()
        self.driving = False
        self.slices = 0  # driven since the start
        self.progress = Progress(lease_s, lambda: self.driving)

    def stop(self) -> None:
        """Take no further slice; the one that runs ends by itself."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def run(self) -> None:
        """Work until `stop`. RQ's loop ends on any trouble with Redis, and is begun again."""
        _thread.set(self)
        self.progress.thread = threading.get_ident()
        while not self.stopping:
            try:
                self._work()
            except UNWRITTEN as e:
                log.warning("RQ's Redis does not do its part, trying again: %s", e)
            self._stopping.wait(RETRY_S)

    def _work(self) -> None:
        # A new name each time: RQ refuses that of a worker whose death it could not write down.
        name = f"{self.name}-{uuid.uuid4().hex[:8]}"
        worker = _SliceWorker(
            [QUEUE], name=name, connection=self._connection, serializer=JSONSerializer, worker_ttl=self.WORKER_TTL_S
        )
        worker.work(logging_level="WARNING")

    def drive(self, batch_id: str) -> None:
        """One slice; a batch that has not ended is enqueued again, behind those that wait.

        One that Redis's absence cut short is over: the sweep finds the batch when its lease has run out.
        """
        self.progress.turn()
        self.driving = True
        try:
            batch = asyncio.run(self._ticking(batch_id))
            if batch is not None and not batch.ended:
                failpoint("batch.enqueue")
                enqueue_slice(self._connection, batch)
        except (StoreUnavailable, *UNAVAILABLE) as e:
            log.warning("%s is left to the sweep, for Redis does not do its part: %s", batch_id, e)
        finally:
            self.driving = False
            self.slices += 1

    async def _ticking(self, batch_id: str) -> Batch | None:
        """Drive it on a loop that says that it turns."""
        ticker = asyncio.create_task(self.progress.tick())
        try:
            return await self._drive(batch_id)
        finally:
            ticker.cancel()


def drive_slice(batch_id: str) -> None:
    """The RQ job."""
    _thread.get().drive(batch_id)

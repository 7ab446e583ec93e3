"""Driving one batch for one slice: validate, answer lines, finalize. Any driver goes on where another stopped.

What is durable: the batch's hash, its input under its own name, and the committed segments. The rest is found again:
a line's request id follows from batch and line, so lines that are in the queue are followed, not sent twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...shared.errors import Fenced, NotFound
from ...shared.failpoints import failpoint
from ...shared.model_card import ModelCard
from ..files.model import FileObject
from .finalize import write_files
from .lease import BatchLease
from .model import Batch, LineError
from .results import Segment, damaged, write_segment
from .settings import BatchSettings
from .store import BatchStore
from .validate import Validation, request_lines, validate
from .window import SEGMENT_LINES, Answerer, Window

log = logging.getLogger(__name__)

TICK_S = 1.0  # results are committed, and a cancellation is noticed, within this time
LATE_S = 60.0  # by which a line's own deadline lies behind its batch's: the batch's decides

T = TypeVar("T")


class Models(Protocol):
    """The model registry, as the driver reads it."""

    async def all(self) -> dict[str, ModelCard]: ...


class BatchDriver:
    """Drives batches, one slice of one batch at a time.

    Args:
        draining: whether this process is asked to stop; a slice then ends within a tick.
    """

    def __init__(
        self,
        store: BatchStore,
        answerer: Answerer,
        models: Models,
        settings: BatchSettings,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._files = store.files
        self._answerer = answerer
        self._models = models
        self._settings = settings
        self._draining = draining

    async def drive(self, batch_id: str) -> Batch | None:
        """Drive a batch for one slice.

        Returns:
            The batch as it stands, to be enqueued again unless it has ended; None when it was not ours to drive, or is
            not there any more: a store that lost its tail may have lost the batch, and have kept RQ's word of it.
        """
        try:
            lease = await BatchLease.take(self._store, batch_id, secrets.token_hex(16), self._settings.batch_lease_s)
            if lease is None:
                return None
            failpoint("batch.taken")
            await self._advance_or_lose(lease)
            return lease.batch if lease.batch.ended else await lease.release()
        except (Fenced, NotFound) as e:
            log.warning("%s", e)
            return None

    async def _advance_or_lose(self, lease: BatchLease) -> None:
        try:
            await self._advance(lease)
        except FileNotFoundError as e:
            if self._input(lease.batch).exists():
                raise
            log.error("%s: the disk lost its input: %s", lease.batch.id, e)
            await lease.lose(LineError("input_file_lost", "The batch's input is no longer on the server's disk."))

    def _input(self, batch: Batch) -> Path:
        return self._files.batch_folder(batch.id) / "input.jsonl"

    async def _advance(self, lease: BatchLease) -> None:
        if not lease.batch.total:
            await self._validate(lease)
        if lease.batch.status == "in_progress":
            await self._answer_lines(lease)
        if lease.batch.status in ("finalizing", "cancelling"):
            await self._finalize(lease)
        if lease.batch.ended:
            log.info("%s is %s", lease.batch.id, lease.batch.status)
            # Its folder stays for a while: a primary that had not heard of the end has it ended again.
            with suppress(FileNotFoundError):
                os.utime(self._files.batch_folder(lease.batch.id))

    async def _validate(self, lease: BatchLease) -> None:
        batch = lease.batch
        path = self._input(batch)
        models = frozenset(await self._models.all())

        def check() -> Validation:
            with path.open("rb") as stream:
                return validate(stream, batch.endpoint, models, self._settings.max_batch_lines)

        found = await _holding(lease, asyncio.to_thread(check))
        failpoint("batch.validated")
        if found.errors:
            await lease.fail(found.errors)
        else:
            await lease.start(found.total, next(iter(found.models)) if len(found.models) == 1 else None)

    async def _answer_lines(self, lease: BatchLease) -> None:
        batch = lease.batch
        done = {number for segment in await self._sound_segments(lease) for number in segment.lines}
        with self._input(batch).open("rb") as stream:
            lines = request_lines(stream, skip=done)
            window = Window(batch, lines, self._answerer, self._settings.batch_window)
            try:
                await self._run(lease, window)
            finally:
                await window.close(abandon=lease.batch.status != "in_progress")

    async def _run(self, lease: BatchLease, window: Window) -> None:
        """Answer lines until the slice, the batch or its time is over."""
        slice_ends = time.monotonic() + self._settings.batch_slice_s
        segment_numbers = count()
        await self._settle(lease)
        while lease.batch.status == "in_progress":
            if not await self._answer_for_a_tick(lease, window):
                log.warning("%s: the store lost results of this slice; they are made again", lease.batch.id)
                return
            await self._save(lease, window, f"{lease.batch.epoch:06}-{next(segment_numbers):06}.seg")
            await self._settle(lease)
            if self._draining() or time.monotonic() >= slice_ends:
                return

    async def _settle(self, lease: BatchLease) -> None:
        """See whether lines are left, and time for them."""
        if lease.batch.unanswered == 0:
            await lease.finalize("completed")
        elif lease.now_s >= lease.batch.expires_at:
            await lease.finalize("expired")

    async def _answer_for_a_tick(self, lease: BatchLease, window: Window) -> bool:
        """Keep the window filled until the tick is over, or a segment is full. False when no line is left, though the
        batch has some that are not answered: they were, and the next slice sees which."""
        deadline_s = lease.batch.expires_at - lease.now_s + LATE_S
        tick_ends = time.monotonic() + TICK_S
        window.fill(deadline_s)
        if not window.running and not window.finished:
            assert window.begun, f"{lease.batch.id}: its input has fewer lines than were counted"
            return False
        while window.running and len(window.finished) < SEGMENT_LINES and time.monotonic() < tick_ends:
            await window.wait(TICK_S / 4)
            window.fill(deadline_s)
        return True

    async def _save(self, lease: BatchLease, window: Window, name: str) -> None:
        """Make the window's results durable; without any, hold on to the batch."""
        results = window.take()
        if not results:
            await lease.renew()
            return
        folder = self._files.batch_folder(lease.batch.id)
        segment = await _holding(lease, asyncio.to_thread(write_segment, folder, name, lease.batch.id, results))
        failpoint("batch.written")
        await lease.commit(segment)
        failpoint("batch.committed")

    async def _sound_segments(self, lease: BatchLease) -> list[Segment]:
        """The committed segments; those that the disk lost are taken back, and their lines answered again."""
        segments = await lease.segments()
        lost = await asyncio.to_thread(damaged, self._files.batch_folder(lease.batch.id), segments)
        for segment in lost:
            log.error("%s: the disk lost segment %s of %d lines", lease.batch.id, segment.name, len(segment.lines))
            await lease.discard(segment)
        return [segment for segment in segments if segment not in lost]

    async def _finalize(self, lease: BatchLease) -> None:
        segments = await lease.segments()
        output, errors = await _holding(lease, write_files(self._files, lease.batch, segments))
        placed = [file for file in (output, errors) if file is not None]
        failpoint("batch.placed")
        try:
            ended = (await lease.publish(output, errors)).ended
        except Fenced:
            self._remove(placed)
            raise
        if not ended:
            log.warning("%s: the store lost results; they are made again", lease.batch.id)
            self._remove(placed)
        failpoint("batch.published")

    def _remove(self, files: Iterable[FileObject]) -> None:
        for file in files:
            self._files.path(file.id).unlink(missing_ok=True)


async def _holding(lease: BatchLease, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that may take long, renewing the lease meanwhile."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=lease.renew_every_s)
            if not task.done():
                await lease.renew()
        return task.result()
    finally:
        if not task.done():  # the batch is not ours any more
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

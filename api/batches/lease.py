"""A driver's hold on one batch: every change is fenced by owner and epoch, and says what the batch is now.

A driver that was paused while another took over learns of it at its next change, which does not happen: `Fenced`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Iterable
from typing import TypeVar, cast

from redis.asyncio.client import Pipeline

from ...shared.errors import Fenced
from ..files.model import FileObject
from ..paging import text
from .model import Batch, LineError, Outcome
from .results import Segment
from .store import ACTIVE, GRACE_MS, BatchStore, Change, segments_key, write

T = TypeVar("T")


class BatchLease:
    """Held by one driver for one slice; renew it well within `lease_s`."""

    def __init__(self, store: BatchStore, batch: Batch, lease_s: float) -> None:
        self.batch = batch
        self.renew_every_s = lease_s / 3
        self._store = store
        self._lease_ms = int(lease_s * 1000)

    @property
    def now_s(self) -> float:
        """Unix seconds by Redis's clock, as of the last change."""
        return (self.batch.lease_until - self._lease_ms) / 1000

    @classmethod
    async def take(cls, store: BatchStore, batch_id: str, owner: str, lease_s: float) -> BatchLease | None:
        """Take an unfinished batch that nobody holds; None when it has ended or another driver has it.

        Args:
            owner: unique to this slice.
        """

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch | None:
            if batch.owner == owner and batch.lease_until > now_ms:
                return batch  # our own take, whose reply was lost
            if batch.ended or batch.lease_until > now_ms:
                return None
            until = now_ms + int(lease_s * 1000)
            pipe.zadd(ACTIVE, {batch.id: until})
            return write(pipe, dataclasses.replace(batch, owner=owner, epoch=batch.epoch + 1, lease_until=until))

        batch = await store.update(batch_id, change)
        return None if batch is None else cls(store, batch, lease_s)

    async def renew(self) -> Batch:
        """Hold on, and see whether the batch was cancelled meanwhile."""
        return await self._change(lambda pipe, batch, now_ms: write(pipe, batch))

    async def release(self) -> Batch:
        """Let go: the next slice may begin at once."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if not batch.ended:
                pipe.zadd(ACTIVE, {batch.id: now_ms + GRACE_MS})
            return write(pipe, dataclasses.replace(batch, lease_until=0))

        return await self._change(change)

    async def fail(self, errors: Iterable[LineError]) -> Batch:
        """End a batch whose file is not valid. One that is being cancelled is cancelled instead."""
        lines = tuple(errors)

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.status != "validating":
                return write(pipe, batch)
            return self._end(pipe, dataclasses.replace(batch, status="failed", failed_at=now_ms // 1000, errors=lines))

        return await self._change(change)

    async def lose(self, reason: LineError) -> Batch:
        """End a batch that nobody can drive any further, whatever it was at."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.ended:
                return write(pipe, batch)
            failed = dataclasses.replace(batch, status="failed", failed_at=now_ms // 1000, errors=(reason,))
            return self._end(pipe, failed)

        return await self._change(change)

    async def start(self, total: int, model: str | None) -> Batch:
        """The file is valid: go on to its lines, unless the batch was cancelled meanwhile."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.status == "validating":
                batch = dataclasses.replace(batch, status="in_progress", in_progress_at=now_ms // 1000)
            return write(pipe, dataclasses.replace(batch, total=total, model=model))

        return await self._change(change)

    async def commit(self, segment: Segment) -> Batch:
        """Make a segment's lines count. Before this they were never answered, after it they are for ever."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.last_segment == segment.name:
                return write(pipe, batch)
            pipe.hset(segments_key(batch.id), segment.name, segment.encode())
            counts = batch.counts + segment.counts
            return write(pipe, dataclasses.replace(batch, counts=counts, last_segment=segment.name))

        return await self._change(change)

    async def discard(self, segment: Segment) -> Batch:
        """Take a commit back: the segment's file is gone."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if segment.name in batch.discarded:
                return write(pipe, batch)
            pipe.hdel(segments_key(batch.id), segment.name)
            discarded = (*batch.discarded, segment.name)
            return write(pipe, dataclasses.replace(batch, counts=batch.counts - segment.counts, discarded=discarded))

        return await self._change(change)

    async def segments(self) -> list[Segment]:
        """The committed segments, in the order of their names."""
        key = segments_key(self.batch.id)
        raw = await cast("Awaitable[dict[bytes, bytes]]", self._store.redis.hgetall(key))
        return [Segment.decode(text(name), raw[name]) for name in sorted(raw)]

    async def finalize(self, outcome: Outcome) -> Batch:
        """No line is answered from here on; what is there goes into the files.

        A store that lost a commit with its tail does not say `completed` of what is left: the status stays.
        """

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.status == "in_progress" and not (outcome == "completed" and batch.unanswered):
                batch = dataclasses.replace(batch, status="finalizing", finalizing_at=now_ms // 1000, outcome=outcome)
            return write(pipe, batch)

        return await self._change(change)

    async def publish(self, output: FileObject | None, errors: FileObject | None) -> Batch:
        """Show the files and end the batch, in one step; not where the store has lost that it was finalized."""

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.ended:
                return batch  # our own publish, whose reply was lost
            if batch.status not in ("finalizing", "cancelling"):
                return write(pipe, batch)
            for file in (output, errors):
                if file is not None:
                    self._store.files.register(pipe, file)
            outcome = "cancelled" if batch.status == "cancelling" else batch.outcome or "completed"
            now = now_ms // 1000
            batch = dataclasses.replace(
                batch,
                status=outcome,
                output_file_id=output.id if output else None,
                error_file_id=errors.id if errors else None,
                completed_at=now if outcome == "completed" else None,
                expired_at=now if outcome == "expired" else None,
                cancelled_at=now if outcome == "cancelled" else None,
            )
            pipe.delete(segments_key(batch.id))
            return self._end(pipe, batch)

        return await self._change(change)

    def _end(self, pipe: Pipeline, batch: Batch) -> Batch:
        pipe.zrem(ACTIVE, batch.id)
        return write(pipe, batch)

    async def _change(self, change: Change[Batch]) -> Batch:
        """Apply `change` if the batch is still ours, and renew the lease with it."""
        owner, epoch = self.batch.owner, self.batch.epoch

        def fenced(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if (batch.owner, batch.epoch) != (owner, epoch):
                raise Fenced(f"{batch.id} is driven by another process now (epoch {batch.epoch}, ours was {epoch})")
            until = now_ms + self._lease_ms
            if not batch.ended:
                pipe.zadd(ACTIVE, {batch.id: until})
            return change(pipe, dataclasses.replace(batch, lease_until=until), now_ms)

        self.batch = await self._store.update(self.batch.id, fenced)
        return self.batch

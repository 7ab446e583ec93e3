"""Batches on the control Redis: what clients create, read and cancel, and the queue of slices to be driven.

    key                       type     holds
    hr:batch:<id>             hash     a Batch (model.py), each field as JSON
    hr:batch:<id>:segments    hash     committed result segments (results.py); removed at the end
    hr:batches                zset     order of the list (api/paging.py)
    hr:batch:active           zset     unfinished batches by the time (ms) at which somebody must look at them again
    hr:batch:once:<sha256>    string   id of the batch that an Idempotency-Key made, for a day
    rq:*                      …        RQ's own; a job is one slice of driving one batch

Every change is one transaction over the batch's hash: it is watched, read, judged and written, and judged anew when
somebody else was faster. So a terminal state never changes, and a change that is sent twice happens once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, cast

import redis.exceptions
from redis.asyncio.client import Pipeline

from ...shared.clients import AsyncClient
from ...shared.errors import Conflict, InvalidRequest, NotFound
from .. import watched
from ..files.store import LEFTOVER_S, FileStore
from ..paging import PageQuery, index_member, page_ids, text
from .model import WINDOW_S, Batch

INDEX, ACTIVE = "hr:batches", "hr:batch:active"
ONCE_S = 86400
GRACE_MS = 10_000  # how long a batch that was handed to RQ may wait before a sweep looks at it
ENDED_KEPT_S = 600.0  # of a batch's folder after its end

T = TypeVar("T")
Change = Callable[[Pipeline, Batch, int], T]
"""Queues commands on a transaction, given the batch as it stands and the time (ms); its result is the update's."""


def batch_key(batch_id: str) -> str:
    return f"hr:batch:{batch_id}"


def segments_key(batch_id: str) -> str:
    return f"hr:batch:{batch_id}:segments"


class BatchStore:
    """The batches of one deployment. Safe to use from many processes at once."""

    def __init__(self, redis: AsyncClient, files: FileStore) -> None:
        self.redis = redis
        self.files = files

    async def create(self, draft: Batch, idempotency_key: str | None = None) -> Batch:
        """Store a new batch.

        Args:
            draft: what the client asked for; its id and times are set here.
            idempotency_key: the same key of the same tenant makes no second batch.

        Raises:
            NotFound: the input file does not exist.
            InvalidRequest: it is no batch file.
            StoreUnavailable: Redis did not flush the batch; it may be there all the same.
        """
        file = await self.files.get(draft.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest(
                f"Invalid 'input_file_id': file '{file.id}' has purpose '{file.purpose}', expected 'batch'.",
                param="input_file_id",
                code="invalid_value",
            )
        now = await self.files.now()
        batch = dataclasses.replace(
            draft, id=f"batch_{secrets.token_hex(12)}", created_at=now, expires_at=now + WINDOW_S
        )
        once = None if idempotency_key is None else _once_key(batch.tenant, idempotency_key)
        if once is not None and (first := await self.redis.get(once)) is not None:
            return await self.get(text(first))
        folder = self.files.batch_folder(batch.id)
        try:
            await asyncio.to_thread(_keep_input, self.files.path(file.id), folder)
        except FileNotFoundError:
            raise NotFound(f"No such File object: {file.id}", param="input_file_id") from None
        winner = await self._insert(batch, once)
        if winner.id != batch.id:
            await asyncio.to_thread(shutil.rmtree, folder)
        await self.files.flush.wait()
        return winner

    async def _insert(self, batch: Batch, once: str | None) -> Batch:
        while True:
            try:
                async with self.redis.pipeline(transaction=True) as pipe:
                    return await self._insert_with(pipe, batch, once)
            except redis.exceptions.WatchError:
                continue  # somebody was faster; or the connection broke, and `once` tells whether we wrote

    async def _insert_with(self, pipe: Pipeline, batch: Batch, once: str | None) -> Batch:
        if once is not None:
            await pipe.watch(once)
            first = await pipe.get(once)
            if first is not None:
                return await self.get(text(first))
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.set(once, batch.id, ex=ONCE_S)
        pipe.hset(batch_key(batch.id), mapping=batch.to_hash())
        pipe.zadd(INDEX, {index_member(batch.created_at, batch.id): 0})
        pipe.zadd(ACTIVE, {batch.id: batch.created_at * 1000 + GRACE_MS})
        await pipe.execute()
        return batch

    async def get(self, batch_id: str) -> Batch:
        """Raises NotFound when there is no such batch."""
        batch = await self.find(batch_id)
        if batch is None:
            raise _no_batch(batch_id)
        return batch

    async def find(self, batch_id: str) -> Batch | None:
        fields = await cast("Awaitable[dict[bytes, bytes]]", self.redis.hgetall(batch_key(batch_id)))
        return Batch.from_hash(fields) if fields else None

    async def page(self, query: PageQuery) -> tuple[list[Batch], bool]:
        """One page of the batches, and whether more follow. Raises InvalidRequest when `query.after` is unknown."""
        after = None
        if query.after is not None:
            cursor = await self.find(query.after)
            if cursor is None:
                raise InvalidRequest(f"No batch found with id '{query.after}'.", param="after")
            after = cursor.created_at
        ids, more = await page_ids(self.redis, INDEX, query, after)
        async with self.redis.pipeline(transaction=False) as pipe:
            for batch_id in ids:
                pipe.hgetall(batch_key(batch_id))
            return [Batch.from_hash(fields) for fields in await pipe.execute() if fields], more

    async def cancel(self, batch_id: str) -> Batch:
        """Begin cancelling; a batch that is cancelling or cancelled stays as it is.

        Raises:
            NotFound: there is no such batch.
            Conflict: it has ended otherwise.
        """

        def change(pipe: Pipeline, batch: Batch, now_ms: int) -> Batch:
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.ended or batch.status == "finalizing":
                raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
            return write(pipe, dataclasses.replace(batch, status="cancelling", cancelling_at=now_ms // 1000))

        return await self.update(batch_id, change)

    async def update(self, batch_id: str, change: Change[T], limit_s: float | None = 5.0) -> T:
        """Apply `change` in one transaction, again when the batch moved meanwhile or Redis did not answer.

        Raises:
            NotFound: there is no such batch.
            StoreUnavailable: Redis did not answer within `limit_s`.
        """

        def judge(pipe: Pipeline, fields: watched.Fields, now_ms: int) -> T:
            if not fields:
                raise _no_batch(batch_id)
            return change(pipe, Batch.from_hash(fields), now_ms)

        return await watched.update(self.redis, batch_key(batch_id), judge, limit_s)

    async def due(self, limit: int = 100) -> list[Batch]:
        """Unfinished batches that nobody has looked at in time, taken over for one grace period."""
        seconds, micros = await self.redis.time()
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        due: list[Batch] = []
        for raw in await self.redis.zrangebyscore(ACTIVE, "-inf", now_ms, start=0, num=limit):
            batch = await self.find(text(raw))
            if batch is None or batch.ended:
                await self.redis.zrem(ACTIVE, text(raw))
            elif batch.lease_until <= now_ms:
                await self.redis.zadd(ACTIVE, {batch.id: now_ms + GRACE_MS}, xx=True)
                due.append(batch)
        return due

    async def remove_leftovers(self) -> None:
        """Remove the folders of batches that have ended a while ago, and of those that nobody knows any more."""
        for path in await asyncio.to_thread(lambda: list(self.files.folder.joinpath("batches").iterdir())):
            batch = await self.find(path.name)
            age_s = await asyncio.to_thread(_age_s, path)
            if age_s > LEFTOVER_S if batch is None else batch.ended and age_s > ENDED_KEPT_S:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def write(pipe: Pipeline, batch: Batch) -> Batch:
    """Queue the whole batch, as it shall stand."""
    pipe.hset(batch_key(batch.id), mapping=batch.to_hash())
    return batch


def _once_key(tenant: str, key: str) -> str:
    return f"hr:batch:once:{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()}"


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"No batch found with id '{batch_id}'.", param="batch_id")


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _keep_input(source: Path, folder: Path) -> None:
    """Give the batch its own name for the input's bytes: deleting the file takes nothing away from it."""
    if not source.exists():
        raise FileNotFoundError(source)
    folder.mkdir(parents=True)
    target = folder / "input.jsonl"
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)

"""Files: their bytes in a folder that every host mounts, what is known of them on the control Redis.

    <data>/store-id          the store's identity, compared with Redis at start
    <data>/incoming/<hex>    files being written; a leftover is removed after a day
    <data>/files/<file id>   whole files, never changed

    key                      type     holds
    hr:file:<id>             hash     bytes, created_at, filename, purpose, expires_at?
    hr:file:gone:<id>        string   created_at of a deleted file, for a day: a cursor that still works
    hr:files[:<purpose>]     zset     order of the lists (api/paging.py)
    hr:files:expiry          zset     ids by expires_at
    hr:files:store           string   the store's identity

A file exists when its hash does: the blob is written and flushed before, and unlinked after.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from redis.asyncio.client import Pipeline

from ...shared.clients import AsyncClient
from ...shared.errors import ConfigError, InvalidRequest, NotFound
from ..paging import PageQuery, index_member, page_ids, text
from .durable import Durability, Flush
from .incoming import IncomingFile, UploadLimits
from .model import BATCH_LIFETIME_S, FileObject

INDEX, EXPIRY, STORE = "hr:files", "hr:files:expiry", "hr:files:store"
GONE_S = 86400
LEFTOVER_S = 86400
PURGE_AT_ONCE = 100


def file_key(file_id: str) -> str:
    return f"hr:file:{file_id}"


def _gone_key(file_id: str) -> str:
    return f"hr:file:gone:{file_id}"


def _indexes(file: FileObject) -> tuple[str, str]:
    return INDEX, f"{INDEX}:{file.purpose}"


class FileStore:
    """The files of one deployment. Safe to use from many processes at once."""

    def __init__(self, folder: Path, redis: AsyncClient, limits: UploadLimits, flush: Flush) -> None:
        self.folder = folder
        self.redis = redis
        self.limits = limits
        self.flush = flush

    @classmethod
    async def open(
        cls,
        data_dir: str,
        redis: AsyncClient,
        limits: UploadLimits | None = None,
        durability: Durability = "strict",
    ) -> FileStore:
        """Make the folders and check that Redis belongs to them.

        Raises:
            ConfigError: the folder cannot be written, or another deployment's (or another host's private) one;
                or Redis cannot say when it has flushed.
        """
        folder, identity = await asyncio.to_thread(_open_folder, data_dir)
        await redis.set(STORE, identity, nx=True)
        known = text(await redis.get(STORE))
        if known != identity:
            raise ConfigError(
                f"--data-dir {folder} is store {identity}, but the files in this Redis are in store {known}: "
                f"mount the folder that the other api and batch processes use, or delete the key {STORE} to begin anew"
            )
        return cls(folder, redis, limits or UploadLimits(), await Flush.open(redis, durability))

    def path(self, file_id: str) -> Path:
        """Where a file's bytes lie."""
        return self.folder / "files" / file_id

    def batch_folder(self, batch_id: str) -> Path:
        """Where a running batch keeps its input and its result segments."""
        return self.folder / "batches" / batch_id

    def incoming(self, *, limit: int | None = None) -> IncomingFile:
        """A file to be written, to be given to `add`; a context that removes what was not added.

        Args:
            limit: bytes at most, where another limit than an upload's applies.
        """
        limits = self.limits if limit is None else replace(self.limits, file_bytes=limit)
        return IncomingFile(self.folder / "incoming" / secrets.token_hex(16), limits)

    async def now(self) -> int:
        """Unix seconds by Redis's clock."""
        seconds, _ = await self.redis.time()
        return int(seconds)

    async def add(
        self, incoming: IncomingFile, *, filename: str, purpose: str, lifetime_s: int | None = None
    ) -> FileObject:
        """Make an upload a file: flush its bytes, name it, and only then let it be seen.

        Raises:
            StoreUnavailable: Redis did not flush it; it may be there all the same.
        """
        file = await self.place(incoming, filename=filename, purpose=purpose, lifetime_s=lifetime_s)
        async with self.redis.pipeline(transaction=True) as pipe:
            self.register(pipe, file)
            await pipe.execute()
        await self.flush.wait()
        return file

    async def place(
        self, incoming: IncomingFile, *, filename: str, purpose: str, lifetime_s: int | None = None
    ) -> FileObject:
        """The first half of `add`: the bytes under their final name; nobody sees them before `register`."""
        if lifetime_s is None and purpose == "batch":
            lifetime_s = BATCH_LIFETIME_S
        now = await self.now()
        file = FileObject(
            id=f"file-{secrets.token_hex(12)}",
            size=incoming.size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        await asyncio.to_thread(incoming.move_to, self.path(file.id))
        return file

    def register(self, pipe: Pipeline, file: FileObject) -> None:
        """The second half of `add`, as commands of a transaction that may hold more."""
        pipe.hset(file_key(file.id), mapping=file.to_hash())
        for index in _indexes(file):
            pipe.zadd(index, {index_member(file.created_at, file.id): 0})
        if file.expires_at is not None:
            pipe.zadd(EXPIRY, {file.id: file.expires_at})

    async def get(self, file_id: str, param: str = "id") -> FileObject:
        """Raises NotFound, naming `param`, when there is no such file, or its time is over."""
        file = await self._find(file_id)
        if file is None or (file.expires_at is not None and file.expires_at <= await self.now()):
            raise NotFound(f"No such File object: {file_id}", param=param)
        return file

    async def delete(self, file_id: str) -> None:
        """Raises NotFound when there is no such file."""
        file = await self.get(file_id)
        await self._remove(file)

    async def page(self, query: PageQuery, purpose: str | None = None) -> tuple[list[FileObject], bool]:
        """One page of the files (of one purpose), and whether more follow.

        Raises:
            InvalidRequest: `query.after` is no file that is or was here.
        """
        await self.purge_expired()
        after = None if query.after is None else await self._created_at(query.after)
        ids, more = await page_ids(self.redis, INDEX if purpose is None else f"{INDEX}:{purpose}", query, after)
        async with self.redis.pipeline(transaction=False) as pipe:
            for file_id in ids:
                pipe.hgetall(file_key(file_id))
            hashes = await pipe.execute()
        return [FileObject.from_hash(i, fields) for i, fields in zip(ids, hashes, strict=True) if fields], more

    async def purge_expired(self) -> int:
        """Remove the files whose time is over; returns how many."""
        ids = await self.redis.zrangebyscore(EXPIRY, "-inf", await self.now(), start=0, num=PURGE_AT_ONCE)
        for file_id in map(text, ids):
            file = await self._find(file_id)
            if file is not None:
                await self._remove(file)
            else:
                await self.redis.zrem(EXPIRY, file_id)
        return len(ids)

    def remove_leftovers(self) -> None:
        """Remove what a killed process left unfinished, and uploads that were never completed. Blocks on the disk."""
        limit = time.time() - LEFTOVER_S
        for name in ("incoming", "uploads"):
            for path in (self.folder / name).iterdir():
                with suppress(FileNotFoundError):  # another replica removes them, too, or they are complete now
                    if path.stat().st_mtime >= limit:
                        continue
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()

    async def _find(self, file_id: str) -> FileObject | None:
        fields = await cast("Awaitable[dict[bytes, bytes]]", self.redis.hgetall(file_key(file_id)))
        return FileObject.from_hash(file_id, fields) if fields else None

    async def _created_at(self, file_id: str) -> int:
        file = await self._find(file_id)
        gone = None if file is not None else await self.redis.get(_gone_key(file_id))
        if file is not None:
            return file.created_at
        if gone is None:
            raise InvalidRequest(f"No such File object: {file_id}", param="after")
        return int(gone)

    async def _remove(self, file: FileObject) -> None:
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.delete(file_key(file.id))
            for index in _indexes(file):
                pipe.zrem(index, index_member(file.created_at, file.id))
            pipe.zrem(EXPIRY, file.id)
            pipe.set(_gone_key(file.id), file.created_at, ex=GONE_S)
            await pipe.execute()
        await asyncio.to_thread(self.path(file.id).unlink, missing_ok=True)


def _open_folder(data_dir: str) -> tuple[Path, str]:
    folder = Path(data_dir).expanduser()
    try:
        for name in ("files", "incoming", "batches", "uploads"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return folder, _identity(folder)
    except OSError as e:
        raise ConfigError(f"--data-dir {folder}: cannot be written ({e.strerror}); give a folder that can") from e


def _identity(folder: Path) -> str:
    """The store's id, made by whoever comes first: a link, unlike a write, happens once and whole."""
    path = folder / "store-id"
    if not path.exists():
        draft = folder / "incoming" / f"store-id-{secrets.token_hex(8)}"
        draft.write_text(secrets.token_hex(16))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text().strip()

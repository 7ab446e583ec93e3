"""Large files in parts: `/v1/uploads`. The parts come in parallel; `complete` says in which order they stand.

<data>/uploads/<upload>/<part>     the bytes of one part; the folder goes when the upload ends

key                        type   holds
hr:upload:<id>             hash   an Upload, each field as JSON; expires a day after the upload
hr:upload:<id>:parts       hash   part id → bytes
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from redis.asyncio.client import Pipeline
from redis.typing import FieldT

from ...shared.errors import InvalidRequest, NotFound
from .. import watched
from .incoming import IncomingFile
from .model import FileObject
from .store import FileStore

PART_BYTES = 64 << 20
UPLOAD_BYTES = 8 << 30
LIFETIME_S = 3600
KEEP_S = 86400  # how long an upload that is over can be asked for
COPY_BYTES = 1 << 20

Status = Literal["pending", "completed", "cancelled", "expired"]


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload. Times are Unix seconds by Redis's clock; `size` is what the client said that it would send."""

    id: str
    filename: str
    purpose: str
    size: int  # bytes
    created_at: int = 0
    status: Status = "pending"
    lifetime_s: int | None = None  # of the file that it becomes
    file_id: str | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + LIFETIME_S

    def body(self, file: FileObject | None = None) -> dict[str, Any]:
        """The JSON that clients see."""
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "file": None if file is None else file.body(),
        }

    def to_hash(self) -> dict[FieldT, bytes]:
        return {field.name: orjson.dumps(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes], now_s: float) -> Upload:
        upload = cls(**{name.decode(): orjson.loads(value) for name, value in fields.items()})
        late = upload.status == "pending" and now_s >= upload.expires_at
        return dataclasses.replace(upload, status="expired") if late else upload


def _key(upload_id: str) -> str:
    return f"hr:upload:{upload_id}"


def _parts_key(upload_id: str) -> str:
    return f"hr:upload:{upload_id}:parts"


class UploadStore:
    """The uploads of one deployment, beside its files."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._redis = files.redis

    async def create(self, draft: Upload) -> Upload:
        """Begin an upload; its id and time are set here."""
        upload = dataclasses.replace(draft, id=f"upload_{secrets.token_hex(12)}", created_at=await self._files.now())
        await asyncio.to_thread(self._folder(upload.id).mkdir, parents=True)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(_key(upload.id), mapping=upload.to_hash())
            pipe.expire(_key(upload.id), LIFETIME_S + KEEP_S)
            await pipe.execute()
        return upload

    def incoming(self) -> IncomingFile:
        """One part to be written, to be given to `add_part`."""
        return self._files.incoming(limit=PART_BYTES)

    async def add_part(self, upload_id: str, incoming: IncomingFile) -> dict[str, Any]:
        """Keep a part. Its place among the others is decided by `complete`.

        Raises:
            NotFound: there is no such upload.
            InvalidRequest: it is over.
        """
        await self._pending(upload_id)
        part_id = f"part_{secrets.token_hex(12)}"
        try:
            await asyncio.to_thread(incoming.move_to, self._folder(upload_id) / part_id)
        except FileNotFoundError:  # the folder went just now, with the upload's end
            await self._pending(upload_id)
            raise

        def change(pipe: Pipeline, upload: Upload) -> None:
            _refuse_ended(upload)
            pipe.hset(_parts_key(upload_id), part_id, str(incoming.size))
            pipe.expire(_parts_key(upload_id), LIFETIME_S + KEEP_S)

        await self._update(upload_id, change)
        return {
            "id": part_id,
            "object": "upload.part",
            "created_at": await self._files.now(),
            "upload_id": upload_id,
        }

    async def complete(self, upload_id: str, part_ids: Sequence[str], md5: str | None) -> tuple[Upload, FileObject]:
        """Make the parts, in this order, a file.

        Raises:
            NotFound: there is no such upload.
            InvalidRequest: it is over, a part is unknown, or the whole is not what was announced.
        """
        upload = await self._pending(upload_id)
        await self._check_parts(upload, part_ids)
        with self._files.incoming(limit=UPLOAD_BYTES) as incoming:
            folder = self._folder(upload_id)
            digest = await asyncio.to_thread(_join, [folder / part_id for part_id in part_ids], incoming)
            if md5 is not None and md5.lower() != digest:
                raise InvalidRequest(f"The parts' md5 is {digest}, not the '{md5}' that was given.", param="md5")
            incoming.check(upload.purpose, upload.filename)
            file = await self._files.place(
                incoming, filename=upload.filename, purpose=upload.purpose, lifetime_s=upload.lifetime_s
            )

        def change(pipe: Pipeline, upload: Upload) -> Upload:
            if upload.file_id == file.id:
                return upload  # our own change, whose reply was lost
            _refuse_ended(upload)
            self._files.register(pipe, file)
            return self._end(pipe, dataclasses.replace(upload, status="completed", file_id=file.id))

        try:
            done = await self._update(upload_id, change)
        except InvalidRequest:
            await asyncio.to_thread(self._files.path(file.id).unlink)
            raise
        await self._files.flush.wait()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return done, file

    async def cancel(self, upload_id: str) -> Upload:
        """End an upload without a file. Raises as `add_part` does."""

        def change(pipe: Pipeline, upload: Upload) -> Upload:
            if upload.status == "cancelled":
                return upload
            _refuse_ended(upload)
            return self._end(pipe, dataclasses.replace(upload, status="cancelled"))

        upload = await self._update(upload_id, change)
        await asyncio.to_thread(shutil.rmtree, self._folder(upload_id), ignore_errors=True)
        return upload

    async def _pending(self, upload_id: str) -> Upload:
        def change(pipe: Pipeline, upload: Upload) -> Upload:
            _refuse_ended(upload)
            return upload

        return await self._update(upload_id, change)

    async def _update(self, upload_id: str, change: Callable[[Pipeline, Upload], watched.T]) -> watched.T:
        def judge(pipe: Pipeline, fields: watched.Fields, now_ms: int) -> watched.T:
            if not fields:
                raise NotFound(f"No such Upload object: {upload_id}", param="upload_id")
            return change(pipe, Upload.from_hash(fields, now_ms / 1000))

        return await watched.update(self._redis, _key(upload_id), judge)

    async def _check_parts(self, upload: Upload, part_ids: Sequence[str]) -> None:
        sizes = {name.decode(): int(size) for name, size in (await self._redis.hgetall(_parts_key(upload.id))).items()}
        for i, part_id in enumerate(part_ids):
            if part_id not in sizes:
                raise InvalidRequest(f"The upload has no part '{part_id}'.", param=f"part_ids.{i}")
        if len(set(part_ids)) != len(part_ids):
            raise InvalidRequest("A part is named twice.", param="part_ids")
        total = sum(sizes[part_id] for part_id in part_ids)
        if total != upload.size:
            raise InvalidRequest(
                f"The parts hold {total} bytes, but the upload was announced with {upload.size}.", param="part_ids"
            )

    def _end(self, pipe: Pipeline, upload: Upload) -> Upload:
        pipe.hset(_key(upload.id), mapping=upload.to_hash())
        pipe.delete(_parts_key(upload.id))
        return upload

    def _folder(self, upload_id: str) -> Path:
        return self._files.folder / "uploads" / upload_id


def _refuse_ended(upload: Upload) -> None:
    if upload.status != "pending":
        raise InvalidRequest(f"Upload '{upload.id}' is {upload.status}; only a pending one can go on.")


def _join(parts: Sequence[Path], incoming: IncomingFile) -> str:
    """Write the parts one behind the other; returns their md5, in hex."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        with part.open("rb") as file:
            while data := file.read(COPY_BYTES):
                incoming.write(data)
                digest.update(data)
    return digest.hexdigest()

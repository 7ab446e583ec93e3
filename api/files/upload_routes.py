"""`/v1/uploads`: create, add parts, complete, cancel."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ..fields import integer, invalid_type, invalid_value, missing_parameter, string
from ..routes.requests import read_object
from .form import FormReader
from .lifetimes import lifetime_of_body
from .model import UPLOAD_PURPOSES
from .uploads import UPLOAD_BYTES, Upload, UploadStore

router = APIRouter()


def _store(request: Request) -> UploadStore:
    return UploadStore(request.app.state.files)


@router.post("/v1/uploads")
async def create_upload(request: Request) -> dict[str, Any]:
    """Announce a file; it comes in parts within the hour."""
    body = await read_object(request)
    purpose = string(body, "purpose")
    if purpose not in UPLOAD_PURPOSES:
        raise invalid_value("purpose", purpose, UPLOAD_PURPOSES)
    string(body, "mime_type")  # required, and of no use here
    draft = Upload(
        id="",
        filename=string(body, "filename"),
        purpose=purpose,
        size=integer(body, "bytes", 1, UPLOAD_BYTES),
        lifetime_s=lifetime_of_body(body, "expires_after"),
    )
    return (await _store(request).create(draft)).body()


@router.post("/v1/uploads/{upload_id}/parts")
async def add_upload_part(request: Request, upload_id: str) -> dict[str, Any]:
    """Add bytes, up to 64 MB; parts may come in parallel."""
    store = _store(request)
    with store.incoming() as incoming:
        form = await FormReader(request.headers.get("content-type", ""), incoming, "data").read(request.stream())
        if form.filename is None:
            raise missing_parameter("data")
        return await store.add_part(upload_id, incoming)


@router.post("/v1/uploads/{upload_id}/complete")
async def complete_upload(request: Request, upload_id: str) -> dict[str, Any]:
    """Make the named parts, in their order, a file."""
    body = await read_object(request)
    part_ids = body.get("part_ids")
    if part_ids is None:
        raise missing_parameter("part_ids")
    if not isinstance(part_ids, list) or not all(isinstance(part_id, str) for part_id in part_ids):
        raise invalid_type("part_ids", "an array of strings", part_ids)
    md5 = string(body, "md5") if body.get("md5") else None
    upload, file = await _store(request).complete(upload_id, part_ids, md5)
    return upload.body(file)


@router.post("/v1/uploads/{upload_id}/cancel")
async def cancel_upload(request: Request, upload_id: str) -> dict[str, Any]:
    """Give the upload up; its parts are removed."""
    return (await _store(request).cancel(upload_id)).body()

"""`/v1/files`: upload, list, read, download, delete."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from ...shared.errors import NotFound
from ..fields import invalid_value, missing_parameter
from ..paging import PageQuery, list_body
from .form import Form, FormReader
from .lifetimes import lifetime_of_form
from .model import BATCH_OUTPUT, UPLOAD_PURPOSES
from .store import FileStore
from .upload_routes import router as uploads

MAX_PAGE = 10_000

router = APIRouter()
router.include_router(uploads)


def _store(request: Request) -> FileStore:
    store: FileStore = request.app.state.files
    return store


@router.post("/v1/files")
async def upload_file(request: Request) -> dict[str, Any]:
    """Store a file; its bytes go to disk as they arrive."""
    store = _store(request)
    with store.incoming() as incoming:
        form = await FormReader(request.headers.get("content-type", ""), incoming, "file").read(request.stream())
        purpose = _purpose(form)
        lifetime_s = lifetime_of_form(form.fields, "expires_after")
        if form.filename is None:
            raise missing_parameter("file")
        incoming.check(purpose, form.filename)
        file = await store.add(incoming, filename=form.filename, purpose=purpose, lifetime_s=lifetime_s)
    return file.body()


@router.get("/v1/files")
async def list_files(request: Request) -> dict[str, Any]:
    """One page of files, newest first unless asked otherwise."""
    query = PageQuery.parse(request.query_params, default=MAX_PAGE, maximum=MAX_PAGE)
    purpose = request.query_params.get("purpose")
    if purpose is not None and purpose not in (*UPLOAD_PURPOSES, BATCH_OUTPUT):
        raise invalid_value("purpose", purpose, (*UPLOAD_PURPOSES, BATCH_OUTPUT))
    files, has_more = await _store(request).page(query, purpose)
    return list_body([file.body() for file in files], has_more)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    return (await _store(request).get(file_id)).body()


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    await _store(request).delete(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/v1/files/{file_id}/content")
async def download_file(request: Request, file_id: str) -> FileResponse:
    """The file's bytes, streamed; ranges are honoured."""
    store = _store(request)
    file = await store.get(file_id)
    path = store.path(file.id)
    if not path.is_file():  # deleted since, or a file that this host cannot see
        raise NotFound(f"No such File object: {file_id}", param="id")
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


def _purpose(form: Form) -> str:
    purpose = form.require("purpose")
    if purpose not in UPLOAD_PURPOSES:
        raise invalid_value("purpose", purpose, UPLOAD_PURPOSES)
    return purpose

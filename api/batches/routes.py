"""`/v1/batches`: create, read, list, cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from ...shared.clients import UNAVAILABLE, Client
from ...shared.errors import InvalidRequest
from ..fields import invalid_type, invalid_value, string
from ..files.lifetimes import lifetime_of_body
from ..paging import PageQuery, list_body
from ..routes.requests import read_object
from .model import ENDPOINTS, Batch
from .slices import enqueue_slice
from .store import BatchStore

log = logging.getLogger(__name__)

DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # pairs; characters

router = APIRouter()


def _store(request: Request) -> BatchStore:
    store: BatchStore = request.app.state.batches
    return store


@router.post("/v1/batches")
async def create_batch(request: Request) -> dict[str, Any]:
    """Accept a batch; its file is validated by the driver."""
    draft = _draft(await read_object(request), getattr(request.state, "tenant", "default"))
    batch = await _store(request).create(draft, request.headers.get("idempotency-key"))
    connection: Client = request.app.state.rq
    try:
        await asyncio.to_thread(enqueue_slice, connection, batch)
    except UNAVAILABLE as e:
        log.warning("%s waits for the next sweep: %s", batch.id, e)
    return batch.body()


@router.get("/v1/batches")
async def list_batches(request: Request) -> dict[str, Any]:
    """One page of batches, newest first."""
    query = PageQuery.parse(request.query_params, default=DEFAULT_PAGE, maximum=MAX_PAGE)
    batches, has_more = await _store(request).page(query)
    return list_body([batch.body() for batch in batches], has_more)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    return (await _store(request).get(batch_id)).body()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    return (await _store(request).cancel(batch_id)).body()


def _draft(body: Mapping[str, Any], tenant: str) -> Batch:
    """What a create asks for, as a batch without id and times."""
    input_file_id = string(body, "input_file_id")
    asked = string(body, "endpoint")
    endpoint = ENDPOINTS.get(asked)
    if endpoint is None:
        raise invalid_value("endpoint", asked, tuple(ENDPOINTS))
    window = string(body, "completion_window")
    if window != "24h":
        raise invalid_value("completion_window", window, ("24h",))
    return Batch(
        id="",
        endpoint=endpoint,
        input_file_id=input_file_id,
        created_at=0,
        expires_at=0,
        tenant=tenant,
        metadata=_metadata(body.get("metadata")),
        output_lifetime_s=lifetime_of_body(body, "output_expires_after"),
    )


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_type("metadata", "an object", value)
    if len(value) > MAX_METADATA:
        raise InvalidRequest(
            f"Invalid 'metadata': at most {MAX_METADATA} pairs are allowed, but got {len(value)}.",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, item in value.items():
        param = f"metadata.{key[:MAX_KEY]}"
        if not isinstance(item, str):
            raise invalid_type(param, "a string", item)
        if len(key) > MAX_KEY:
            raise _too_long(param, "key", MAX_KEY, len(key))
        if len(item) > MAX_VALUE:
            raise _too_long(param, "value", MAX_VALUE, len(item))
    return value


def _too_long(param: str, what: str, limit: int, got: int) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': the {what} has {got} characters, more than the limit of {limit}.",
        param=param,
        code="string_above_max_length",
    )

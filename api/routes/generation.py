"""What models do: chats, completions, `/generate` and going on with their streams; embeddings and classes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import APIRouter, Request, Response

from ...shared.errors import InvalidRequest
from ...shared.logs import about
from ..answers.events import LastEvent
from ..errors import json_response
from ..openapi import json_body
from ..plan import Plan
from ..prepare import Prepared
from ..protocol.chat import ChatCompletionRequest
from ..protocol.completions import CompletionRequest
from ..protocol.embeddings import EmbeddingRequest, EncodeRequest
from ..protocol.native import GenerateRequest
from ..sse import EventStream, unless_gone
from ..streams import Chunks, encoded, find
from ..translate import Endpoint
from .requests import caller_of, grace_of, name_of, read_json, services_of, settings_of

log = logging.getLogger(__name__)

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """A chat's next message, whole or as a stream."""
    return await _generate(request, "/v1/chat/completions")


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def completions(request: Request) -> Response:
    """What follows a prompt, whole or as a stream."""
    return await _generate(request, "/v1/completions")


@router.post("/generate", openapi_extra=json_body(GenerateRequest))
async def generate(request: Request) -> Response:
    """What follows a prompt, in native terms."""
    return await _generate(request, "/generate")


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """A vector of each text."""
    return await _generate(request, "/v1/embeddings")


@router.post("/encode", openapi_extra=json_body(EncodeRequest))
async def encode(request: Request) -> Response:
    """A vector of each text, in native terms."""
    return await _generate(request, "/encode")


@router.post("/classify", openapi_extra=json_body(EncodeRequest))
async def classify(request: Request) -> Response:
    """What a classifier or a reward model says of each text."""
    return await _generate(request, "/classify")


@router.get("/v1/streams/{name}")
async def resume(request: Request, name: str) -> Response:
    """A stream from the event after `Last-Event-ID` on, or from its start."""
    plan, seen = await find(
        services_of(request).backend.queue, name, request.headers.get("last-event-id"), request.state.tenant
    )
    return _resumed(request, plan, seen)


async def _generate(request: Request, endpoint: Endpoint) -> Response:
    services = services_of(request)
    body = await read_json(request)
    last_event_id = request.headers.get("last-event-id")
    if last_event_id:
        return await _go_on(request, endpoint, last_event_id)
    name = name_of(request, await request.body())
    prepared = await services.inference.prepare(endpoint, body, caller_of(request), name)
    headers = {"x-ignored-fields": _header(prepared.ignored)} if prepared.ignored else {}
    if prepared.plan.stream:
        return _stream(request, prepared, headers)
    grace_s = grace_of(request) if prepared.named else 0
    value = await unless_gone(request.receive, services.inference.complete(prepared, grace_s))
    return json_response(value, headers=headers)


async def _go_on(request: Request, endpoint: Endpoint, last_event_id: str) -> Response:
    """The same POST, repeated: it names the stream it goes on with, and never begins another."""
    name = LastEvent.parse(last_event_id).request
    plan, seen = await find(services_of(request).backend.queue, name, last_event_id, request.state.tenant)
    if plan.endpoint != endpoint:
        raise InvalidRequest(f"Last-Event-ID names a stream of {plan.endpoint}.")
    return _resumed(request, plan, seen)


def _stream(request: Request, prepared: Prepared, headers: dict[str, str]) -> Response:
    run = services_of(request).inference.run(prepared, grace_s=grace_of(request))
    return _event_stream(request, prepared.plan, run, None, headers)


def _resumed(request: Request, plan: Plan, seen: LastEvent | None) -> Response:
    run = services_of(request).inference.resume(plan, grace_s=grace_of(request))
    return _event_stream(request, plan, run, seen, {})


def _event_stream(
    request: Request,
    plan: Plan,
    run: AbstractAsyncContextManager[Chunks],
    seen: LastEvent | None,
    headers: dict[str, str],
) -> Response:
    settings, metrics = settings_of(request), services_of(request).metrics

    @asynccontextmanager
    async def events() -> AsyncIterator[AsyncGenerator[bytes, None]]:
        with metrics.open_streams.track_inprogress():
            async with encoded(plan, run, seen) as stream:
                yield stream

    def on_slow() -> None:
        metrics.slow_readers.labels("closed").inc()
        log.info("its client took nothing for %.0f s and is cut off", settings.slow_reader_s, extra=about(plan.request))

    return EventStream(
        events,
        first_wait_s=settings.first_token_wait_s,
        keep_alive_s=settings.keep_alive_s,
        slow_reader_s=settings.slow_reader_s,
        on_slow=on_slow,
        headers=headers,
    )


def _header(names: tuple[str, ...]) -> str:
    """Names of fields that were ignored, as a header can hold them."""
    return ", ".join(name for name in names if name.isascii() and name.isprintable())[:500]

"""Streams to clients: new ones, and those that a client goes on with after its connection broke."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from ..shared.chunks import TextChunk
from ..shared.errors import InvalidRequest, NotFound, ProtocolError, StreamGone
from .answers.assemble import stream_of
from .answers.events import Cursor, LastEvent
from .backend import Queue
from .plan import ID_PREFIX, Plan
from .sse import event

Chunks = AsyncIterator[tuple[int, TextChunk]]


@asynccontextmanager
async def encoded(
    plan: Plan, run: AbstractAsyncContextManager[Chunks], seen: LastEvent | None = None
) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    """The events of a request, as bytes; those that the client has are left out."""
    async with run as chunks:
        yield _events(plan, chunks, seen)


async def _events(plan: Plan, chunks: Chunks, seen: LastEvent | None) -> AsyncGenerator[bytes, None]:
    answer = stream_of(plan)
    cursor = Cursor(plan.request, len(plan.rids), seen)
    async for index, chunk in chunks:
        for piece in cursor.follow(index, chunk):
            for item in answer.events(index, piece):
                if (event_id := cursor.advance(item)) is not None:
                    yield event(item.data, event_id)
    for item in answer.last():
        if (event_id := cursor.advance(item)) is not None:
            yield event(item.data, event_id)


async def find(queue: Queue, name: str, last_event_id: str | None, tenant: str) -> tuple[Plan, LastEvent | None]:
    """The plan of a stream that was begun, here or elsewhere, and what its client has of it.

    Args:
        name: the request's id, as in an event's id or in an answer's body.

    Raises:
        NotFound: there never was such a stream, or it is another tenant's.
        StreamGone: its text is no longer kept.
        InvalidRequest: the last event's id is none of this stream.
    """
    request = next((name[len(p) :] for p in ID_PREFIX.values() if p and name.startswith(p)), name)
    try:
        data = await queue.plan(request)
    except ProtocolError as e:
        raise NotFound(f"There is no stream {name[:80]!r}.") from e
    if data is None:
        raise StreamGone("The stream ended too long ago, or never was; send the request again.")
    plan = Plan.decode(data)
    if plan.tenant != tenant:
        raise NotFound(f"There is no stream {name[:80]!r}.")
    seen = LastEvent.parse(last_event_id) if last_event_id else None
    if seen is not None and (seen.request != plan.request or len(seen.places) != len(plan.rids)):
        raise InvalidRequest(f"Last-Event-ID {(last_event_id or '')[:80]!r} is no event of this stream.")
    return plan, seen

"""Server-sent events: headers that wait for the first of them, comments that keep silence alive, an end that is said.

': keep-alive'                  nothing came for a while
'id: …' 'data: {…}'             an event
'data: {"error": {…}}'          what went wrong once the headers were gone
'data: [DONE]'                  the end, always
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGone, SlowReader, as_request_error

ABORT = "headrace.abort"  # an extension of the scope (server.py): closes the connection, what is buffered is dropped
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}
DONE = b"data: [DONE]\n\n"
# No blank line: after an event with an id it would end another, empty one for the openai SDK, which fails on it.
KEEP_ALIVE = b": keep-alive\n"


def event(data: Any, event_id: str | None = None) -> bytes:
    """One event in the wire's form; `data` is a JSON value."""
    head = b"" if event_id is None else b"id: " + event_id.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns once the client has closed its connection. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What `work` returns; it is cancelled when the client closes its connection first.

    Raises:
        ClientGone: it did.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        gone.cancel()
        if not doing.done():
            doing.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. What fails before the first of them is raised, so that it becomes an HTTP error.

    Args:
        events: opens the events, encoded; left when the stream ends, fails, or the client goes.
        first_wait_s: how long the headers wait for the first event.
        keep_alive_s: how long nothing may be sent.
        slow_reader_s: how long a client may take nothing while there is something to send; then its connection is
            closed, without what the server still holds for it.
        on_slow: called when that happens.
    """

    def __init__(
        self,
        events: Callable[[], AbstractAsyncContextManager[AsyncGenerator[bytes, None]]],
        *,
        first_wait_s: float,
        keep_alive_s: float,
        slow_reader_s: float = 30.0,
        on_slow: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {**HEADERS, **(headers or {})}, media_type="text/event-stream")
        # An empty body has set a length of 0; a stream has none.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events = events
        self._first_wait_s = first_wait_s
        self._keep_alive_s = keep_alive_s
        self._slow_reader_s = slow_reader_s
        self._on_slow = on_slow
        self._started = False
        self._ended = False
        self._sent_at = 0.0
        self._sending = asyncio.Lock()  # two tasks send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        alive = asyncio.ensure_future(self._keep_alive(send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            done, _ = await asyncio.wait({pump, alive, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {gone}:
                task.result()
        except SlowReader:
            self._on_slow()
            if (abort := scope.get("extensions", {}).get(ABORT)) is not None:
                abort["abort"]()
                await asyncio.wait({gone}, timeout=1.0)  # the server has noticed, so that this is no broken answer
        finally:
            for task in (pump, alive, gone):
                task.cancel()
            await asyncio.gather(pump, alive, gone, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        try:
            async with self._events() as events, aclosing(events):
                async for data in events:
                    await self._send(send, data)
        except SlowReader:
            raise
        except Exception as e:
            if not self._started:
                raise
            await self._send(send, event(as_request_error(e).body()))
        await self._send(send, DONE, more=False)

    async def _keep_alive(self, send: Send) -> None:
        await asyncio.sleep(self._first_wait_s)
        if not self._started:
            await self._send(send, KEEP_ALIVE)
        while True:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - quiet_s)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if self._ended:
                return
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._ended = not more
            self._sent_at = time.monotonic()
            try:
                async with asyncio.timeout(self._slow_reader_s):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError as e:
                raise SlowReader from e

"""uvicorn as a replica runs it: it drains without failing a request, and a client that does not read can be cut off."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .sse import ABORT

LAST_CALL_S = 1.0  # from the last accept until idle connections are closed


class Protocol(HttpToolsProtocol):
    """Lets a response give up its connection: `close` would wait until the client has read what was sent."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}


class Server(uvicorn.Server):
    """Told to stop by the first signal, and to stop at once by the second.

    SIGTERM ─► `on_drain`, /health says so ─ `delay_s` ─► accept no more ─ LAST_CALL_S ─► close what is idle ─► wait for
    what runs. uvicorn alone closes a connection that it has just accepted, whose request it has not read: that request
    would fail. In between each answer says `Connection: close`, so that clients come back elsewhere.

    Args:
        delay_s: how long it goes on accepting, so that a load balancer that looks at /health can turn to others.
    """

    def __init__(self, config: uvicorn.Config, *, on_drain: Callable[[], None], delay_s: float) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._delay_s = delay_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_drain()
        await self._wait(self._delay_s)
        for server in self.servers:
            server.close()
        await self._wait(LAST_CALL_S)
        await super().shutdown(sockets)

    async def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.force_exit:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)

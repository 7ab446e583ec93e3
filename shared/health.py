"""Whether a process gets on: what `--health-port` answers, and what the others are told when its loop hangs.

    starting    it loads; its loop does not turn yet
    ready       it works, or waits for work
    draining    told to stop: it finishes what it has
    stuck       it has work, and its loop has not turned for longer than its lease (a forward pass that hangs)

A hung loop cannot say so itself: a thread watches it, writes `stuck` into the registry in its place, and logs where it
stands. The thread renews no lease, so that the work moves to others.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson

from .clients import TRANSIENT, Client
from .errors import ConfigError
from .registry import Membership, State

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
LEAST_LIMIT_S = 2.0  # loops that have nothing to do wait for a second


class Progress:
    """A loop says that it turns; whoever watches it sees for how long it has not. The loop's thread makes it.

    Args:
        limit_s: how long a turn may take; the lease.
        busy: whether there is work: a loop without any may stand still. Called by the watching thread.
    """

    def __init__(self, limit_s: float, busy: Callable[[], bool] = lambda: True) -> None:
        self.limit_s = limit_s
        self.thread = threading.get_ident()
        self._busy = busy
        self._turned_at = time.monotonic()
        self._allowed_until = float("-inf")

    def turn(self) -> None:
        """The loop goes round."""
        self._turned_at = time.monotonic()

    async def tick(self) -> None:
        """Turn for ever, as long as the event loop does."""
        while True:
            self.turn()
            await asyncio.sleep(LOOK_EVERY_S)

    @contextmanager
    def allow(self, limit_s: float) -> Iterator[None]:
        """What is done within may take so long."""
        self._allowed_until = time.monotonic() + limit_s
        try:
            yield
        finally:
            self.turn()
            self._allowed_until = float("-inf")

    def stalled_s(self) -> float:
        """Seconds without a turn; 0 where that is as it should be."""
        now = time.monotonic()
        still_s = now - self._turned_at
        if still_s <= max(self.limit_s, LEAST_LIMIT_S) or now < self._allowed_until or not self._busy():
            return 0.0
        return still_s


class Health:
    """Watches the loops of one process. Use as a context manager; before the first `watch` it only answers.

    Args:
        connect: makes a client for the watching thread.
    """

    def __init__(self, member: Membership, connect: Callable[[], Client]) -> None:
        self._member = member
        self._connect = connect
        self._loops: list[Progress] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._stalled_s = 0.0
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def watch(self, loop: Progress) -> None:
        """Mind this loop from now on."""
        loop.turn()
        self._loops.append(loop)

    def serve(self, host: str, port: int) -> None:
        """Answer `/health` (200 when ready) and `/live` (200 unless stuck) on a port of our own; 0: do not.

        Raises:
            ConfigError: the port is taken.
        """
        if not port:
            return
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self))
        except OSError as e:
            raise ConfigError(
                f"--health-port (HEADRACE_HEALTH_PORT): cannot listen on {host}:{port}: {e.strerror or e}"
            ) from e
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="health server", daemon=True).start()

    @property
    def state(self) -> State:
        return "stuck" if self._stalled_s else self._member.info.state

    def said(self) -> dict[str, object]:
        """The answer of `/health`."""
        info = self._member.info
        said: dict[str, object] = {"status": self.state, "role": info.role, "id": info.id, "model": info.model}
        return said | {"stalled_s": round(self._stalled_s, 1)} if self._stalled_s else said

    def _watch(self) -> None:
        slept_at, say_at = time.monotonic(), float("-inf")
        while not self._ended.wait(LOOK_EVERY_S):
            paused, slept_at = time.monotonic() - slept_at > 4 * LOOK_EVERY_S, time.monotonic()
            if paused:  # the whole process stood still: give its loops a moment
                continue
            loop = max(self._loops, key=Progress.stalled_s, default=None)
            stalled_s = loop.stalled_s() if loop is not None else 0.0
            if loop is not None and stalled_s and not self._stalled_s:
                log.error("stuck: there is work, and no progress for %.1f s\n%s", stalled_s, _stack(loop.thread))
            elif self._stalled_s and not stalled_s:
                log.warning("no longer stuck, after %.1f s", self._stalled_s)
            self._stalled_s = stalled_s
            if stalled_s and slept_at >= say_at:
                say_at = slept_at + Membership.BEAT_EVERY_S
                self._say()

    def _say(self) -> None:
        try:
            with self._connect() as client:
                self._member.say(client, "stuck")
        except TRANSIENT as e:
            log.warning("that this process is stuck was not written: %s", e)


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-12:]) if frame is not None else "(its thread has ended)"


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = {"/health": health.state == "ready", "/live": health.state != "stuck"}.get(self.path)
            body = orjson.dumps(health.said() if good is not None else {"error": "there are /health and /live"})
            self.send_response(404 if good is None else 200 if good else 503)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A probe each few seconds is no news."""

    return Handler

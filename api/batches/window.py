"""The lines of one batch that are in the queue: a bounded few, filled up as others end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ...shared.clients import TRANSIENT
from ...shared.errors import HeadraceError, Overloaded, RequestError, StoreUnavailable, StreamGone, Unavailable
from .model import Batch, BatchEndpoint
from .results import LineResult
from .validate import RequestLine

log = logging.getLogger(__name__)

RETRY_S = 1.0
SEGMENT_LINES = 64  # results kept in memory before they are written, at most


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line on its way into the queue.

    `seed` names the work: the same seed is the same request, however often and by whomever it is submitted.
    """

    seed: str
    endpoint: BatchEndpoint
    body: dict[str, Any]
    tenant: str
    deadline_s: float


class Answerer(Protocol):
    """What answers a line: the online route's own code, behind the queue."""

    async def answer(self, request: LineRequest) -> tuple[str, dict[str, Any]]:
        """The request's id and the response body of the online route.

        Cancelling the call leaves the request in the queue; calling again finds it there.

        Raises:
            RequestError: as the online route answers it.
        """
        ...

    async def abandon(self, request: LineRequest) -> None:
        """Take the request out of the queue; nobody wants its answer."""
        ...


class Window:
    """Lines being answered. `close` forgets them here; in the queue they go on."""

    def __init__(self, batch: Batch, lines: Iterator[RequestLine], answerer: Answerer, size: int) -> None:
        self.finished: list[LineResult] = []
        self.begun = 0  # lines
        self._batch = batch
        self._lines = lines
        self._answerer = answerer
        self._size = size
        self._running: dict[asyncio.Task[LineResult], LineRequest] = {}

    @property
    def running(self) -> int:
        """How many lines are in the queue."""
        return len(self._running)

    def fill(self, deadline_s: float) -> None:
        """Submit further lines while there is room."""
        while len(self._running) < self._size and len(self.finished) < SEGMENT_LINES:
            line = next(self._lines, None)
            if line is None:
                return
            self.begun += 1
            seed = f"{self._batch.id}/{line.number}/0"
            request = LineRequest(seed, self._batch.endpoint, line.body, self._batch.tenant, deadline_s)
            self._running[asyncio.create_task(self._answer(line, request))] = request

    async def wait(self, timeout_s: float) -> None:
        """Wait until a line ends, and take all that have."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._collect()

    def take(self) -> list[LineResult]:
        """The results since the last call."""
        self._collect()
        results, self.finished = self.finished, []
        return results

    async def close(self, *, abandon: bool) -> None:
        """Stop answering. With `abandon` the lines are taken out of the queue too; else the next slice finds them."""
        left = list(self._running.values())
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        if abandon:
            await asyncio.gather(*(self._answerer.abandon(request) for request in left))

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            self.finished.append(task.result())

    async def _answer(self, line: RequestLine, request: LineRequest) -> LineResult:
        """Answer one line, waiting as long as the queue is full or away; whatever is wrong with it is its result."""
        while True:
            try:
                request_id, body = await self._answerer.answer(request)
                return LineResult(line.number, line.custom_id, request_id, 200, body)
            except Overloaded as e:
                await asyncio.sleep(e.retry_after_s)
            except (Unavailable, StoreUnavailable, StreamGone, *TRANSIENT) as e:
                log.debug("line %d of %s is sent again: %s", line.number, self._batch.id, e)
                await asyncio.sleep(RETRY_S)
            except RequestError as e:
                return LineResult(line.number, line.custom_id, _request_id(request), e.status, dict(e.body()))
            except HeadraceError as e:
                return self._failed(line, request, str(e))
            except Exception:
                log.exception("line %d of %s failed", line.number, self._batch.id)
                return self._failed(line, request, "The server failed to process this request.")

    def _failed(self, line: RequestLine, request: LineRequest, message: str) -> LineResult:
        body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        return LineResult(line.number, line.custom_id, _request_id(request), 500, body)


def _request_id(request: LineRequest) -> str:
    """The id of a request that never got one in the queue."""
    return "req_" + request.seed.replace("/", "-")

"""Lines through the online route's own code, with a request id that follows from batch and line."""

from __future__ import annotations

from typing import Any

from ..generate import Inference
from ..inputs import Caller
from ..prepare import Prepared
from .window import LineRequest

KEEP_S = 600.0  # an answer waits so long for a driver; after that its line is generated again


class QueueAnswerer:
    """Answers lines in the batch lane of the queue. Nobody's lease cancels them: a driver may come back later."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._queued: dict[str, Prepared] = {}

    async def answer(self, request: LineRequest) -> tuple[str, dict[str, Any]]:
        """See `window.Answerer`."""
        caller = Caller(tenant=request.tenant, lane="batch", deadline_s=request.deadline_s)
        prepared = await self._inference.prepare(request.endpoint, request.body, caller, request.seed)
        self._queued[request.seed] = prepared
        try:
            body: dict[str, Any] = await self._inference.complete_detached(prepared, KEEP_S)
        except Exception:  # not a cancellation: then it is still queued, and `abandon` must find it
            del self._queued[request.seed]
            raise
        del self._queued[request.seed]
        return f"req_{prepared.plan.request}", body

    async def abandon(self, request: LineRequest) -> None:
        """See `window.Answerer`."""
        prepared = self._queued.pop(request.seed, None)
        if prepared is not None:  # else it was not queued yet
            await self._inference.abandon(prepared)

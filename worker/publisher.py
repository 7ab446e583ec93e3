"""Publishing what steps make: sent before the next step, its replies read after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from ..shared.job_queue import Claim
from ..shared.logs import about
from ..shared.model_card import DEFAULT_VERSION
from ..shared.token_stream import Append, TokenStream, Written
from .held import Held
from .interface import Engine, StepOutput
from .pace import Pace

log = logging.getLogger(__name__)


class Publisher:
    """The requests that this worker holds, and the way of their tokens to Redis.

    Args:
        interval: tokens of a request that go together, after its first.
    """

    def __init__(self, engine: Engine, tokens: TokenStream, pace: Pace, interval: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._pace = pace
        self._interval = interval
        self.held: dict[str, Held] = {}

    @property
    def all_published(self) -> bool:
        """Whether every request has published a token since its claim: none would be charged for our death."""
        return not any(held.fresh for held in self.held.values())

    def leases(self) -> dict[str, float]:
        """Seconds since the renewal that lies farthest back, and seconds that a lease lasts."""
        now = time.monotonic()
        oldest = min((held.renewed_at for held in self.held.values()), default=now)
        return {"lease_age_s": round(now - oldest, 3), "lease_s": self._pace.lease_s}

    def hold(self, claim: Claim) -> None:
        """The engine has it: its tokens go out from here on."""
        told = "" if claim.produced else DEFAULT_VERSION
        self.held[claim.job.rid] = Held(claim.epoch, claim.produced, time.monotonic(), told_version=told)

    def let_go(self, rid: str) -> None:
        """It is no longer ours."""
        self._engine.abort(rid)
        self.held.pop(rid, None)

    def publish(self, outputs: Iterable[StepOutput]) -> None:
        """Send what a step made, and renew the leases of those that made nothing for a while."""
        self.settle()
        now = time.monotonic()
        self._tokens.lease_s = self._pace.lease_s
        self._tokens.begin_append([*self._made(outputs, now), *self._renewals(now)])

    def settle(self) -> None:
        """Read the replies of the flush in flight, and let go of what is no longer ours."""
        for write, written in self._tokens.finish_append():
            if written is Written.OK:
                continue
            rid = write.chunk.rid
            held = self.held.get(rid)
            if held is not None and held.epoch != write.epoch:
                continue  # lost, and claimed again by ourselves since
            if written is Written.MISPLACED:
                log.error("tokens do not follow what the stream holds; letting go", extra=about(rid))
            elif written is Written.FENCED:
                log.warning("another worker took over; letting go", extra=about(rid))
            self.let_go(rid)

    def _made(self, outputs: Iterable[StepOutput], now: float) -> Iterator[Append]:
        version = self._engine.card.weight_version
        for output in outputs:
            held = self.held.get(output.rid)
            if held is None:
                continue
            held.collect(output, version)
            if output.finish or len(held.token_ids) >= (1 if held.fresh else self._interval):
                yield held.take(output.rid, output.finish, now)
                if output.finish:
                    del self.held[output.rid]

    def _renewals(self, now: float) -> Iterator[Append]:
        oldest = now - self._pace.lease_s / 4
        for rid, held in self.held.items():
            if held.renewed_at < oldest:
                yield held.take(rid, None, now)

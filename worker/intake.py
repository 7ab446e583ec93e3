"""Taking jobs: only when somebody may wait, so that a busy worker asks Redis nothing between two steps."""

from __future__ import annotations

import logging
import time

from ..shared.chunks import Finish
from ..shared.errors import ProtocolError, RequestError
from ..shared.failpoints import failpoint
from ..shared.job_queue import Claim, JobQueue
from ..shared.logs import about
from ..shared.token_stream import TokenStream
from .adapters import PoolAdapters
from .interface import Engine
from .pace import Pace
from .publisher import Publisher

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # also without a hint: nothing depends on one arriving


class Intake:
    """From the queue into the engine.

    Args:
        owner: the worker process (a uuid).
        consumer: its name in the consumer group, of its host and slot.
    """

    def __init__(
        self,
        engine: Engine,
        queue: JobQueue,
        tokens: TokenStream,
        adapters: PoolAdapters,
        publisher: Publisher,
        pace: Pace,
        *,
        owner: str,
        consumer: str,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._tokens = tokens
        self._adapters = adapters
        self._publisher = publisher
        self._pace = pace
        self._pool = engine.card.pool
        self._owner = owner
        self._consumer = consumer
        self._somebody_may_wait = True
        self._look_at = float("-inf")
        self._suspect: str | None = None  # the rid that runs beside no other that could be charged for its death

    def hint(self) -> None:
        """Somebody has come."""
        self._somebody_may_wait = True

    def take(self) -> None:
        """Pull what there is room for, and give it to the engine."""
        now = time.monotonic()
        if not self._somebody_may_wait and now < self._look_at:
            return
        slots = self._engine.free_slots()
        if slots <= 0 or self._under_suspicion():
            return
        claims = self._queue.pull(
            self._pool,
            owner=self._owner,
            consumer=self._consumer,
            slots=slots,
            lease_s=self._pace.lease_s,
            quiet=self._publisher.all_published,
        )
        self._somebody_may_wait = self._queue.somebody_waited  # those that we left, and hints that are yet to come
        self._look_at = now + LOOK_EVERY_S
        for claim in claims:
            self._admit(claim)

    def recover(self) -> None:
        """After an outage: give back what a pull claimed for us whose reply was lost."""
        self._somebody_may_wait = True
        held = self._publisher.held
        given_back = self._queue.recover(self._pool, owner=self._owner, consumer=self._consumer, held=held)
        log.info("Redis answers again; gave back %d jobs whose hand-over was cut", given_back)

    def hand_back(self) -> None:
        """Give what runs to other workers."""
        held = self._publisher.held
        given = self._queue.release(self._owner, [(rid, one.epoch) for rid, one in held.items()])
        if given:
            log.info("handed back %d requests for another worker", given, extra=about(*held))

    def _under_suspicion(self) -> bool:
        """Whether a suspect runs that has made no token yet: nothing else is claimed until it has, or has ended."""
        held = self._publisher.held.get(self._suspect or "")
        return held is not None and held.fresh

    def _admit(self, claim: Claim) -> None:
        rid = claim.job.rid
        self._publisher.let_go(rid)  # our own lease on it may have run out, and we be the next to claim it
        failpoint("worker.claimed")
        try:
            self._adapters.admit(claim.job)
            produced = self._tokens.read_ids(rid, claim.produced) if claim.produced else []
            self._engine.add(claim.job, produced)
        except RequestError as e:
            self._fail(claim, Finish("error", message=e.message, status=e.status, param=e.param))
            return
        except ProtocolError as e:
            log.error("%s", e, extra=about(rid))
            self._fail(claim, Finish("error", message="The request's tokens were lost; send it again."))
            return
        failpoint("worker.admitted")
        # Not before the engine has it: what an outage kept from it must not be held, for `recover` to give it back.
        self._publisher.hold(claim)
        named = about(rid, http=claim.job.request_id)
        if claim.suspect:
            self._suspect = rid
            log.warning("runs alone: it has ended %d workers", claim.attempts, extra=named)
        elif claim.epoch > 1:
            log.info("taken over at token %d", claim.produced, extra=named)

    def _fail(self, claim: Claim, finish: Finish) -> None:
        self._queue.fail(self._owner, claim.job.rid, claim.epoch, claim.produced, finish)

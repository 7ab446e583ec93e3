"""The worker's loop: take jobs, step, publish; one flush is in flight beside the next step.

When a job is acknowledged: by the script that writes its end (`append` with a finish, or the detokenizer's last
`publish`), never here. What this worker holds when it dies stays in the stream until its lease runs out; then
`sweep` gives it to another, and charges it an attempt only if it published nothing since the claim.

A step costs one message to Redis, sent before the next step and its reply read after it. New jobs and commands are
heard of by a read that is always in flight (`StreamWatch`).
"""

from __future__ import annotations

import logging
import time

from ..shared import keys
from ..shared.clients import BLOCK_MS, TRANSIENT, Client
from ..shared.errors import StoreUnavailable
from ..shared.failpoints import failpoint
from ..shared.health import Progress
from ..shared.job_queue import JobQueue
from ..shared.logs import about
from ..shared.registry import Membership
from ..shared.signals import StopSignal
from ..shared.token_stream import TokenStream
from ..shared.watch import StreamWatch
from .adapters import PoolAdapters
from .control import Controller
from .intake import Intake
from .interface import Engine, StepOutput
from .meter import Meter
from .pace import Pace
from .publisher import Publisher

log = logging.getLogger(__name__)


class Worker:
    """One engine between the job queue and the token streams. Everything runs on the caller's thread."""

    def __init__(
        self,
        engine: Engine,
        queue: JobQueue,
        tokens: TokenStream,
        client: Client,
        member: Membership,
        control: Controller,
        adapters: PoolAdapters,
        *,
        owner: str,
        consumer: str,
        shards: int,
        lease_s: float,
        drain_s: float,
        stream_interval: int,
        stop: StopSignal,
    ) -> None:
        self.owner, self.consumer = owner, consumer
        self._engine = engine
        self._client = client
        self._member = member
        self._control = control
        self._pace = Pace(lease_s)
        self._publisher = Publisher(engine, tokens, self._pace, stream_interval)
        self._intake = Intake(
            engine, queue, tokens, adapters, self._publisher, self._pace, owner=owner, consumer=consumer
        )
        self.progress = Progress(lease_s, lambda: bool(self._publisher.held))
        self._meter = Meter("pull", "publish")
        self._drain_s = drain_s
        self._stop = stop
        self._watch = StreamWatch(client)
        self._hints = dict.fromkeys((keys.new_jobs(s, engine.card.pool) for s in range(shards)), b"0-0")
        self._outage = False
        self._drain_until: float | None = None

    def run(self) -> None:
        """Work until told to stop; then finish, or hand back, what runs."""
        self._member.update(state="ready")
        while self._going():
            self._listen()
            self._beat()
            ended = self._obey()
            self._meter.timed("pull", self._take_jobs)
            outputs = self._step()
            self._meter.timed("publish", self._publisher.publish, ended + outputs)
            if not self._publisher.held or self._control.standing_still:
                self._rest()
        self._publisher.settle()
        self._leave()

    def note_outage(self, error: BaseException) -> None:
        """Redis did not answer: a pull's reply may be lost with what it claimed for us.

        Raises:
            StoreUnavailable: our time to drain is over; waiting on would only delay that. Leases give our jobs back.
        """
        if not self._outage:
            log.warning("Redis does not answer, waiting for it: %s", error)
        self._outage = True
        self.progress.turn()  # who waits for Redis is not stuck
        if self._time_is_up():
            raise StoreUnavailable(f"told to stop while Redis does not answer: {error}") from error

    def _going(self) -> bool:
        self.progress.turn()
        self.progress.limit_s = self._pace.lease_s
        time_is_up = self._time_is_up()
        waits_for = bool(self._publisher.held) and not self._control.standing_still  # who stands still ends nothing
        return self._drain_until is None or (waits_for and not time_is_up)

    def _time_is_up(self) -> bool:
        """Whether we were told to stop, and what runs has had its time. The first look after the signal begins it."""
        if not self._stop.draining:
            return False
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_s
            self._member.update(state="draining")
            held = self._publisher.held
            log.info("draining: %d requests still run", len(held), extra=about(*held))
        return self._stop.immediate or time.monotonic() >= self._drain_until

    def _listen(self, wait_s: float = 0.0) -> bool:
        """Hear of new jobs and commands, `wait_s` at most. Returns whether Redis is there."""
        try:
            failpoint("worker.listen")
            for stream, newest in self._watch.news(self._hints | self._control.watched(), wait_s).items():
                if stream in self._hints:
                    self._hints[stream] = newest
                    self._intake.hint()
                else:
                    self._control.look()
        except TRANSIENT as e:
            self.note_outage(e)
            return False
        return True

    def _beat(self) -> None:
        if self._member.due():
            seconds = {f"{phase}_seconds": total for phase, total in self._meter.seconds.items()}
            self._member.update(
                running=len(self._publisher.held),
                free_slots=self._engine.free_slots(),
                stats={**self._engine.stats(), **seconds, **self._publisher.leases()},
            )
            try:
                failpoint("worker.beat")
                self._member.beat(self._client)
            except TRANSIENT as e:
                self.note_outage(e)

    def _obey(self) -> list[StepOutput]:
        """Do what the api tells every worker of the pool, between two steps."""
        try:
            return self._control.obey()
        except TRANSIENT as e:
            self.note_outage(e)
            return []

    def _take_jobs(self) -> None:
        if self._stop.draining or self._control.standing_still:
            return
        try:
            if self._outage:
                self._publisher.settle()  # an end that is still in flight would look like a job that was lost
                self._intake.recover()
                self._outage = False
            self._intake.take()
        except TRANSIENT as e:
            self.note_outage(e)

    def _step(self) -> list[StepOutput]:
        if self._control.standing_still or not self._engine.has_work():
            return []
        failpoint("worker.step")
        begun = time.monotonic()
        outputs = self._engine.step()
        self._pace.measure(time.monotonic() - begun)
        return outputs

    def _rest(self) -> None:
        """Nothing to do: check that nothing leaked, then wait for a hint or a command, a second at most."""
        self._publisher.settle()
        held = self._publisher.held
        if not held:
            self._engine.check_integrity()
        # What a paused worker holds it keeps by its leases, which it renews when they are a quarter gone.
        longest = min(BLOCK_MS, int(self._pace.lease_s * 250)) if held else BLOCK_MS
        if not self._listen(self._control.wait_ms(longest) / 1000):
            time.sleep(0.1)

    def _leave(self) -> None:
        self._intake.hand_back()
        self._watch.close()
        try:
            failpoint("worker.leave")
            self._member.leave(self._client)
            self._control.leave()
        except TRANSIENT as e:
            log.info("this process is listed until its heartbeat runs out: %s", e)

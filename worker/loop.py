"""The worker's loop: take jobs, step, publish; one flush is in flight beside the next step.

When a job is acknowledged: by the script that writes its end (`append` with a finish, or the detokenizer's last
`publish`), never here. What this worker holds when it dies stays in the stream until its lease runs out; then
`sweep` gives it to another, and charges it an attempt only if it published nothing since the claim.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..shared import keys
from ..shared.clients import BLOCK_MS, TRANSIENT, Client
from ..shared.errors import ProtocolError, RequestError, StoreUnavailable
from ..shared.job_queue import Claim, JobQueue
from ..shared.messages import DEFAULT_VERSION, Finish, PromptLogprobs, TokenChunk, TokenLogprob
from ..shared.registry import Membership
from ..shared.signals import StopSignal
from ..shared.token_stream import Append, TokenStream, Written
from .adapters import PoolAdapters
from .control import Controller
from .interface import Engine, StepOutput
from .meter import Meter
from .pace import Pace

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A request in this worker's hands: where its next token goes, and what waits to be published."""

    epoch: int
    position: int  # tokens published, or in flight
    renewed_at: float  # monotonic seconds of the last append
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int | None = None  # waits for the first chunk
    prompt: PromptLogprobs | None = None  # likewise
    weight_version: str = ""  # of the weights that made the newest token
    told_version: str = ""  # the one that was published last; "": of what another worker published we do not know
    fresh: bool = True  # no token published since the claim: the first one goes at once


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
        self._engine = engine
        self._queue = queue
        self._tokens = tokens
        self._client = client
        self._member = member
        self._control = control
        self._adapters = adapters
        self._owner = owner
        self._consumer = consumer
        self._pace = Pace(lease_s)
        self._meter = Meter("pull", "publish")
        self._drain_s = drain_s
        self._interval = stream_interval
        self._stop = stop
        self._pool = engine.card.pool
        self._hints = dict.fromkeys((keys.new_jobs(s, self._pool) for s in range(shards)), b"0-0")
        self._held: dict[str, Held] = {}
        self._suspect: str | None = None  # the rid that runs beside no other that could be charged for its death
        self._outage = False
        self._drain_until: float | None = None

    def run(self) -> None:
        """Work until told to stop; then finish, or hand back, what runs."""
        self._member.update(state="ready")
        while self._going():
            self._beat()
            ended = self._obey()
            self._meter.timed("pull", self._take_jobs)
            outputs = self._step()
            self._meter.timed("publish", self._publish, ended + outputs)
            if not self._held or self._control.standing_still:
                self._rest()
        self._settle()
        self._hand_back()

    def note_outage(self, error: BaseException) -> None:
        """Redis did not answer: a pull's reply may be lost with what it claimed for us.

        Raises:
            StoreUnavailable: our time to drain is over; waiting on would only delay that. Leases give our jobs back.
        """
        if not self._outage:
            log.warning("Redis does not answer, waiting for it: %s", error)
        self._outage = True
        if self._time_is_up():
            raise StoreUnavailable(f"told to stop while Redis does not answer: {error}") from error

    def _going(self) -> bool:
        time_is_up = self._time_is_up()
        waits_for = bool(self._held) and not self._control.standing_still  # who stands still finishes nothing
        return self._drain_until is None or (waits_for and not time_is_up)

    def _time_is_up(self) -> bool:
        """Whether we were told to stop, and what runs has had its time. The first look after the signal begins it."""
        if not self._stop.draining:
            return False
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_s
            self._member.update(state="draining")
            log.info("draining: %d requests still run", len(self._held))
        return self._stop.immediate or time.monotonic() >= self._drain_until

    def _beat(self) -> None:
        if self._member.due():
            seconds = {f"{phase}_seconds": total for phase, total in self._meter.seconds.items()}
            self._member.update(
                running=len(self._held),
                free_slots=self._engine.free_slots(),
                stats={**self._engine.stats(), **seconds},
            )
            try:
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
                self._recover()
            slots = self._engine.free_slots()
            if slots > 0 and not self._under_suspicion():
                for claim in self._pull(slots):
                    self._admit(claim)
        except TRANSIENT as e:
            self.note_outage(e)

    def _step(self) -> list[StepOutput]:
        if self._control.standing_still or not self._engine.has_work():
            return []
        begun = time.monotonic()
        outputs = self._engine.step()
        self._pace.measure(time.monotonic() - begun)
        self._tokens.lease_s = self._pace.lease_s
        return outputs

    def _pull(self, slots: int) -> list[Claim]:
        return self._queue.pull(
            self._pool,
            owner=self._owner,
            consumer=self._consumer,
            slots=slots,
            lease_s=self._pace.lease_s,
            quiet=not any(held.fresh for held in self._held.values()),
        )

    def _under_suspicion(self) -> bool:
        """Whether a suspect runs that has made no token yet: nothing else is claimed until it has, or has ended."""
        held = self._held.get(self._suspect or "")
        return held is not None and held.fresh

    def _recover(self) -> None:
        self._settle()  # an end that is still in flight would look like a job that was lost
        given_back = self._queue.recover(self._pool, owner=self._owner, consumer=self._consumer, held=self._held)
        self._outage = False
        log.info("Redis answers again; gave back %d jobs whose hand-over was cut", given_back)

    def _admit(self, claim: Claim) -> None:
        """Give a claimed job to the engine."""
        rid = claim.job.rid
        self._let_go(rid)  # our own lease on it may have run out, and we be the next to claim it
        try:
            self._adapters.admit(claim.job)
            produced = self._tokens.read_ids(rid, claim.produced) if claim.produced else []
            self._engine.add(claim.job, produced)
        except RequestError as e:
            self._fail(claim, Finish("error", message=e.message, status=e.status, param=e.param))
            return
        except ProtocolError as e:
            log.error("%s", e, extra={"request_id": rid})
            self._fail(claim, Finish("error", message="The request's tokens were lost; send it again."))
            return
        # Not before the engine has it: what an outage kept from it must not be held, for `recover` to give it back.
        self._held[rid] = Held(
            claim.epoch, claim.produced, time.monotonic(), told_version="" if claim.produced else DEFAULT_VERSION
        )
        if claim.suspect:
            self._suspect = rid

    def _fail(self, claim: Claim, finish: Finish) -> None:
        self._queue.fail(self._owner, claim.job.rid, claim.epoch, claim.produced, finish)

    def _publish(self, outputs: list[StepOutput]) -> None:
        self._settle()
        self._flush(outputs)

    def _flush(self, outputs: Iterable[StepOutput]) -> None:
        """Publish what a step made, and renew the leases of those that made nothing for a while."""
        now, writes = time.monotonic(), []
        for output in outputs:
            held = self._held.get(output.rid)
            if held is None:
                continue
            self._collect(held, output, self._engine.card.weight_version)
            enough = 1 if held.fresh else self._interval
            if output.finish or len(held.token_ids) >= enough:
                writes.append(self._write(output.rid, held, output.finish, now))
                if output.finish:
                    del self._held[output.rid]
        for rid, held in self._held.items():
            if now - held.renewed_at > self._pace.lease_s / 4:
                writes.append(self._write(rid, held, None, now))
        self._tokens.begin_append(writes)

    @staticmethod
    def _collect(held: Held, output: StepOutput, version: str) -> None:
        held.token_ids.extend(output.token_ids)
        if output.token_ids:
            held.weight_version = version
        if output.logprobs is not None:
            held.logprobs.extend(output.logprobs)
        if output.cached_tokens is not None:
            held.cached_tokens = output.cached_tokens
        if output.prompt is not None:
            held.prompt = output.prompt

    @staticmethod
    def _write(rid: str, held: Held, finish: Finish | None, now: float) -> Append:
        ids, logprobs = tuple(held.token_ids), tuple(held.logprobs)
        version = held.weight_version if ids and held.weight_version != held.told_version else None
        chunk = TokenChunk(
            rid, held.position, ids, logprobs or None, finish, held.cached_tokens, held.prompt, weight_version=version
        )
        if ids:
            held.position += len(ids)
            held.token_ids, held.logprobs, held.fresh = [], [], False
            held.cached_tokens = held.prompt = None
        held.told_version = version or held.told_version
        held.renewed_at = now
        return Append(held.epoch, chunk)

    def _settle(self) -> None:
        """Read the replies of the flush in flight, and let go of what is no longer ours."""
        for write, written in self._tokens.finish_append():
            rid, held = write.chunk.rid, self._held.get(write.chunk.rid)
            if written is Written.OK or (held is not None and held.epoch != write.epoch):
                continue  # written; or lost, and claimed again by ourselves since
            if written is Written.MISPLACED:
                log.error("tokens do not follow what the stream holds; letting go", extra={"request_id": rid})
            elif written is Written.FENCED:
                log.warning("another worker took over; letting go", extra={"request_id": rid})
            self._let_go(rid)

    def _let_go(self, rid: str) -> None:
        self._engine.abort(rid)
        self._held.pop(rid, None)

    def _rest(self) -> None:
        """Nothing to do: check that nothing leaked, then wait for a hint or a command, a second at most."""
        self._settle()
        if not self._held:
            self._engine.check_integrity()
        # What a paused worker holds it keeps by its leases, which it renews when they are a quarter gone.
        longest = min(BLOCK_MS, int(self._pace.lease_s * 250)) if self._held else BLOCK_MS
        watched, block_ms = self._hints | self._control.watched(), self._control.wait_ms(longest)
        try:
            for stream, entries in self._client.xread(watched, block=block_ms) or []:
                if stream.decode() in self._hints:
                    self._hints[stream.decode()] = entries[-1][0]
                else:
                    self._control.look()
        except TRANSIENT as e:
            self.note_outage(e)
            time.sleep(0.1)

    def _hand_back(self) -> None:
        given = self._queue.release(self._owner, [(rid, held.epoch) for rid, held in self._held.items()])
        if given:
            log.info("handed back %d requests for another worker", given)
        try:
            self._member.leave(self._client)
            self._control.leave()
        except TRANSIENT as e:
            log.info("this process is listed until its heartbeat runs out: %s", e)

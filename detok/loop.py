"""The detokenizer's loop: hear which requests moved, read their tokens, decode, publish.

Hints may be missed or trimmed; `_look_over` finds what they would have told. Leases of shards are renewed, and workers'
leases judged (`sweep`), between slices of work, by the loop itself: a detokenizer that hangs loses its shards.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from ..shared import keys
from ..shared.clients import BLOCK_MS, TRANSIENT, Client, Patience
from ..shared.errors import StoreUnavailable
from ..shared.job_queue import JobQueue
from ..shared.registry import Membership
from ..shared.signals import StopSignal
from .shards import Shards
from .streams import Streams
from .vocabularies import Vocabularies

log = logging.getLogger(__name__)

LOOK_OVER_EVERY_S = 5.0
SWEEP_EVERY_S = 1.0


class Detokenizer:
    """Token streams of the leased shards in, text streams out. Everything runs on the caller's thread.

    Args:
        lease_s: a worker's lease: after an outage none is judged for so long.
        text_budget: bytes of finished text to keep in each shard.
        slice_requests: requests read and published at once.
    """

    def __init__(
        self,
        shards: Shards,
        streams: Streams,
        vocabularies: Vocabularies,
        queue: JobQueue,
        client: Client,
        member: Membership,
        *,
        lease_s: float,
        text_budget: int,
        slice_requests: int,
        stop: StopSignal,
    ) -> None:
        self._shards = shards
        self._streams = streams
        self._vocabularies = vocabularies
        self._queue = queue
        self._client = client
        self._member = member
        self._lease_s = lease_s
        self._text_budget = text_budget
        self._slice = slice_requests
        self._stop = stop
        self._hints: dict[str, bytes] = {}  # wake stream → last entry read
        self._moved: deque[str] = deque()  # rids to look at: heard of, or looked up
        self._patience = Patience(None)
        self._connected_at = time.monotonic()
        self._outage = False
        self._sweep_at = self._look_over_at = float("-inf")

    def run(self) -> None:
        """Work until told to stop, then leave the shards to others."""
        self._member.update(state="ready")
        while not self._stop.draining:
            try:
                self._keep_shards()
                self._sweep()
                self._look_over()
                self._listen()
                self._decode()
                self._recovered()
            except TRANSIENT as e:
                self._log_outage(e)
                self._patience.wait(e)
            except StoreUnavailable:
                break
        self._leave()

    def note_outage(self, error: BaseException) -> None:
        """Redis did not answer to a script, which is called again.

        Raises:
            StoreUnavailable: we were told to stop; waiting on would only delay that.
        """
        self._log_outage(error)
        if self._stop.draining:
            raise StoreUnavailable("told to stop while Redis does not answer") from error

    def _log_outage(self, error: BaseException) -> None:
        if not self._outage:
            log.warning("Redis does not answer, waiting for it: %s", error)
        self._outage = True

    def _recovered(self) -> None:
        """After an outage everything is read anew: a store that lost its tail goes on with other tokens than ours."""
        if self._outage:
            self._outage, self._patience, self._connected_at = False, Patience(None), time.monotonic()
            for shard in list(self._streams.shards):
                self._streams.forget(shard)  # and begun again in the next turn
            log.info("Redis answers again")

    def _keep_shards(self) -> None:
        if self._shards.due_in_s == 0:
            self._member.update(shards=sorted(self._shards.epochs), streams=len(self._streams))
            self._member.beat(self._client)
            self._shards.keep()
        for shard in self._streams.shards - self._shards.epochs.keys():
            self._forget(shard)
        for shard in self._shards.epochs.keys() - self._streams.shards:
            self._begin(shard)

    def _forget(self, shard: int) -> None:
        self._streams.forget(shard)
        self._hints.pop(keys.wake(shard), None)
        log.info("left shard %d", shard)

    def _begin(self, shard: int) -> None:
        """Hints count from here on; all that is unfinished is looked at once."""
        last = self._client.xrevrange(keys.wake(shard), count=1)
        unfinished = self._streams.begin(shard)
        self._hints[keys.wake(shard)] = last[0][0] if last else b"0-0"
        self._moved.extend(unfinished)
        log.info("took shard %d with %d unfinished requests", shard, len(unfinished))

    def _sweep(self) -> None:
        """Each second: what is due in our shards. Idle times ran on during an outage, so leases are judged later."""
        now = time.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_EVERY_S
        reclaim = now - self._connected_at > self._lease_s
        for shard in self._streams.shards:
            if self._queue.sweep(shard, reclaim=reclaim, text_budget=self._text_budget):
                self._sweep_at = now  # there is more

    def _look_over(self) -> None:
        """Every few seconds: each unfinished request, whether heard of or not, and models that are new."""
        now = time.monotonic()
        if now >= self._look_over_at:
            self._look_over_at = now + LOOK_OVER_EVERY_S
            waiting = set(self._moved)
            for shard in self._streams.shards:
                self._moved.extend(rid for rid in self._streams.look_over(shard) if rid not in waiting)
            self._vocabularies.prepare()

    def _listen(self) -> None:
        """Hear which requests moved; wait for it when there is nothing else to do."""
        wait_s = min(self._shards.due_in_s, BLOCK_MS / 1000)
        if not self._hints:
            time.sleep(wait_s)
            return
        block = None if self._moved else max(1, int(wait_s * 1000))
        for stream, entries in self._client.xread(self._hints, block=block) or ():
            self._hints[stream.decode()] = entries[-1][0]
            for _, fields in entries:
                self._moved.extend(fields[b"r"].decode().split(" "))

    def _decode(self) -> None:
        """Decode and publish the next slice of what moved."""
        rids: dict[str, None] = {}  # each once, in order
        while self._moved and len(rids) < self._slice:
            rids[self._moved.popleft()] = None
        writes, more = self._streams.decode(rids)
        again = self._streams.publish(writes, self._shards.epochs)
        self._moved.extend([*more, *again])
        for shard in self._shards.epochs.keys() - self._streams.shards:
            self._shards.lost(shard)
            self._forget(shard)

    def _leave(self) -> None:
        try:
            self._shards.give_up(list(self._shards.epochs))
            self._member.leave(self._client)
        except (*TRANSIENT, StoreUnavailable) as e:
            log.warning("left without giving up the shards, their leases run out: %s", e)

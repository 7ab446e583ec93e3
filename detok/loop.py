"""The detokenizer's loop: hear what came, decode, publish.

Tokens are pushed to it, and read from their streams where a push may have been missed: `_look_over` finds what it would
have told. Text is sent, and the reply read when the next tokens come. Leases of shards are renewed, and workers' leases
judged (`sweep`), between slices of work, by the loop itself: a detokenizer that hangs loses its shards.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection

from ..shared import keys
from ..shared.channels import Channels
from ..shared.chunks import TokenChunk
from ..shared.clients import BLOCK_MS, TRANSIENT, Client, Patience
from ..shared.errors import StoreUnavailable
from ..shared.failpoints import failpoint
from ..shared.health import Progress
from ..shared.job_queue import JobQueue
from ..shared.registry import Membership
from ..shared.signals import StopSignal
from ..shared.token_stream import decode_news
from .shards import Shards
from .streams import Streams
from .vocabularies import Vocabularies

log = logging.getLogger(__name__)

LOOK_OVER_EVERY_S = 5.0
REPLY_WAITS_S = 0.05  # the longest that the reply to a publish lies unread: it may say that text must be sent again
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
        self.progress = Progress(shards.lease_s, lambda: len(streams) > 0)
        self._channels = Channels(client)
        self._moved: deque[tuple[str, TokenChunk | None]] = deque()  # rids to look at, with tokens that were pushed
        self._patience = Patience(None)
        self._connected_at = time.monotonic()
        self._outage = False
        self._sweep_at = self._look_over_at = float("-inf")

    def run(self) -> None:
        """Work until told to stop, then leave the shards to others."""
        self._member.update(state="ready")
        while not self._stop.draining:
            self.progress.turn()
            try:
                self._keep_shards()
                self._sweep()
                self._look_over()
                self._listen()
                self._settle()
                self._decode()
                self._recovered()
            except TRANSIENT as e:
                self._log_outage(e)
                self._start_anew()
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
        self.progress.turn()  # who waits for Redis is not stuck

    def _recovered(self) -> None:
        """After an outage everything is read anew: a store that lost its tail goes on with other tokens than ours."""
        if self._outage:
            self._outage, self._patience, self._connected_at = False, Patience(None), time.monotonic()
            self._start_anew()
            log.info("Redis answers again")

    def _start_anew(self) -> None:
        """Forget all; the next turn begins every shard that we lease again."""
        self._channels.close()
        for shard in list(self._streams.shards):
            self._streams.forget(shard)

    def _keep_shards(self) -> None:
        if self._shards.due_in_s == 0:
            self._settle()  # what it says is of the leases before
            held = self._streams.shards
            stats = {**self._streams.stats, "streams": len(self._streams), "shards": len(held)}
            self._member.update(shards=sorted(self._shards.epochs), streams=len(self._streams), stats=stats)
            failpoint("detok.beat")
            self._member.beat(self._client)
            self._shards.keep()
        if gone := self._streams.shards - self._shards.epochs.keys():
            self._forget(gone)
        if new := self._shards.epochs.keys() - self._streams.shards:
            self._begin(new)

    def _forget(self, shards: Collection[int]) -> None:
        for shard in shards:
            self._streams.forget(shard)
            log.info("left shard %d", shard)
        self._channels.unsubscribe([keys.wake(shard) for shard in shards])

    def _begin(self, shards: Collection[int]) -> None:
        """Pushes are heard from here on; all that is unfinished is looked at once."""
        self._channels.subscribe([keys.wake(shard) for shard in shards])
        failpoint("detok.subscribed")
        for shard in shards:
            unfinished = self._streams.begin(shard)
            self._moved.extend((rid, None) for rid in unfinished)
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
            waiting = {rid for rid, _ in self._moved}
            failpoint("detok.look_over")
            for shard in self._streams.shards:
                self._moved.extend((rid, None) for rid in self._streams.look_over(shard) if rid not in waiting)
            self._vocabularies.prepare()

    def _listen(self) -> None:
        """Hear what came; wait for it when there is nothing else to do."""
        wait_s = 0.0 if self._moved else min(self._shards.due_in_s, BLOCK_MS / 1000)
        if self._streams.in_flight:
            wait_s = min(wait_s, REPLY_WAITS_S)
        if not self._streams.shards:
            time.sleep(wait_s)
            return
        for message in self._channels.messages(wait_s):
            self._moved.extend(decode_news(message))

    def _settle(self) -> None:
        """Read what became of the text that was sent."""
        self._moved.extend((rid, None) for rid in self._streams.settle())
        lost = self._shards.epochs.keys() - self._streams.shards
        for shard in lost:
            self._shards.lost(shard)
        if lost:
            self._forget(lost)

    def _decode(self) -> None:
        """Decode the next slice of what came, and send its text."""
        rids: dict[str, bool] = {}  # each once, in order; whether all that came of it was pushed
        pushed: dict[str, list[TokenChunk]] = {}
        while self._moved and len(rids) < self._slice:
            rid, chunk = self._moved.popleft()
            rids[rid] = rids.get(rid, True) and chunk is not None
            if chunk is not None:
                pushed.setdefault(rid, []).append(chunk)
        writes, more = self._streams.decode(rids, {rid: chunks for rid, chunks in pushed.items() if rids[rid]})
        failpoint("detok.decoded")
        self._streams.publish(writes, self._shards.epochs)
        self._moved.extend((rid, None) for rid in more)

    def _leave(self) -> None:
        try:
            self._streams.settle()
            self._channels.close()
            failpoint("detok.leave")
            self._shards.give_up(list(self._shards.epochs))
            self._member.leave(self._client)
        except (*TRANSIENT, StoreUnavailable) as e:
            log.warning("left without giving up the shards, their leases run out: %s", e)

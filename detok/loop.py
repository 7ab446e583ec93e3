"""The detokenizer's loop: hear which requests moved, read their tokens, decode, publish.

Nothing here has to survive: *publish* writes text, position and decoder state in one step, so what this process knows
beyond that is read again by whoever leases the shard next. A position that is not what Redis holds (a lost reply, a
store that lost its tail) makes us forget the request and read it anew. Hints may be missed; `_look_over` finds those.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ..shared import keys
from ..shared.clients import BLOCK_MS, TRANSIENT, Client, Patience
from ..shared.errors import ProtocolError, StoreUnavailable
from ..shared.ids import shard_in
from ..shared.job_queue import JobQueue
from ..shared.messages import Finish, TextChunk, TokenChunk, Usage
from ..shared.registry import Membership, get_blob
from ..shared.signals import StopSignal
from ..shared.text_stream import DecodeRecord, Publish, Published, TextStream
from ..shared.token_stream import TokenStream
from .shards import Shards
from .state import DecodeState
from .vocab import Vocabulary

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
        queue: JobQueue,
        tokens: TokenStream,
        text: TextStream,
        client: Client,
        member: Membership,
        *,
        lease_s: float,
        text_budget: int,
        slice_requests: int,
        stop: StopSignal,
    ) -> None:
        self._shards = shards
        self._queue = queue
        self._tokens = tokens
        self._text = text
        self._client = client
        self._member = member
        self._lease_s = lease_s
        self._text_budget = text_budget
        self._slice = slice_requests
        self._stop = stop
        self._states: dict[int, dict[str, DecodeState]] = {}  # by shard
        self._hints: dict[str, bytes] = {}  # wake stream → last entry read
        self._waiting: deque[str] = deque()  # rids to look at, heard of or looked up
        self._vocabulary = lru_cache(maxsize=32)(self._read_vocabulary)
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
                self._listen()
                self._publish(self._decode(self._next_slice()))
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

    def warm(self, tokenizers: Iterable[str]) -> None:
        """Load tokenizers before the first request needs them: a large one takes seconds."""
        for sha256 in set(tokenizers):
            try:
                self._vocabulary(sha256)
            except ProtocolError as e:
                log.error("%s", e)

    def _log_outage(self, error: BaseException) -> None:
        if not self._outage:
            log.warning("Redis does not answer, waiting for it: %s", error)
        self._outage = True

    def _recovered(self) -> None:
        """After an outage everything is read anew: a store that lost its tail goes on with other tokens than ours."""
        if self._outage:
            self._outage, self._patience, self._connected_at = False, Patience(None), time.monotonic()
            self._states.clear()
            self._hints.clear()
            log.info("Redis answers again")

    def _keep_shards(self) -> None:
        if self._shards.due_in_s == 0:
            streams = sum(map(len, self._states.values()))
            self._member.update(shards=sorted(self._shards.epochs), streams=streams)
            self._member.beat(self._client)
            self._shards.keep()
        for shard in self._states.keys() - self._shards.epochs.keys():
            self._forget_shard(shard)
        for shard in self._shards.epochs.keys() - self._states.keys():
            self._begin_shard(shard)

    def _begin_shard(self, shard: int) -> None:
        """Hints count from here on; all that is unfinished is looked at once."""
        last = self._client.xrevrange(keys.wake(shard), count=1)
        unfinished = self._text.unfinished(shard)
        self._hints[keys.wake(shard)] = last[0][0] if last else b"0-0"
        self._states[shard] = {}
        self._waiting.extend(unfinished)
        log.info("took shard %d with %d unfinished requests", shard, len(unfinished))

    def _forget_shard(self, shard: int) -> None:
        self._shards.lost(shard)
        self._hints.pop(keys.wake(shard), None)
        if self._states.pop(shard, None) is not None:
            log.info("left shard %d", shard)

    def _sweep(self) -> None:
        """Each second: what is due in our shards. Idle times ran on during an outage, so leases are judged later."""
        now = time.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_EVERY_S
        reclaim = now - self._connected_at > self._lease_s
        for shard in self._states:
            if self._queue.sweep(shard, reclaim=reclaim, text_budget=self._text_budget):
                self._sweep_at = now  # there is more
        if now >= self._look_over_at:
            self._look_over_at = now + LOOK_OVER_EVERY_S
            self._look_over()

    def _look_over(self) -> None:
        """Hints are trimmed, and may be missed: look at every unfinished request, and forget those that are gone."""
        for shard, states in self._states.items():
            unfinished = set(self._text.unfinished(shard))
            for rid in states.keys() - unfinished:
                del states[rid]
            self._waiting.extend(unfinished.difference(self._waiting))

    def _listen(self) -> None:
        """Hear which requests moved; wait for it when there is nothing else to do."""
        wait_s = min(self._shards.due_in_s, BLOCK_MS / 1000)
        if not self._hints:
            time.sleep(wait_s)
            return
        block = None if self._waiting else max(1, int(wait_s * 1000))
        for stream, entries in self._client.xread(self._hints, block=block) or ():
            self._hints[stream.decode()] = entries[-1][0]
            for _, fields in entries:
                self._waiting.extend(fields[b"r"].decode().split(" "))

    def _next_slice(self) -> list[str]:
        """The next rids to look at, each once."""
        rids: dict[str, None] = {}
        while self._waiting and len(rids) < self._slice:
            rids[self._waiting.popleft()] = None
        return [rid for rid in rids if shard_in(rid) in self._states]

    def _decode(self, rids: Sequence[str]) -> dict[int, list[Publish]]:
        """Read what is new of these requests, and decode it."""
        records = self._records([rid for rid in rids if rid not in self._states[shard_in(rid)]])
        after = {rid: record.consumed for rid, record in records.items()}
        after |= {rid: state.consumed for rid in rids if (state := self._states[shard_in(rid)].get(rid)) is not None}
        writes: dict[int, list[Publish]] = {}
        for rid, chunks in (self._tokens.read(after) if after else {}).items():
            write = self._push(rid, chunks, records.get(rid))
            if write is not None:
                writes.setdefault(shard_in(rid), []).append(write)
        return writes

    def _records(self, rids: Sequence[str]) -> Mapping[str, DecodeRecord]:
        """State of requests that we do not hold. One that another release wrote is left to a role of that release."""
        try:
            return self._text.records(rids) if rids else {}
        except ProtocolError as e:
            if len(rids) == 1:
                log.error("%s", e, extra={"request_id": rids[0]})
                return {}
        return {rid: record for one in rids for rid, record in self._records([one]).items()}

    def _push(self, rid: str, chunks: Sequence[TokenChunk], record: DecodeRecord | None) -> Publish | None:
        states = self._states[shard_in(rid)]
        try:
            if record is not None:
                vocab = self._vocabulary(record.params.tokenizer)
                states[rid] = DecodeState.decode(record.state, rid, record.params, vocab)
            state = states[rid]
            before = state.published
            chunk = state.push(merge(chunks))
        except ProtocolError as e:
            log.error("%s", e, extra={"request_id": rid})
            return self._failed(rid, record)
        return None if chunk is None else Publish(chunk, before, state.published, state.encode())

    def _failed(self, rid: str, record: DecodeRecord | None) -> Publish | None:
        """End a request that cannot be decoded; one that we hold is read anew first."""
        self._states[shard_in(rid)].pop(rid, None)
        if record is None:
            self._waiting.append(rid)
            return None
        finish = Finish("error", message="The request's tokens cannot be decoded.")
        usage = Usage(record.params.prompt_tokens, record.consumed)
        chunk = TextChunk(rid, record.offset, "", usage, finish=finish)
        return Publish(chunk, record.consumed, record.consumed, record.state)

    def _publish(self, writes: Mapping[int, Sequence[Publish]]) -> None:
        """One call per shard, all in one round trip; then let go of what is no longer ours, or has ended."""
        flushes = {shard: (self._shards.epochs[shard], group) for shard, group in writes.items()}
        results = self._text.publish_all(flushes) if flushes else {}
        for shard, group in writes.items():
            for write in group:
                self._settle(shard, write.chunk, results[write.chunk.rid])

    def _settle(self, shard: int, chunk: TextChunk, result: Published) -> None:
        if result is Published.SHARD_LOST:
            self._forget_shard(shard)
        elif result is not Published.OK or chunk.finish is not None:
            self._states.get(shard, {}).pop(chunk.rid, None)
        if result is Published.MISPLACED:
            self._waiting.append(chunk.rid)

    def _read_vocabulary(self, sha256: str) -> Vocabulary:
        return Vocabulary.from_blob(get_blob(self._client, sha256))

    def _leave(self) -> None:
        try:
            self._shards.give_up(list(self._shards.epochs))
            self._member.leave(self._client)
        except (*TRANSIENT, StoreUnavailable) as e:
            log.warning("left without giving up the shards, their leases run out: %s", e)


def merge(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Chunks of one request that follow one another, as one: one flush, one chunk of text."""
    if len(chunks) == 1:
        return chunks[0]
    first, last = chunks[0], chunks[-1]
    logprobs = [p for chunk in chunks if chunk.logprobs is not None for p in chunk.logprobs]
    return TokenChunk(
        first.rid,
        first.start,
        tuple([i for chunk in chunks for i in chunk.token_ids]),
        tuple(logprobs) or None,
        last.finish,
        next((chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None), None),
    )

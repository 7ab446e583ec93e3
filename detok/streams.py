"""The choices that this process decodes, by shard: their tokens are read, decoded and published.

Nothing here has to survive: *publish* writes text, position and decoder state in one step, so what is known beyond that
is read again by whoever leases the shard next. A position that is not what Redis holds (a lost reply, a store that lost
its tail) makes us forget the choice and read it anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from ..shared.chunks import Finish, TextChunk, TokenChunk, Usage
from ..shared.errors import ProtocolError
from ..shared.failpoints import failpoint
from ..shared.ids import shard_in
from ..shared.logs import about
from ..shared.text_stream import DecodeRecord, Publish, Published, TextStream
from ..shared.token_stream import TokenStream
from .state import DecodeState
from .vocab import Vocabulary

log = logging.getLogger(__name__)

READ_ENTRIES = 256  # of one choice at once: leases are renewed between slices, also where much has piled up


class Streams:
    """Decode states of unfinished choices.

    Args:
        vocabulary: the vocabulary of a tokenizer's hash; raises ProtocolError when there is none.
    """

    def __init__(self, tokens: TokenStream, text: TextStream, vocabulary: Callable[[str], Vocabulary]) -> None:
        self._tokens = tokens
        self._text = text
        self._vocabulary = vocabulary
        self._states: dict[str, DecodeState] = {}
        self.shards: set[int] = set()  # begun and not forgotten
        self.stats = {"tokens": 0, "chunks": 0, "rereads": 0}  # published since the start; told with each heartbeat

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, shard: int) -> list[str]:
        """Take up a shard; returns all that is unfinished there."""
        unfinished = self._text.unfinished(shard)
        self.shards.add(shard)
        return unfinished

    def forget(self, shard: int) -> None:
        self.shards.discard(shard)
        for rid in self._held(shard):
            del self._states[rid]

    def look_over(self, shard: int) -> list[str]:
        """All that is unfinished in a shard; states of what is gone are dropped."""
        unfinished = self._text.unfinished(shard)
        for rid in set(self._held(shard)).difference(unfinished):
            del self._states[rid]
        return unfinished

    def decode(
        self, rids: Collection[str], pushed: Mapping[str, Sequence[TokenChunk]] = MappingProxyType({})
    ) -> tuple[dict[int, list[Publish]], list[str]]:
        """Decode what is new of these choices: what was `pushed`, where it follows what we have, and what their streams
        hold otherwise. Those of shards that are not ours are left alone.

        Returns:
            What to publish, by shard, and the choices that have more to read.
        """
        held = {rid: state for rid in rids if (state := self._states.get(rid)) is not None}
        at_hand = {rid: pushed[rid] for rid, state in held.items() if _follow(pushed.get(rid, ()), state.consumed)}
        records = self._records([rid for rid in rids if rid not in held and shard_in(rid) in self.shards])
        after = {rid: state.consumed for rid, state in held.items() if rid not in at_hand}
        after |= {rid: record.consumed for rid, record in records.items()}
        failpoint("detok.read")
        writes: dict[int, list[Publish]] = {}
        more = []
        for rid, chunks in (at_hand | (self._tokens.read(after, READ_ENTRIES) if after else {})).items():
            if rid in after and len(chunks) == READ_ENTRIES:
                more.append(rid)
                chunks = chunks[:-1]  # a finish is read together with the token that it judges
            write = self._push(rid, chunks, records.get(rid))
            if write is not None:
                writes.setdefault(shard_in(rid), []).append(write)
        return writes, more

    @property
    def in_flight(self) -> bool:
        """Whether `settle` has something to read."""
        return self._text.in_flight

    def publish(self, writes: Mapping[int, Sequence[Publish]], epochs: Mapping[int, int]) -> None:
        """Send text, one call per shard; `settle` comes before the next time."""
        for shard in writes.keys() - epochs.keys():
            self.forget(shard)
        self._text.begin_publish({shard: (epochs[shard], writes[shard]) for shard in writes if shard in epochs})

    def settle(self) -> list[str]:
        """Read what became of the text that was sent. Returns what has to be read anew.

        Choices that ended are dropped, and shards that another detokenizer leases are forgotten.
        """
        again = []
        for write, published in self._text.finish_publish():
            self._settle(write.chunk, published)
            if published is Published.OK:
                self.stats["tokens"] += write.after - write.before
                self.stats["chunks"] += write.visible
            elif published is Published.MISPLACED:
                self.stats["rereads"] += 1
                again.append(write.chunk.rid)
        return again

    def _held(self, shard: int) -> list[str]:
        return [rid for rid in self._states if shard_in(rid) == shard]

    def _settle(self, chunk: TextChunk, result: Published) -> None:
        if result is Published.SHARD_LOST:
            self.forget(shard_in(chunk.rid))
        elif result is not Published.OK or chunk.finish is not None:
            self._states.pop(chunk.rid, None)

    def _records(self, rids: Sequence[str]) -> Mapping[str, DecodeRecord]:
        """Records of choices that we do not hold. One that another release wrote is left to a role of that release."""
        try:
            return self._text.records(rids) if rids else {}
        except ProtocolError as e:
            if len(rids) == 1:
                log.error("%s", e, extra=about(rids[0]))
                return {}
        return {rid: record for one in rids for rid, record in self._records([one]).items()}

    def _push(self, rid: str, chunks: Sequence[TokenChunk], record: DecodeRecord | None) -> Publish | None:
        try:
            if record is not None:
                vocab = self._vocabulary(record.params.tokenizer)
                self._states[rid] = DecodeState.decode(record.state, rid, record.params, vocab)
            state = self._states[rid]
            before = state.published
            chunk = state.push(merge(chunks))
        except ProtocolError as e:
            log.error("%s", e, extra=about(rid))
            self._states.pop(rid, None)
            return None if record is None else self._failed(rid, record)  # the next look reads its record
        return None if chunk is None else Publish(chunk, before, state.published, state.encode())

    @staticmethod
    def _failed(rid: str, record: DecodeRecord) -> Publish:
        finish = Finish("error", message="The request's tokens cannot be decoded.")
        usage = Usage(record.params.prompt_tokens, record.consumed)
        chunk = TextChunk(rid, record.offset, "", usage, finish=finish)
        return Publish(chunk, record.consumed, record.consumed, record.state)


def _follow(chunks: Sequence[TokenChunk], consumed: int) -> bool:
    """Whether there are chunks, and no token is missing or there twice."""
    for chunk in chunks:
        if chunk.start != consumed:
            return False
        consumed += len(chunk.token_ids)
    return bool(chunks)


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
        first.prompt,
        next((chunk.weight_version for chunk in reversed(chunks) if chunk.weight_version is not None), None),
    )

"""Text of requests: published by the detokenizer that leases their shard, followed by whoever answers the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from . import keys
from .chunks import TextChunk
from .clients import Client
from .errors import ProtocolError
from .ids import shard_in
from .messages import DecodeParams
from .scripts import Call, Scripts


class Published(IntEnum):
    """What became of one request's publish."""

    OK = 1
    SHARD_LOST = -1  # another detokenizer leases the shard: forget all of it
    ENDED = -2  # done, or gone
    MISPLACED = -3  # somebody published in between: read the request's state again


@dataclass(frozen=True, slots=True)
class Publish:
    """One request's part of a flush: the chunk covers tokens `before … after`, and `state` goes on from there.

    A chunk with no text, ids, logprobs or finish is not shown to readers; it only moves the position.
    """

    chunk: TextChunk
    before: int  # tokens consumed before
    after: int  # tokens consumed with it
    state: bytes  # the detokenizer's state as of `after`

    @property
    def visible(self) -> bool:
        c = self.chunk
        return bool(c.text or c.token_ids or c.logprobs or c.prompt_logprobs or c.finish)


@dataclass(frozen=True, slots=True)
class DecodeRecord:
    """What a detokenizer needs to take over a request: its options, and its state as of c tokens and o bytes."""

    params: DecodeParams
    consumed: int
    offset: int
    state: bytes


class ShardLease:
    """The leases of shards. Owner and epoch fence every publish."""

    def __init__(self, scripts: Scripts, owner: str, lease_s: float) -> None:
        self._scripts = scripts
        self._owner = owner
        self._lease_ms = int(lease_s * 1000)

    def take(self, shards: Sequence[int]) -> dict[int, int]:
        """Take or renew; returns the epoch of each shard that is ours now."""
        calls = [Call("lease", shard, (self._owner, self._lease_ms)) for shard in shards]
        epochs = self._scripts.call_many(calls) if calls else []
        return {shard: int(epoch) for shard, epoch in zip(shards, epochs, strict=True) if epoch}

    def give_up(self, shards: Sequence[int]) -> None:
        """Leave shards to others at once."""
        if shards:
            self._scripts.call_many([Call("lease", shard, (self._owner, 0)) for shard in shards])


class TextStream:
    """The streams `x:<rid>`, for the detokenizer.

    Args:
        scripts: for this alone, since a flush may be in flight on them.
        owner: the detokenizer process (a uuid).
    """

    def __init__(self, client: Client, scripts: Scripts, owner: str) -> None:
        self._client = client
        self._scripts = scripts
        self._owner = owner
        self._in_flight: tuple[list[Call], list[Publish]] | None = None

    def publish(self, shard: int, epoch: int, writes: Sequence[Publish]) -> dict[str, Published]:
        """Publish one flush of a shard, in one round trip."""
        self.begin_publish({shard: (epoch, writes)} if writes else {})
        return {write.chunk.rid: published for write, published in self.finish_publish()}

    def begin_publish(self, flushes: Mapping[int, tuple[int, Sequence[Publish]]]) -> None:
        """Send shard → (epoch, writes), one call per shard, and come back at once. One flush may be in flight."""
        assert self._in_flight is None, "a flush is in flight already: finish it first"
        if not flushes:
            return
        calls = [
            Call("publish", shard, [self._owner, epoch, *(arg for w in writes for arg in _encode(w))])
            for shard, (epoch, writes) in flushes.items()
        ]
        self._in_flight = (calls, [write for _, writes in flushes.values() for write in writes])
        self._scripts.begin_quietly(calls)

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def finish_publish(self) -> list[tuple[Publish, Published]]:
        """What became of each write of the flush in flight; nothing if there is none."""
        if self._in_flight is None:
            return []
        (calls, writes), self._in_flight = self._in_flight, None
        replies = self._scripts.finish(calls)
        return list(zip(writes, (Published(code) for reply in replies for code in reply), strict=True))

    def unfinished(self, shard: int) -> list[str]:
        """The rids of a shard that have not reached their end."""
        return [rid.decode() for rid in self._client.zrange(keys.active(shard), 0, -1)]

    def records(self, rids: Sequence[str]) -> dict[str, DecodeRecord]:
        """State to decode each request from; those that are done or gone are left out."""
        pipe = self._client.pipeline(transaction=False)
        for rid in rids:
            pipe.hmget(keys.request(shard_in(rid), rid), "dc", "c", "o", "ds", "st")
        out = {}
        for rid, (params, consumed, offset, state, status) in zip(rids, pipe.execute(), strict=True):
            if status is not None and status != b"done":
                out[rid] = DecodeRecord(DecodeParams.decode(params), int(consumed), int(offset), state)
        return out


def _encode(write: Publish) -> tuple[str | bytes | int, ...]:
    chunk = write.chunk
    return (
        *(chunk.rid, write.before, write.after, chunk.offset, chunk.text.encode(), chunk.encode_meta(), write.state),
        *(int(write.visible), int(chunk.finish is not None)),
    )


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in one choice's text: the byte offset after a chunk, and the chunk's seq. A client resumes from one."""

    end: int = 0
    seq: int = 0


def decode_push(data: bytes) -> tuple[TextChunk, Position]:
    """A pushed chunk and the position it follows.

    Raises:
        ProtocolError: the message is not one of `publish.lua`.
    """
    head, _, rest = data.partition(b"\n")
    try:
        rid, before, seq_before, seq, size = head.decode().split(" ")
        chunk = TextChunk.decode(rid, int(before), int(seq), rest[int(size) :], rest[: int(size)])
    except ValueError as e:
        raise ProtocolError(f"push of {len(data)} bytes cannot be read: {e}") from e
    return chunk, Position(int(before), int(seq_before))


def decode_entry(rid: str, entry_id: bytes, fields: dict[bytes, bytes]) -> tuple[TextChunk, Position]:
    """A stream entry as a chunk, and its own position.

    Raises:
        ProtocolError: the entry is not one of `publish.lua`.
    """
    try:
        end, seq = (int(part) for part in entry_id.split(b"-"))
        text = fields[b"d"]
        return TextChunk.decode(rid, end - len(text), seq, text, fields[b"m"]), Position(end, seq)
    except (KeyError, ValueError) as e:
        raise ProtocolError(f"text entry {entry_id!r} of {rid} cannot be read: {e}") from e

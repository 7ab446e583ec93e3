"""Token ids of running requests: appended by their worker, read by the detokenizer of their shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any

import orjson

from . import keys
from .chunks import Finish, PromptLogprobs, TokenChunk, TokenLogprob
from .clients import Client
from .errors import ProtocolError
from .ids import shard_in
from .scripts import Call, Scripts


class Written(IntEnum):
    """What became of one request's append."""

    OK = 1
    CANCELLED = 2  # written, and ended: forget the request
    FENCED = -1  # another worker owns it: forget it, write nothing more
    ENDED = -2  # a stop string was found, or it is gone: forget it
    MISPLACED = -3  # the position does not follow what is there: a bug, or a store that lost its tail


@dataclass(frozen=True, slots=True)
class Append:
    """One request's part of a flush. No token and no finish: the lease is renewed and nothing else."""

    epoch: int
    chunk: TokenChunk


class TokenStream:
    """The streams `t:<rid>`.

    Args:
        owner: the worker process (a uuid); with the epoch it is the fence of every write.
    """

    def __init__(self, client: Client, scripts: Scripts, owner: str = "", lease_s: float = 6.0) -> None:
        self._client = client
        self._scripts = scripts
        self._owner = owner
        self.lease_s = lease_s  # what each append renews the lease to
        self._in_flight: tuple[list[Call], list[Append]] | None = None

    def append(self, writes: Sequence[Append]) -> dict[str, Written]:
        """Write one step of many requests, one call per shard, in one round trip."""
        self.begin_append(writes)
        return {write.chunk.rid: written for write, written in self.finish_append()}

    def begin_append(self, writes: Sequence[Append]) -> None:
        """Send a flush and come back at once; the next step runs while Redis works. One may be in flight."""
        assert self._in_flight is None, "a flush is in flight already: finish it first"
        ordered = sorted(writes, key=lambda w: shard_in(w.chunk.rid))
        calls = []
        for shard, group in groupby(ordered, lambda w: shard_in(w.chunk.rid)):
            args = [self._owner, int(self.lease_s * 1000), *(arg for w in group for arg in _encode(w))]
            calls.append(Call("append", shard, args))
        self._in_flight = (calls, ordered)
        if calls:
            self._scripts.begin_quietly(calls)

    def finish_append(self) -> list[tuple[Append, Written]]:
        """What became of each write of the flush in flight; nothing if there is none."""
        if self._in_flight is None:
            return []
        (calls, writes), self._in_flight = self._in_flight, None
        replies = self._scripts.finish(calls) if calls else []
        return list(zip(writes, (Written(code) for reply in replies for code in reply), strict=True))

    def read(self, after: Mapping[str, int], limit: int | None = None) -> dict[str, list[TokenChunk]]:
        """What was appended to each request after so many tokens, in order; requests without news are left out.

        An end marker comes once more when nothing came after it: reading is without memory. At most `limit` entries of
        a request are read: as many chunks mean that there may be more.
        """
        pipe = self._client.pipeline(transaction=False)
        for rid, position in after.items():
            pipe.xrange(keys.tokens(shard_in(rid), rid), min=f"({position}-0" if position else "-", count=limit)
        replies = pipe.execute()
        return {
            rid: _decode(rid, position, entries)
            for (rid, position), entries in zip(after.items(), replies, strict=True)
            if entries
        }

    def read_ids(self, rid: str, count: int) -> list[int]:
        """The first `count` token ids of a request: what a worker needs to go on where another ended.

        Raises:
            ProtocolError: the stream holds another number of tokens.
        """
        ids = [i for chunk in self.read({rid: 0}).get(rid, []) for i in chunk.token_ids]
        if len(ids) != count:
            raise ProtocolError(f"{rid} has {len(ids)} tokens on its stream, {count} in its state")
        return ids


def decode_news(data: bytes) -> list[tuple[str, TokenChunk | None]]:
    """What `append.lua` and its like push: a rid, and its new tokens where the push has them; they are to be read
    otherwise."""
    news: list[tuple[str, TokenChunk | None]] = []
    for line in data.split(b"\n"):
        name, _, entry = line.partition(b" ")
        rid = name.decode()
        if not entry:
            news.append((rid, None))
            continue
        start, ids, logprobs = entry.split(b" ", 2)
        values = _decode_logprobs(logprobs) if logprobs else None
        news.append((rid, TokenChunk(rid, int(start), tuple(map(int, ids.split(b","))), values)))
    return news


def _encode(write: Append) -> tuple[str | bytes | int, ...]:
    chunk = write.chunk
    logprobs = b"" if chunk.logprobs is None else _encode_logprobs(chunk.logprobs)
    prompt = b"" if chunk.prompt is None else b" ".join(_encode_prompt(chunk.prompt))
    return (
        *(chunk.rid, write.epoch, chunk.start, len(chunk.token_ids), ",".join(map(str, chunk.token_ids)), logprobs),
        *("" if chunk.cached_tokens is None else chunk.cached_tokens, prompt),
        *(chunk.weight_version or b"", chunk.finish.encode() if chunk.finish else b""),
    )


def _encode_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    return orjson.dumps([[p.logprob, p.top, p.asked] if p.asked else [p.logprob, p.top] for p in logprobs])


def _encode_prompt(prompt: PromptLogprobs) -> tuple[bytes, bytes]:
    return ",".join(map(str, prompt.token_ids)).encode(), _encode_logprobs(prompt.logprobs)


def _decode(rid: str, position: int, entries: Sequence[tuple[bytes, dict[bytes, Any]]]) -> list[TokenChunk]:
    chunks = []
    for _, fields in entries:
        if b"fin" in fields:
            finish = Finish.decode(fields[b"fin"])
            chunks.append(TokenChunk(rid, position, finish=finish, prompt=_decode_prompt(fields)))
            continue
        ids = tuple(int(i) for i in fields[b"t"].split(b",")) if fields[b"t"] else ()
        logprobs = _decode_logprobs(fields[b"lp"]) if b"lp" in fields else None
        cached = int(fields[b"ct"]) if b"ct" in fields else None
        version = fields[b"wv"].decode() if b"wv" in fields else None
        prompt = _decode_prompt(fields)
        chunks.append(TokenChunk(rid, position, ids, logprobs, None, cached, prompt, version))
        position += len(ids)
    return chunks


def _decode_logprobs(data: bytes) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(logprob, *(tuple((i, p) for i, p in pairs) for pairs in rest))
        for logprob, *rest in orjson.loads(data)
    )


def _decode_prompt(fields: Mapping[bytes, Any]) -> PromptLogprobs | None:
    if b"pl" not in fields:
        return None
    ids, _, logprobs = fields[b"pl"].partition(b" ")
    return PromptLogprobs(tuple(int(i) for i in ids.split(b",")) if ids else (), _decode_logprobs(logprobs))

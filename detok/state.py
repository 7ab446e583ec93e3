"""The decoding of one choice: token chunks in, text chunks out.

    TokenChunk ──► by position ──► Decoder ──► StopMatcher ──► TextChunk

What comes out depends on the consumed tokens alone, however they were cut into chunks and whoever consumed the first of
them. A chunk goes out when there is text; it covers every token since the last one, also those whose text is held back.
`encode` gives the state as of that chunk, and a successor that reads the tokens after `published` goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from ..shared.chunks import Finish, TextChunk, TextLogprob, TokenChunk, TokenLogprob, Usage
from ..shared.errors import ProtocolError
from ..shared.messages import DecodeParams
from ..shared.patterns import PatternError
from .decoder import Snapshot, make_decoder
from .stop_patterns import PatternMatcher
from .stops import StopMatcher
from .vocab import Vocabulary

Matcher = StopMatcher | PatternMatcher

STATE_VERSION = 1
SILENT_TOKENS = (
    32  # tokens without text (skipped special ones, a long held stop) after which a chunk goes out all the same
)


class DecodeState:
    """One choice. Not for two threads.

    Raises:
        ProtocolError: a pattern of `stop_regex` cannot be walked. The api refuses such a request.

    Attributes:
        consumed: tokens taken so far.
        published: tokens covered by the chunks returned so far; `encode` is the state after them.
        offset: bytes of text returned so far.
        finish: why the output ended, once it has; further chunks change nothing.
    """

    __slots__ = (
        "_cached_tokens",
        "_decoder",
        "_ids",
        "_logprobs",
        "_params",
        "_prompt",
        "_snapshot",
        "_stops",
        "_vocab",
        "_weight_version",
        "consumed",
        "finish",
        "offset",
        "published",
        "rid",
    )

    def __init__(self, rid: str, params: DecodeParams, vocab: Vocabulary) -> None:
        self.rid = rid
        self.consumed = self.published = self.offset = self._cached_tokens = 0
        self.finish: Finish | None = None
        self._params = params
        self._vocab = vocab
        self._decoder = make_decoder(vocab, params)
        self._stops = _matcher(params)
        self._ids: list[int] = []
        self._logprobs: list[TextLogprob] = []
        self._prompt: tuple[TextLogprob, ...] | None = None  # waits for the first chunk
        self._weight_version: str | None = None
        self._snapshot = self._take_snapshot()

    def push(self, chunk: TokenChunk) -> TextChunk | None:
        """Consume a chunk and return the text that is certain now, if any. What was consumed before changes nothing.

        Raises:
            ProtocolError: tokens are missing between what was consumed and this chunk.
        """
        if self.finish is not None:
            return None
        seen = self.consumed - chunk.start
        if seen < 0:
            raise ProtocolError(f"tokens {self.consumed} to {chunk.start} of {self.rid} are missing")
        ids = chunk.token_ids[seen:]
        ended = chunk.finish if seen <= len(chunk.token_ids) else None
        if not ids and ended is None:
            return None
        if chunk.cached_tokens is not None:
            self._cached_tokens = chunk.cached_tokens
        if chunk.weight_version is not None:
            self._weight_version = chunk.weight_version
        if chunk.prompt is not None and self.consumed == 0:
            self._prompt = tuple(map(self._text_logprob, chunk.prompt.token_ids, chunk.prompt.logprobs))
        text, used, matched = self._read(ids, ended)
        self.consumed += used
        if self._params.return_token_ids:
            self._ids.extend(ids[:used])
        if self._params.return_logprob and chunk.logprobs is not None:
            self._logprobs.extend(map(self._text_logprob, ids[:used], chunk.logprobs[seen:]))
        self.finish = Finish("stop", matched) if matched is not None else ended
        if text or self.finish is not None or self.consumed - self.published >= SILENT_TOKENS:
            return self._release(text)
        return None

    def encode(self) -> bytes:
        """The state after the last chunk returned: one small line of JSON, bounded by the longest stop."""
        return orjson.dumps(self._snapshot)

    @classmethod
    def decode(cls, data: bytes, rid: str, params: DecodeParams, vocab: Vocabulary) -> DecodeState:
        """Go on from another process's `encode`; empty `data` is the beginning.

        Raises:
            ProtocolError: the state is damaged, or of another version.
        """
        state = cls(rid, params, vocab)
        if data:
            try:
                version, *snapshot = orjson.loads(data)
                if version != STATE_VERSION:
                    raise ProtocolError(f"decode state of version {version}; this release reads {STATE_VERSION}")
                state._restore(*snapshot)
            except (TypeError, ValueError) as e:
                raise ProtocolError(f"decode state of {rid} cannot be read: {data[:80]!r}") from e
        return state

    def _read(self, ids: Sequence[int], ended: Finish | None) -> tuple[str, int, str | None]:
        """Text that may go out, how many ids it took, and the stop string that completed."""
        shown = len(ids)
        if ended is not None and ids and ended.matched == ids[-1] and not self._params.no_stop_trim:
            shown -= 1  # a stop token is counted, and is no text
        if self._stops is None:
            text = self._decoder.decode(ids[:shown])
            return (text + self._decoder.flush() if ended is not None else text), len(ids), None
        return self._read_to_stop(self._stops, ids, shown, ended)

    def _read_to_stop(
        self, stops: Matcher, ids: Sequence[int], shown: int, ended: Finish | None
    ) -> tuple[str, int, str | None]:
        parts = []
        unarmed = self._params.min_new_tokens - self.consumed
        for i in range(shown):
            text = self._decoder.decode(ids[i : i + 1])
            if text:
                parts.append(stops.feed(text, armed=i >= unarmed))
                if stops.matched is not None:
                    return "".join(parts), i + 1, stops.matched
        if ended is not None:
            parts.append(stops.feed(self._decoder.flush(), armed=len(ids) > unarmed))
            if stops.matched is None:
                parts.append(stops.flush())
        return "".join(parts), len(ids), stops.matched

    def _text_logprob(self, token_id: int, logprob: TokenLogprob) -> TextLogprob:
        top, asked = (tuple([self._piece(i, value) for i, value in pairs]) for pairs in (logprob.top, logprob.asked))
        text, data = self._vocab.piece(token_id)
        return TextLogprob(token_id, text, data, logprob.logprob, top, asked)

    def _piece(self, token_id: int, logprob: float) -> TextLogprob:
        text, data = self._vocab.piece(token_id)
        return TextLogprob(token_id, text, data, logprob)

    def _release(self, text: str) -> TextChunk:
        start = self.offset
        self.published = self.consumed
        self.offset += len(text) if text.isascii() else len(text.encode())
        chunk = TextChunk(
            self.rid,
            start,
            text,
            Usage(self._params.prompt_tokens, self.consumed, self._cached_tokens),
            token_ids=tuple(self._ids) if self._params.return_token_ids else None,
            logprobs=tuple(self._logprobs) if self._params.return_logprob else None,
            prompt_logprobs=self._prompt,
            finish=self.finish,
            weight_version=self._weight_version,
        )
        self._ids.clear()
        self._logprobs.clear()
        self._prompt = None
        self._snapshot = self._take_snapshot()
        return chunk

    def _take_snapshot(self) -> Snapshot:
        partial = self._stops.partial if self._stops is not None else ""
        place = (STATE_VERSION, self.published, self.offset, self._cached_tokens, partial, self._decoder.snapshot())
        return place if self._weight_version is None else (*place, self._weight_version)

    def _restore(
        self,
        published: int,
        offset: int,
        cached_tokens: int,
        partial: str,
        decoder: Sequence[Any],
        weight_version: str | None = None,
    ) -> None:
        self.consumed = self.published = published
        self._weight_version = weight_version
        self.offset, self._cached_tokens = offset, cached_tokens
        if self._stops is not None:
            self._stops.restore(partial)
        self._decoder.restore(decoder)
        self._snapshot = self._take_snapshot()


def _matcher(params: DecodeParams) -> Matcher | None:
    if not params.stop_regex:
        return StopMatcher(params.stop, keep=params.no_stop_trim) if params.stop else None
    try:
        return PatternMatcher(params.stop, params.stop_regex, keep=params.no_stop_trim)
    except PatternError as e:
        raise ProtocolError(f"a pattern of {params.stop_regex!r:.200} cannot be walked: {e}") from e

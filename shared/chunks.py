"""What a request's streams carry: tokens from its worker, text from its detokenizer, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import orjson

from .codec import build, dump, parse

FinishType = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural log), those of the most likely ones at its place, best first, and those that
    the request named. The first token of a prompt has none: nothing comes before it."""

    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The last tokens of a prompt, from `logprob_start_len` on, and their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `matched` is the stop string, or the id of the stop or eos token.

    What is embedded or classified ends without a token, and `data` is its result: `encode_vector` of an embedding, or
    of a logit per class.
    """

    type: FinishType
    matched: str | int | None = None
    message: str | None = None  # for abort and error: what a client may read
    status: int = 500  # for error: the HTTP status that fits
    param: str | None = None  # for error: the parameter that was wrong
    data: str | None = None

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> Finish:
        return build(cls, parse(data))


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens `start … start + len(token_ids)` of one choice, from its worker. `finish` comes with the last one."""

    rid: str
    start: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token where the request asked
    finish: Finish | None = None
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; on the first chunk only
    prompt: PromptLogprobs | None = None  # on the first chunk only
    weight_version: str | None = None  # of the weights that made these tokens, where it is another than before


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token's log-probability as text: `token` as it decodes alone, `bytes` its own bytes; `top` and `asked` have
    neither of their own."""

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float | None
    top: tuple[TextLogprob, ...] = ()
    asked: tuple[TextLogprob, ...] = ()

    NESTED: ClassVar[dict[str, type]] = {}


TextLogprob.NESTED |= {"top": TextLogprob, "asked": TextLogprob}  # a class cannot name itself in its own body


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. `completion_tokens` counts up to and with the token that completes a stop."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


_USAGE = frozenset(Usage.__slots__)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text of one choice: its UTF-8 bytes stand at `offset … offset + len(text.encode())` of the whole output.

    Text, `token_ids` and `logprobs` cover the same tokens. `seq` numbers the chunks that end at one byte offset, so
    that (end, seq) is a total order, and the entry id of the stream.
    """

    NESTED: ClassVar = {
        "usage": Usage,
        "finish": Finish,
        "logprobs": TextLogprob,
        "prompt_logprobs": TextLogprob,
    }

    rid: str
    offset: int  # bytes
    text: str
    usage: Usage
    seq: int = 0
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob, ...] | None = None  # on the first chunk only
    finish: Finish | None = None
    weight_version: str | None = None  # of the weights that made the newest token; None: "default"

    @property
    def end(self) -> int:
        """Byte offset after this chunk."""
        return self.offset + len(self.text.encode())

    def encode_meta(self) -> bytes:
        """All but the text and its place, as one line of JSON."""
        names = ("usage", "token_ids", "logprobs", "prompt_logprobs", "finish", "weight_version")
        meta = {name: getattr(self, name) for name in names}
        return orjson.dumps({k: v for k, v in meta.items() if v is not None})

    @classmethod
    def decode(cls, rid: str, offset: int, seq: int, text: bytes, meta: bytes) -> TextChunk:
        raw = parse(meta)
        usage = raw.get("usage")
        if len(raw) == 1 and isinstance(usage, dict) and usage.keys() == _USAGE:  # nearly every chunk of a stream
            return cls(rid, offset, text.decode(), Usage(**usage), seq)
        return build(cls, raw | {"rid": rid, "offset": offset, "seq": seq, "text": text.decode()})

"""The words on the wire: small frozen objects, no torch, encode and decode only.

    ChatCompletionRequest → GenerateReqInput → GenerateJob → Sequence → TokenChunk → DecodeState → TextChunk → SSE event
                            ^^^^^^^^^^^^^^^^   ^^^^^^^^^^^               ^^^^^^^^^^                  ^^^^^^^^^
What is underlined lives here; the rest belongs to the role that uses it. Chunks are deltas with positions. Every
encoded message begins with its version; unknown fields are ignored, an unknown version raises `ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import orjson

from .codec import VERSION, build, dump, parse
from .errors import ProtocolError

Lane = Literal["rt", "std", "batch"]
LANES: tuple[Lane, ...] = ("rt", "std", "batch")  # in the order in which workers serve them
Task = Literal["generate", "embed", "classify"]  # what a model does, and what a job asks of it
FinishType = Literal["stop", "length", "abort", "error"]

DEFAULT_VERSION = "default"  # of weights that were never updated
GREEDY_BELOW = 1e-6  # a temperature under this is greedy
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]
GRAMMARS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag", "choice")  # at most one is set


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice is sampled. Names and defaults are the native interface's; OpenAI's are translated in the api."""

    max_new_tokens: int | None = 128  # None: up to the context's end; the api resolves it before a job is queued
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids
    sampling_seed: int | None = None  # choice i samples with seed + i; chosen at submit when None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choice: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerateReqInput:
    """One prompt, normalised: what every route and every batch line is translated into.

    Exactly one of `text` and `input_ids` is set. `n` choices become a family of jobs over one body.
    """

    model: str
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    task: Task = "generate"
    n: int = 1
    best: int = 0  # how many of the n choices are answered with, those of the highest mean logprob; 0: all
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1  # also of the prompt's tokens from there on; -1: of none
    token_ids_logprob: tuple[int, ...] = ()  # also of these, at each place
    return_token_ids: bool = False
    add_special_tokens: bool = True  # False when a chat template has written them already
    lane: Lane = "std"
    tenant: str = "default"
    deadline_s: float = 3600.0
    request_id: str = ""  # the client's own (X-Request-Id): for logs only, never a key


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """All that a detokenizer must know of a request; kept in the request's hash, beside its state."""

    tokenizer: str  # sha256 of the tokenizer blob
    prompt_tokens: int
    prompt_tail: tuple[int, ...] = ()  # its last ids, up to PROMPT_TAIL: context for spaces and half characters
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    min_new_tokens: int = 0
    return_logprob: bool = False
    return_token_ids: bool = False

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> DecodeParams:
        return build(cls, parse(data))


PROMPT_TAIL = 5


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One choice of one request, as a worker gets it.

    `rid` is ours, never a client's, and never used again. Its family (`n` choices) shares the encoded body; `rid` and
    `sampling.sampling_seed` of a choice are put in when it is handed over.
    """

    NESTED: ClassVar = {"sampling": SamplingParams}

    rid: str
    model: str
    pool: str
    tokenizer: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    task: Task = "generate"
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    token_ids_logprob: tuple[int, ...] = ()
    return_token_ids: bool = False
    stream: bool = False
    lane: Lane = "std"
    tenant: str = "default"
    request_id: str = ""

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted."""
        return self.return_logprob and self.logprob_start_len >= 0

    def decode_params(self) -> DecodeParams:
        s = self.sampling
        return DecodeParams(
            tokenizer=self.tokenizer,
            prompt_tokens=len(self.input_ids),
            prompt_tail=self.input_ids[-PROMPT_TAIL:],
            skip_special_tokens=s.skip_special_tokens,
            spaces_between_special_tokens=s.spaces_between_special_tokens,
            stop=s.stop,
            stop_regex=s.stop_regex,
            no_stop_trim=s.no_stop_trim,
            min_new_tokens=s.min_new_tokens,
            return_logprob=self.return_logprob,
            return_token_ids=self.return_token_ids,
        )

    def encode(self) -> bytes:
        """`version u8 | header length u32 | header JSON | zlib(prompt ids, int64 little-endian)`."""
        header = dump(dataclasses.replace(self, input_ids=()))
        ids = zlib.compress(np.asarray(self.input_ids, dtype="<i8").tobytes(), 1)
        return struct.pack("<BI", VERSION, len(header)) + header + ids

    @classmethod
    def decode(cls, data: bytes) -> GenerateJob:
        """Raises ProtocolError on another version or a damaged body."""
        try:
            version, size = struct.unpack_from("<BI", data)
            if version != VERSION:
                raise ProtocolError(f"job body of version {version}; this release reads {VERSION}")
            header = parse(data[5 : 5 + size])
            ids = np.frombuffer(zlib.decompress(data[5 + size :]), dtype="<i8")
        except (struct.error, zlib.error, ValueError) as e:
            raise ProtocolError(f"job body of {len(data)} bytes cannot be read: {e}") from e
        header["input_ids"] = ids.tolist()
        return build(cls, header)


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


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the other roles know of a model. Permanent; registered by a worker or by `headrace model add`."""

    name: str  # what clients call it
    pool: str  # the base model whose workers serve it; an adapter's is its base model's
    tokenizer: str  # sha256 of tokenizer.json
    context_length: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    dtype: str = ""
    weight_version: str = DEFAULT_VERSION
    lora: str = ""  # the folder of the adapter that this name stands for, as workers of the pool see it; "": the base
    task: Task = "generate"
    dimensions: int = 0  # of an embedding
    labels: tuple[str, ...] = ()  # of a classifier's classes
    multi_label: bool = False  # whether several of them may hold at once
    created: int = 0  # Unix seconds

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> ModelCard:
        return build(cls, parse(data))

"""What a request becomes on its way to a worker: small frozen objects, no torch, encode and decode only.

    ChatCompletionRequest → GenerateReqInput → GenerateJob → Sequence → TokenChunk → DecodeState → TextChunk → SSE event
                            └──────── here ───────────┘                 └────────── chunks ────────────┘

The rest belongs to the role that uses it. Chunks are deltas with positions. Every encoded message begins with its
version; unknown fields are ignored, an unknown version raises `ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from .codec import VERSION, build, dump, parse
from .errors import ProtocolError

Lane = Literal["rt", "std", "batch"]
LANES: tuple[Lane, ...] = ("rt", "std", "batch")  # in the order in which workers serve them
Task = Literal["generate", "embed", "classify"]  # what a model does, and what a job asks of it

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

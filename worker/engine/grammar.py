"""Output that follows a grammar: compiled beside the loop, matched token by token, masks filled beside the forward.

    SamplingParams ─► Grammar ─► compiled (cached) ─► Matcher of one sequence ─► bitmask rows ─► adjust

xgrammar does the matching, and is imported when the first grammar comes.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Ids
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer

from ...shared.errors import InvalidRequest
from ...shared.messages import GRAMMARS, GrammarKind, SamplingParams
from .sequence import Row

if TYPE_CHECKING:
    import xgrammar

CACHED = 256  # compiled grammars; most take some 100 KB
COMPILING = 4  # at one time
MAX_WHITESPACE = 12  # between two tokens of JSON: a model that writes nothing else would never end

# "[12:34:56] /project/cpp/regex_converter.cc:94: what is wrong"
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is (true|false): )?")
_CONTROLS = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_NO_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")  # bytes that no text has; xgrammar takes them for characters
_SAMPLE_TEXT = '{"a b": [1.5, "é 聪"],\n  "c": null}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's output must match, in the words of the request."""

    kind: GrammarKind
    source: str | tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams) -> Grammar | None:
        named: list[tuple[GrammarKind, Any]] = [
            (kind, getattr(params, kind)) for kind in GRAMMARS if getattr(params, kind) not in (None, ())
        ]
        return cls(*named[0]) if named else None


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_ids: Ids[int]) -> None:
        import xgrammar

        # A model without any end token ends where the grammar first may.
        options: dict[str, Any] = {"override_stop_tokens": list(stop_ids)} if stop_ids else {}
        self.handle = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not stop_ids, **options)

    def accept(self, token_id: int) -> bool:
        """Take the next token. False, and nothing is changed, where the grammar does not allow it."""
        return not self.terminated and bool(self.handle.accept_token(token_id))

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        self.handle.rollback(count)

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self.handle.is_completed())

    @property
    def terminated(self) -> bool:
        """Whether it has ended: an end token was taken."""
        return bool(self.handle.is_terminated())


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars of a step allow.

    `words` [G, 2 * ceil(vocabulary / 64)] int32: bit i % 32 of word i // 32 says whether token i may come next.
    """

    places: dict[Row, int]  # which of the G rows is a row's; rows without a grammar have none
    words: npt.NDArray[np.int32]

    def apply(self, logits: torch.Tensor, rows: Ids[Row]) -> None:
        """Set what may not come next to -inf, in place. `logits` [S, V] float32 belong to `rows`."""
        targets = np.full(len(self.words), -1, dtype=np.int64)
        for at, row in enumerate(rows):
            if row in self.places:
                targets[self.places[row]] = at
        words, places = (
            torch.from_numpy(array).to(logits.device, non_blocking=True) for array in (self.words, targets)
        )
        _kernel(logits.device.type)(logits, words, places)


@functools.cache
def _kernel(device_type: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    if device_type == "cpu":
        from ...kernels.cpu.bitmask import apply_bitmask

        return apply_bitmask
    from ...kernels.bitmask import apply_bitmask as triton_apply_bitmask

    return triton_apply_bitmask


class Grammars:
    """Compiles and matches the grammars of one model.

    Args:
        tokenizer: bytes of tokenizer.json.
        vocab_size: of the model; what the tokenizer does not have is never allowed.
        eos_token_ids: what ends an output that is complete.
    """

    def __init__(self, tokenizer: bytes, vocab_size: int, eos_token_ids: Ids[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._padded = -(-vocab_size // 64) * 64  # so that a mask is whole words of 64 bits
        self._eos_token_ids = [i for i in eos_token_ids if 0 <= i < vocab_size]
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._turns = threading.BoundedSemaphore(COMPILING)
        self._building = threading.Lock()
        self._filling: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """Begin to compile, on another thread; the same grammar is compiled once. Fails with InvalidRequest."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = Future()
            # A daemon: a grammar that takes for ever must not keep the process from ending.
            threading.Thread(target=self._run, args=(grammar, future), name="grammar", daemon=True).start()
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return future

    def matcher(self, compiled: xgrammar.CompiledGrammar, stop_ids: Ids[int]) -> Matcher:
        """A matcher at the beginning. Of `stop_ids`, those that stand for text are text to it."""
        return Matcher(compiled, sorted({*self._eos_token_ids, *self._special_ids.intersection(stop_ids)}))

    def fill(self, rows: Ids[Row]) -> Future[Masks] | None:
        """Begin to fill the masks of those rows whose sequence has a matcher; None where none has.

        Matchers must not be touched before it is done.
        """
        constrained = [row for row in rows if row.sequence.matcher is not None]
        if not constrained:
            return None
        if self._filling is None:
            self._filling = ThreadPoolExecutor(1, thread_name_prefix="mask")
        return self._filling.submit(self._fill, constrained)

    def close(self) -> None:
        if self._filling is not None:
            self._filling.shutdown()

    def _run(self, grammar: Grammar, future: Future[xgrammar.CompiledGrammar]) -> None:
        with self._turns:
            try:
                future.set_result(self._compile(grammar))
            except InvalidRequest as e:
                future.set_exception(e)
            except (RuntimeError, ValueError, TypeError) as e:  # all that xgrammar raises
                reason = _SOURCE_PLACE.sub("", str(e)).strip()[:300]
                future.set_exception(InvalidRequest(f"'{grammar.kind}' is not usable: {reason}", param=grammar.kind))

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        with self._building:
            compiler = self._compiler_of(grammar.kind)
        if isinstance(grammar.source, tuple):
            return compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, grammar.source))}")
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(grammar.source, max_whitespace_cnt=MAX_WHITESPACE)
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.source)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.source)
        return compiler.compile_structural_tag(grammar.source)

    def _compiler_of(self, kind: GrammarKind) -> xgrammar.GrammarCompiler:
        if kind == "structural_tag":
            return self._of_all
        return self._of_json if kind == "json_schema" else self._of_text

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = Tokenizer.from_str(self._tokenizer.decode()).get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special and i < self._vocab_size)

    @cached_property
    def _decoded(self) -> list[bytes]:
        """Bytes of every token id of the model, as the tokenizer writes them within a text.

        Raises:
            InvalidRequest: a token's text depends on its neighbours, so that no grammar can be matched.
        """
        import xgrammar

        tokenizer = Tokenizer.from_str(self._tokenizer.decode())
        fast: Any = transformers.PreTrainedTokenizerFast
        wrapped = fast(tokenizer_object=tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=self._vocab_size, stop_token_ids=[0])
        decoded = [b"" if _NO_UTF8.search(token) else token for token in map(bytes, info.decoded_vocab)]
        ids = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False).ids
        if b"".join(decoded[i] for i in ids).lstrip(b" ") != _SAMPLE_TEXT.encode():
            raise InvalidRequest("This model's tokenizer does not allow constrained generation.", param="model")
        return decoded

    @cached_property
    def _of_text(self) -> xgrammar.GrammarCompiler:
        """Special tokens are no text: their bytes would be matched, and then skipped when decoded."""
        return self._compiler([b"" if i in self._special_ids else token for i, token in enumerate(self._decoded)])

    @cached_property
    def _of_json(self) -> xgrammar.GrammarCompiler:
        """No control characters but newlines: where a string's length is bounded xgrammar lets them in unescaped."""
        special = self._special_ids
        plain = [b"" if i in special or _CONTROLS.search(token) else token for i, token in enumerate(self._decoded)]
        return self._compiler(plain)

    @cached_property
    def _of_all(self) -> xgrammar.GrammarCompiler:
        """Structural tags may begin and end with special tokens, and leave free text between."""
        return self._compiler(self._decoded)

    def _compiler(self, vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary + [b""] * (self._padded - self._vocab_size),
            xgrammar.VocabType.RAW,
            vocab_size=self._padded,
            stop_token_ids=self._eos_token_ids or [0],
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _fill(self, rows: Ids[Row]) -> Masks:
        words = np.full((len(rows), self._padded // 32), -1, dtype=np.int32)
        for place, row in enumerate(rows):
            matcher = row.sequence.matcher
            assert matcher is not None
            accepted = 0
            while accepted < len(row.draft) and matcher.accept(row.draft[accepted]):
                accepted += 1
            # Past a guess that the grammar does not allow, and past the end, nothing is sampled that anyone keeps.
            if accepted == len(row.draft) and not matcher.terminated:
                matcher.handle.fill_next_token_bitmask(words, place)
            matcher.rollback(accepted)
        return Masks({row: place for place, row in enumerate(rows)}, words)


def _quoted(text: str) -> str:
    """A string literal of the grammar language."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'

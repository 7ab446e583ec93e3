"""Output that follows a grammar: compiled beside the loop, matched token by token, masks filled beside the forward.

    SamplingParams ─► Grammar ─► compiled (cached) ─► Matcher of one sequence ─► bitmask rows ─► adjust

xgrammar does the matching, and is imported when the first grammar comes.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Ids
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...shared.errors import InvalidRequest, Overloaded
from ...shared.messages import GRAMMARS, GrammarKind, SamplingParams
from .compiling import Turns
from .grammar_compilers import Compilers
from .sequence import Row

if TYPE_CHECKING:
    import xgrammar

CACHED = 256  # compiled grammars; most take some 100 KB
COMPILING = 4  # at one time
COMPILE_S = 30.0  # a grammar that takes longer is refused


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


def _takes_too_long(grammar: Grammar) -> InvalidRequest:
    kind = grammar.kind
    return InvalidRequest(f"'{kind}' takes more than {COMPILE_S:.0f} s to compile; make it smaller.", param=kind)


class Grammars:
    """Compiles and matches the grammars of one model.

    Args:
        tokenizer: bytes of tokenizer.json.
        vocab_size: of the model; what the tokenizer does not have is never allowed.
        eos_token_ids: what ends an output that is complete.
    """

    def __init__(self, tokenizer: bytes, vocab_size: int, eos_token_ids: Ids[int]) -> None:
        self._padded = -(-vocab_size // 64) * 64  # so that a mask is whole words of 64 bits
        self._eos_token_ids = [i for i in eos_token_ids if 0 <= i < vocab_size]
        self._compilers = Compilers(tokenizer, vocab_size, self._padded, self._eos_token_ids)
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._caching = threading.Lock()
        self._turns: Turns[Grammar, xgrammar.CompiledGrammar] = Turns(
            self._compilers.compile,
            _takes_too_long,
            self._came_late,
            turns=COMPILING,
            limit_s=COMPILE_S,
            most_lost=COMPILING,
        )
        self._filling: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """Begin to compile, on another thread; the same grammar is compiled once. Fails with RequestError."""
        with self._caching:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._turns.submit(grammar)
                while len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            if future.done() and isinstance(future.exception(), Overloaded):  # of this moment, not of the grammar
                del self._compiled[grammar]
        return future

    def expire(self) -> None:
        """Refuse those that have been compiling for too long. Called while a sequence waits."""
        self._turns.expire()

    def matcher(self, compiled: xgrammar.CompiledGrammar, stop_ids: Ids[int]) -> Matcher:
        """A matcher at the beginning. Of `stop_ids`, those that stand for text are text to it."""
        return Matcher(compiled, sorted({*self._eos_token_ids, *self._compilers.special_ids.intersection(stop_ids)}))

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

    def _came_late(self, grammar: Grammar, compiled: Future[xgrammar.CompiledGrammar]) -> None:
        with self._caching:
            self._compiled[grammar] = compiled

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

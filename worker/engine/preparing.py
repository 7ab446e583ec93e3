"""Sequences whose grammar is being compiled: they wait here, and nobody waits for them."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...shared.chunks import Finish
from ...shared.errors import EngineError, RequestError
from ...shared.logs import about
from .grammar import Grammar, Grammars, Matcher
from .sequence import Sequence

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

WAIT_S = 0.02  # at once, while nothing else is to do


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: Sequence
    compiled: Future[xgrammar.CompiledGrammar]


class Preparing:
    """Gives each sequence with a grammar its matcher."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def rids(self) -> list[str]:
        return list(self._waiting)

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        compiled = self._grammars.compile(grammar)
        self._waiting[sequence.rid] = _Waiting(sequence, compiled)

    def remove(self, rid: str) -> None:
        self._waiting.pop(rid, None)

    def wait(self) -> None:
        """Until one is ready, a moment at most."""
        wait([waiting.compiled for waiting in self._waiting.values()], WAIT_S, FIRST_COMPLETED)

    def take(self) -> tuple[list[Sequence], list[tuple[str, Finish]]]:
        """Those that can begin, with their matcher after what was produced before, and why others never can."""
        ready: list[Sequence] = []
        refused: list[tuple[str, Finish]] = []
        self._grammars.expire()
        for rid, waiting in list(self._waiting.items()):
            if not waiting.compiled.done():
                continue
            del self._waiting[rid]
            try:
                waiting.sequence.matcher = self._matcher(waiting)
                ready.append(waiting.sequence)
            except RequestError as e:
                refused.append((rid, Finish("error", message=e.message, status=e.status, param=e.param)))
            except EngineError as e:
                log.error("%s", e, extra=about(rid))
                refused.append((rid, Finish("error", message="The output so far does not follow the grammar.")))
        return ready, refused

    def _matcher(self, waiting: _Waiting) -> Matcher:
        """Raises RequestError where the grammar is no good, EngineError where the output so far does not match."""
        sequence = waiting.sequence
        matcher = self._grammars.matcher(waiting.compiled.result(), list(sequence.stop_ids))
        if not all(map(matcher.accept, output := sequence.output_ids)):
            raise EngineError(f"{len(output)} tokens were produced before, and do not follow the grammar")
        return matcher

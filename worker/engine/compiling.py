"""Turns at compiling grammars: some at one time, each for so long and no longer.

    queued ──turn──► compiling ──► compiled, or refused
                         └─ limit_s ─► refused; its thread goes on, and a late result counts from then on

A compiler cannot be interrupted. So one that takes for ever gives its turn back and keeps a core; where too many do,
new grammars are refused until one has ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...shared.errors import Overloaded, RequestError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Turn(Generic[K, T]):
    key: K
    future: Future[T] = field(default_factory=Future)
    until: float = float("inf")  # monotonic seconds, once it compiles


class Turns(Generic[K, T]):
    """Runs `compile(key)` on threads.

    Args:
        compile: raises RequestError.
        refusal: what a key is refused with that took too long.
        late: is given what came of it all the same.
        turns: at one time.
        limit_s: for each, from when it begins.
        most_lost: threads that may go on without a turn.
    """

    def __init__(
        self,
        compile: Callable[[K], T],
        refusal: Callable[[K], RequestError],
        late: Callable[[K, Future[T]], None],
        *,
        turns: int,
        limit_s: float,
        most_lost: int,
    ) -> None:
        self._compile = compile
        self._refusal = refusal
        self._late = late
        self._turns = turns
        self._limit_s = limit_s
        self._most_lost = most_lost
        self._lock = threading.Lock()
        self._queue: deque[_Turn[K, T]] = deque()
        self._compiling: list[_Turn[K, T]] = []
        self._lost: list[_Turn[K, T]] = []

    def submit(self, key: K) -> Future[T]:
        """Compile in turn. The future fails with RequestError: the key is no good, or takes too long."""
        turn = _Turn[K, T](key)
        with self._lock:
            if len(self._lost) >= self._most_lost:
                message = "Too many grammars are being compiled that take for ever; try again later."
                turn.future.set_exception(Overloaded(message, retry_after_s=int(self._limit_s)))
                return turn.future
            self._queue.append(turn)
            self._fill()
        return turn.future

    def expire(self) -> None:
        """Take the turns of those that had their time. Called now and then, while somebody waits."""
        now = time.monotonic()
        with self._lock:
            for turn in [turn for turn in self._compiling if now >= turn.until]:
                self._compiling.remove(turn)
                self._lost.append(turn)
                turn.future.set_exception(self._refusal(turn.key))
            self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._compiling) < self._turns:
            turn = self._queue.popleft()
            turn.until = time.monotonic() + self._limit_s
            self._compiling.append(turn)
            # A daemon: one that takes for ever must not keep the process from ending.
            threading.Thread(target=self._run, args=(turn,), name="grammar", daemon=True).start()

    def _run(self, turn: _Turn[K, T]) -> None:
        done = Future[T]()
        try:
            done.set_result(self._compile(turn.key))
        except RequestError as e:
            done.set_exception(e)
        with self._lock:
            if late := turn in self._lost:
                self._lost.remove(turn)
            else:
                self._compiling.remove(turn)
                self._fill()
        if late:
            self._late(turn.key, done)
        elif (error := done.exception()) is not None:
            turn.future.set_exception(error)
        else:
            turn.future.set_result(done.result())

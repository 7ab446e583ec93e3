"""Reading files on a thread of its own, while the loop goes on with its leases and heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..shared.errors import EngineError, RequestError
from .interface import Beside

T = TypeVar("T")


class Reading(Generic[T]):
    """`read(self)` on a thread. One that outlasts `limit_s` is given up, and ends where it next calls `check`.

    Attributes:
        wants_rest: whether the loop must run no step before this is done; it says that it obeys by `grant_rest`.
    """

    def __init__(self, read: Callable[[Beside], T], limit_s: float) -> None:
        self._future: Future[T] = Future()
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._resting = threading.Event()
        self.wants_rest = False
        threading.Thread(target=self._run, args=(read,), name="reading", daemon=True).start()

    def _run(self, read: Callable[[Beside], T]) -> None:
        try:
            self._future.set_result(read(self))
        except BaseException as e:  # noqa: BLE001 - raised again by `result`, on the loop's thread
            self._future.set_exception(e)

    def rest(self) -> None:
        self.wants_rest = True
        self._resting.wait(max(self._until - time.monotonic(), 0))
        self.check()

    def check(self) -> None:
        if self._is_over():
            raise EngineError(f"given up after {self._limit_s:g} s")

    def grant_rest(self) -> None:
        """No step runs now, and none will."""
        self._resting.set()

    def done(self) -> bool:
        return self._future.done() or self._is_over()

    def result(self) -> T:
        """What was read, or the error that it met.

        Raises:
            TimeoutError: it was given up.
            RequestError: as `read` raised it.
            EngineError: `read` raised something else, which is its cause.
        """
        if not self._future.done():
            raise TimeoutError(f"not read within {self._limit_s:g} s")
        error = self._future.exception()
        if error is not None and not isinstance(error, RequestError):
            raise EngineError(f"reading failed: {type(error).__name__}: {error}") from error
        return self._future.result()

    def _is_over(self) -> bool:
        return time.monotonic() > self._until


class AtStart:
    """Nothing runs yet, and nobody gives up. Answers to `Beside`."""

    def rest(self) -> None:
        return

    def check(self) -> None:
        return

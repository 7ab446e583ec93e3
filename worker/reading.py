"""Reading files on a thread of its own, while the loop goes on with its leases and heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..shared.errors import EngineError, RequestError

T = TypeVar("T")


class Reading(Generic[T]):
    """`read()` on a thread. One that outlasts `limit_s` is given up: its thread ends with the process at the latest."""

    def __init__(self, read: Callable[[], T], limit_s: float) -> None:
        self._future: Future[T] = Future()
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        threading.Thread(target=self._run, args=(read,), name="reading", daemon=True).start()

    def _run(self, read: Callable[[], T]) -> None:
        try:
            self._future.set_result(read())
        except BaseException as e:  # noqa: BLE001 - raised again by `result`, on the loop's thread
            self._future.set_exception(e)

    def done(self) -> bool:
        return self._future.done() or time.monotonic() > self._until

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

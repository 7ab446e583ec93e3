"""Clients of a chaotic run: those that stream, wait, leave, and send batches. What each must be told is known."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
from kit.chaos_batch import drive_batches
from kit.chaos_work import Case, Work
from kit.faults import Reader, Refused


class Clients:
    """Clients of two replicas.

    Args:
        lossy: the store may lose its tail, after which a client may be told that its stream is lost.
        recovery_s: how long after the last fault the last of them may come to its end.
    """

    def __init__(self, urls: Sequence[str], work: Work, seed: int, *, lossy: bool, recovery_s: float) -> None:
        self.urls, self.work, self.lossy, self._recovery_s = urls, work, lossy, recovery_s
        self._moments = random.Random(seed)
        self._over = threading.Event()
        self.tally: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Clients come for the time of the block; all of them reach their end after it."""
        kinds = [self._stream, self._stream, self._stream, self._wait, self._wait, self._leave]
        seeds = [self._moments.randrange(1 << 30) for _ in range(8)]
        threads = [threading.Thread(target=self._ask_on, args=(kinds, random.Random(s), s)) for s in seeds]
        threads.append(threading.Thread(target=drive_batches, args=(self,)))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._over.set()
            for thread in threads:
                thread.join(120)
                if thread.is_alive():
                    self.problems.append("a client has not come to its end 120 s after the last fault")
            lasted_s = time.monotonic() - ended
            self.tally["last client's end, ms after the last fault"] = int(lasted_s * 1000)
            if lasted_s > self._recovery_s:
                self.problems.append(f"the last client came to its end {lasted_s:.1f} s after the last fault")

    def _ask_on(self, kinds: list[Callable[[random.Random, str], None]], moments: random.Random, seed: int) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            kind = moments.choice(kinds)
            try:
                kind(moments, f"{seed}-{number}")
            except Refused as e:
                lost = e.code in ("stream_gone", "stream_lost")
                self.tally[f"refused: {e.code}"] += 1
                if not (lost and self.lossy):
                    self.problems.append(f"{kind.__name__}: {e}")
            except Exception as e:  # noqa: BLE001 - whatever it is, it is a finding
                self.problems.append(f"{kind.__name__}: {type(e).__name__}: {e}")

    def _case(self, moments: random.Random) -> Case:
        return self.work.cases[moments.choice(sorted(self.work.cases))]

    def _expect(self, case: Case, text: str, finish: str | None, tokens: int) -> None:
        if (text, finish, tokens) != (case.text, case.finish, case.tokens):
            self.problems.append(f"{text!r} {finish} {tokens}, not {case.text!r} {case.finish} {case.tokens}")

    def _stream(self, moments: random.Random, key: str) -> None:
        case = self._case(moments)
        reader = Reader(case.asked(key), key=key)
        reader.persist(self.urls if moments.random() < 0.5 else self.urls[::-1])
        self._expect(case, reader.text, reader.finish, reader.completion_tokens)
        self.tally["streams"] += 1

    def _wait(self, moments: random.Random, key: str) -> None:
        case = self._case(moments)
        body = case.asked(key)
        for n in range(240):
            url = f"{self.urls[n % 2]}/v1/completions"
            with suppress(httpx.TransportError):
                answer = httpx.post(
                    url, json=body, headers={"Idempotency-Key": key}, timeout=60, verify=False, trust_env=False
                )
                if answer.status_code == 200:
                    value = answer.json()
                    choice = value["choices"][0]
                    self._expect(case, choice["text"], choice["finish_reason"], value["usage"]["completion_tokens"])
                    self.tally["whole answers"] += 1
                    return
                refused = Refused(answer.status_code, answer.text)
                if not refused.passes:
                    raise refused
            time.sleep(0.25)
        self.problems.append(f"{key} was never answered")

    def _leave(self, moments: random.Random, key: str) -> None:
        reader = Reader(self.work.endless.asked(key))
        with suppress(httpx.TransportError, Refused):
            reader.read(moments.choice(self.urls), moments.randrange(1, 6), **{"X-Resume-Grace": "0"})
        self.tally["left"] += 1

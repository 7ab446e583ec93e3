"""What the tests of faults share: texts that say who wrote them, clients on the outside, and looks into the store."""

from __future__ import annotations

import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import orjson
from headrace.shared import keys
from headrace.shared.clients import Client
from kit.deployment import Deployment
from kit.tokenizers import byte_level


def letters(letter: str, tokens: int, step_ms: float = 30, prefill_ms: float = 0) -> dict[str, Any]:
    """A line of so many tokens, each of which says who made it."""
    steps = [byte_level().spelled(letter)] * tokens
    return {"steps": steps, "finish": "stop", "step_ms": step_ms, "prefill_ms": prefill_ms}


def stop(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def until(check: Callable[[], Any], what: str, limit_s: float = 60) -> None:
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if check():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def unfinished(store: Client) -> int:
    return sum(store.zcard(keys.active(shard)) for shard in range(keys.DEFAULT_SHARDS))


def counted(store: Client, what: str) -> int:
    return sum(int(store.hget(keys.counters(shard), what) or 0) for shard in range(keys.DEFAULT_SHARDS))


def deltas(url: str, prompt: str = "go", **headers: str) -> Iterator[str]:
    """The pieces of a streamed completion; closing the iterator is the client's going away."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=90, headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = orjson.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield "".join(choice["text"] for choice in event["choices"])


def answer(url: str, prompt: str = "go") -> str:
    return "".join(deltas(url, prompt))


class Refused(Exception):
    """An error that the server has said, as a status or as an event."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.code = orjson.loads(body)["error"]["code"]

    @property
    def passes(self) -> bool:
        """Whether the same may be asked again: the server cannot serve now, or wants to be told what we have."""
        return self.status in (429, 503) or (self.status == 200 and self.code in ("stream_lost", "stream_gone"))


class Replica:
    """An api replica on a port of its own."""

    def __init__(self, roles: Deployment, *flags: str, failpoints: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = roles.start("api", "--fd", "-1", "--port", str(port), *flags, failpoints=failpoints)
        until(self.answers, "the replica does not answer", limit_s=300)  # a worker may compile its kernels first

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", verify=False, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


class Reader:
    """A client of one stream that goes on with `Last-Event-ID` wherever it is told to.

    Each event's id must name the byte that the text has come to, over all connections, and the text's checksum; an end
    comes once, and nothing behind it.

    Args:
        key: its Idempotency-Key.
        sums: whether ids have a checksum; those of releases before there was one have none.

    Attributes:
        text: what it has read, over all its connections.
    """

    def __init__(self, body: dict[str, Any], key: str = "", *, sums: bool = True) -> None:
        usage = {"stream_options": {"include_usage": True}}
        self._body = {"model": "m", "max_tokens": 400, "stream": True} | usage | body
        self._key = key
        self._sums = sums
        self._last_event_id = ""
        self.text = ""
        self.finish: str | None = None
        self.completion_tokens = -1
        self.ended = False

    @property
    def request(self) -> str:
        """The server's name for the stream."""
        return self._last_event_id.partition(":")[0]

    def persist(self, urls: Sequence[str], tries: int = 240) -> None:
        """Read to the end, on the next of the replicas whenever a connection breaks or one cannot serve.

        Raises:
            Refused: the stream is gone, or has failed.
        """
        for n in range(tries):
            try:
                self.read(urls[n % len(urls)])
                return
            except httpx.TransportError:
                pass
            except Refused as e:
                if not e.passes:
                    raise
            time.sleep(0.25)
        raise AssertionError(f"not ended after {tries} connections: {self.text!r}")

    def read(self, url: str, pieces: float = float("inf"), **headers: str) -> None:
        """Read so many pieces of text, or to the end. Raises httpx.TransportError when the connection breaks."""
        if self._key:
            headers["Idempotency-Key"] = self._key
        if self._last_event_id:
            headers["Last-Event-ID"] = self._last_event_id
        request: Any = {"json": self._body, "timeout": 90, "headers": headers, "verify": False, "trust_env": False}
        with httpx.stream("POST", f"{url}/v1/completions", **request) as answer:
            if answer.status_code != 200:
                raise Refused(answer.status_code, answer.read().decode())
            event_id = ""
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    self.take(line.removeprefix("data: "))
                    self._last_event_id, pieces = event_id or self._last_event_id, pieces - 1
                    self._check_place()
                    if pieces <= 0:
                        return
        if not self.ended:
            raise httpx.RemoteProtocolError("the stream ended in the middle")

    def take(self, data: str) -> None:
        """The next event."""
        if data == "[DONE]":
            self.ended = True
            return
        event = orjson.loads(data)
        if "error" in event:
            raise Refused(200, data)
        for choice in event["choices"]:
            assert self.finish is None, f"something came behind the end of {self.text!r}: {data}"
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]

    def _check_place(self) -> None:
        places = self._last_event_id.partition(":")[2].partition(":")[0]
        if "," in places or not places:
            return  # of several choices
        end, _, *digest = places.removesuffix("-").split(".")
        said = self.text.encode()
        sums = [f"{zlib.crc32(said):x}"] if self._sums else digest
        assert (int(end), digest) == (len(said), sums), f"{self._last_event_id} after {self.text!r}"

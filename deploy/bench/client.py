"""HTTP/1.1 for a load generator: a socket, the llhttp parser and a clock, and nothing between them.

A general client spends more on an event than some servers do, and both run on the same cores here. Bytes are stamped
in the callback that receives them, before anything else is scheduled.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from .requests import Answer, read_answer, read_failure
from .samples import Sample
from .sse import SseParser

DONE = b"[DONE]"


class Reply:
    """One response as it arrives: fills a sample, and collects what was not a stream."""

    def __init__(self, sample: Sample) -> None:
        self.status = 0
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body = bytearray()
        self._sample = sample
        self._sse: SseParser | None = None
        self._ended = False

    @property
    def begun(self) -> bool:
        """Whether the server has begun to answer."""
        return self.status != 0

    def on_headers(self, status: int, content_type: bytes) -> None:
        self.status = status
        if status == 200 and content_type.lower().startswith(b"text/event-stream"):
            self._sse = SseParser()

    def on_body(self, data: bytes, now: float) -> None:
        if self._sse is None:
            self.body += data
            return
        for payload in self._sse.feed(data):
            if payload == DONE:
                self._ended = True
                continue
            answer = read_answer(payload)
            self._sample.chunks += 1
            if answer.has_text:
                self._sample.text_times.append(now)
            self._take(answer)

    def finish(self, now: float, error: str | None = None) -> None:
        """The response is over; `error` says what cut it short. Only the first call counts."""
        if self.complete.done():
            return
        self._sample.end = now
        self._sample.error = self._sample.error or self._verdict(error)
        self.complete.set_result(None)

    def _verdict(self, error: str | None) -> str | None:
        if error is not None:
            return error
        if self.status != 200:
            return read_failure(self.status, bytes(self.body))
        if self._sse is not None:
            return None if self._ended else "stream ended without a finish_reason or [DONE]"
        answer = read_answer(bytes(self.body))
        self._take(answer)
        return answer.error

    def _take(self, answer: Answer) -> None:
        sample = self._sample
        self._ended = self._ended or answer.finished  # some servers never say [DONE]
        if answer.error is not None:
            sample.error = answer.error
        if answer.completion_tokens is not None:
            sample.completion_tokens = answer.completion_tokens
            sample.prompt_tokens = answer.prompt_tokens


class Connection(asyncio.Protocol):
    """A kept-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self.used = False  # has carried an exchange
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reply: Reply | None = None
        self._content_type = b""
        self._now = 0.0

    def send(self, request: bytes, reply: Reply) -> None:
        assert self._transport is not None, "a connection carries requests once it is open"
        assert self._reply is None, "a connection carries one exchange at a time"
        self._reply = reply
        self._content_type = b""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's answers to that class without being one

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:  # nobody has asked for anything
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._end(f"unreadable answer: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._now = time.perf_counter()
        self._end(f"connection lost: {exc}" if exc else "connection closed within the answer")
        self.lost.set_result(None)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._reply is not None
        self._reply.on_headers(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        assert self._reply is not None
        self._reply.on_body(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.used = True
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: str | None) -> None:
        reply, self._reply, self._parser = self._reply, None, None
        if error is not None:
            self.close()
        if reply is not None:
            reply.finish(self._now, error)


class Client:
    """Sends requests to one server, each on an idle connection or a new one.

    Args:
        url: scheme, host, port, and a path that all routes stand under.
        api_key: sent as a bearer token unless empty.
        timeout_s: limit of one exchange, connecting included.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        assert parts.hostname, f"no host in {url!r}"
        self._host, self._base = parts.hostname, parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    def post(self, path: str, body: bytes) -> bytes:
        """A whole request as bytes, built ahead of the clock."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises OSError with what went wrong, also for a status other than 200."""
        sample = Sample(start=time.perf_counter())
        reply = await self._exchange(f"GET {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(), sample)
        if reply is None or reply.status != 200:
            raise OSError(sample.error)
        return bytes(reply.body)

    async def send(self, request: bytes, start: float) -> Sample:
        """Send a request of `post` and measure its answer. Failures are in the sample's `error`, never raised."""
        sample = Sample(start=start)
        await self._exchange(request, sample)
        return sample

    async def close(self) -> None:
        """Close every connection, and wait until the loop has let go of it."""
        lost = [connection.lost for connection in self._open]
        for connection in self._open:
            connection.close()
        await asyncio.gather(*lost)

    async def _exchange(self, request: bytes, sample: Sample) -> Reply | None:
        reply = None
        sample.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    reply, used = await self._try(request, sample)
                    if sample.error is None or reply.begun or not used:
                        break
                    sample.error = None  # the server closed a kept connection as we chose it: no failure of its own
        except TimeoutError:
            sample.error = f"no answer within {self._timeout_s:g} s"
        except OSError as e:
            sample.error = f"cannot connect: {e.strerror or e}"
        if sample.error is not None:
            sample.end = time.perf_counter()
        return reply

    async def _try(self, request: bytes, sample: Sample) -> tuple[Reply, bool]:
        """One attempt; also says whether its connection had been used before."""
        connection, reply = await self._connect(), Reply(sample)
        used = connection.used
        try:
            connection.send(request, reply)
            await reply.complete
        finally:
            if connection.reusable and reply.complete.done() and not reply.complete.cancelled():
                self._idle.append(connection)
            else:
                connection.close()
        return reply, used

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection

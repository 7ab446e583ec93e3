"""A TCP proxy in front of a Redis on a Unix socket, in a thread: it delays, cuts, and drops replies when it is told."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Self


class Proxy:
    """Use as a context manager; the other calls come from any thread.

    Args:
        path: the server's socket. A connection finds it or is closed at once: while the server is away there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._mute: set[asyncio.StreamWriter] = set()  # to these clients no reply comes through
        self._delay_s = 0.0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the proxy does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def delay(self, seconds: float) -> None:
        """From now on each piece of either direction waits so long; 0: no more."""
        self._delay_s = seconds

    def cut(self) -> None:
        """Close every connection."""
        self._loop.call_soon_threadsafe(self._cut)

    def drop_replies(self) -> None:
        """What is asked on the connections that are open now goes through, and its replies do not, until `cut`."""
        self._loop.call_soon_threadsafe(lambda: self._mute.update(self._writers))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # asyncio calls a handler that was cancelled at the end an error
            await self._relay(reader, writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(writer)
        ways = [
            asyncio.create_task(self._copy(reader, to_server)),
            asyncio.create_task(self._copy(from_server, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(writer)
            self._mute.discard(writer)
            writer.transport.abort()
            to_server.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if sink not in self._mute:
                    sink.write(data)
                    await sink.drain()

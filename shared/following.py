"""What one client has not been given yet: chunks in order, without gaps, in a bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from .chunks import TextChunk
from .text_stream import Position

HELD_BYTES = 256 << 10  # of chunks that wait for their client; what comes then stays in Redis until there is room again


class Following:
    """The choices of one client's request, from given positions on. Iterate it once; it ends with the last choice.

    A client that reads slowly costs a bounded memory: beyond `HELD_BYTES` nothing more is taken, and what was left is
    read from the streams once half of them are gone.

    Args:
        room: called when there is room again.
        pause: called when there is none.
    """

    def __init__(self, positions: dict[str, Position], room: Callable[[], None], pause: Callable[[], None]) -> None:
        self.positions = positions
        self.open = set(positions)
        self.paused = False
        self._room = room
        self._pause = pause
        self._held = 0  # bytes
        self._ready: asyncio.Queue[tuple[TextChunk | Exception, int]] = asyncio.Queue()

    def offer(self, chunk: TextChunk, before: Position, size: int) -> bool:
        """Take a chunk of `size` bytes that stands at `before`; False when something between is missing."""
        here = self.positions[chunk.rid]
        after = Position(chunk.end, chunk.seq)
        if after <= here or chunk.rid not in self.open or self.paused:
            return True
        if before != here:
            return False
        self._take(chunk, after, size)
        return True

    def read(self, chunk: TextChunk, after: Position, size: int) -> None:
        """Take a chunk that was read from the stream behind our position: nothing can be missing."""
        if after > self.positions[chunk.rid] and chunk.rid in self.open and not self.paused:
            self._take(chunk, after, size)

    def _take(self, chunk: TextChunk, after: Position, size: int) -> None:
        self.positions[chunk.rid] = after
        if chunk.finish is not None:
            self.open.discard(chunk.rid)
        self._ready.put_nowait((chunk, size))
        self._held += size
        if self._held > HELD_BYTES and self.open:
            self.paused = True
            self._pause()

    def fail(self, error: Exception) -> None:
        self.open.clear()
        self._ready.put_nowait((error, 0))

    async def __aiter__(self) -> AsyncIterator[TextChunk]:
        while self.open or not self._ready.empty():
            item, size = await self._ready.get()
            if isinstance(item, Exception):
                raise item
            self._held -= size
            if self.paused and self._held < HELD_BYTES / 2:
                self.paused = False
                self._room()
            yield item

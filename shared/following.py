"""What one client has not been given yet: chunks in order, without gaps, in a bounded memory.

A server that was promoted, or came back without its last second, may hold less text than we have shown. A worker makes
it again, maybe in other chunks; it must be the text that was shown, and goes on behind that, or it cannot go on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from .chunks import TextChunk
from .errors import StreamGone
from .text_stream import Position

HELD_BYTES = 256 << 10  # of chunks that wait for their client; what comes then stays in Redis until there is room again


class Following:
    """The choices of one client's request, from their start on. Iterate it once; it ends with the last choice.

    A client that reads slowly costs a bounded memory: beyond `HELD_BYTES` nothing more is taken, and what was left is
    read from the streams once half of them are gone.

    Args:
        room: called when there is room again.
        pause: called when there is none.

    Attributes:
        doubted: choices of which the store may hold less than was shown: nothing is taken before it was `retold`.
    """

    def __init__(self, rids: Iterable[str], room: Callable[[], None], pause: Callable[[], None]) -> None:
        self.positions = dict.fromkeys(rids, Position())
        self.open = set(self.positions)
        self.doubted: set[str] = set()
        self.paused = False
        self._sums = dict.fromkeys(self.positions, 0)  # CRC-32 of the text that was shown
        self._room = room
        self._pause = pause
        self._held = 0  # bytes
        self._ready: asyncio.Queue[tuple[TextChunk | Exception, int]] = asyncio.Queue()

    def doubt(self) -> None:
        """The store was away: what it holds now is to be compared with what was shown."""
        self.doubted |= {rid for rid in self.open if self.positions[rid] != Position()}

    def takes(self, rid: str) -> bool:
        return rid in self.open and rid not in self.doubted and not self.paused

    def offer(self, chunk: TextChunk, before: Position, size: int) -> bool:
        """Take a chunk of `size` bytes that stands at `before`; False when something between is missing."""
        here = self.positions[chunk.rid]
        if not self.takes(chunk.rid) or Position(chunk.end, chunk.seq) <= here:
            return True
        if before != here:
            return False
        self._take(chunk, size)
        return True

    def read(self, chunk: TextChunk, size: int) -> None:
        """Take a chunk that was read from the stream behind our position: nothing can be missing.

        One that does not begin there was written after the store had lost what we have.
        """
        here = self.positions[chunk.rid]
        if not self.takes(chunk.rid) or Position(chunk.end, chunk.seq) <= here:
            return
        if chunk.offset != here.end:
            self.doubted.add(chunk.rid)
            return
        self._take(chunk, size)

    def retell(self, rid: str) -> Retelling:
        """Compare what the store holds of a choice, from its start on, with what was shown."""
        here = self.positions[rid]
        return Retelling(here, self._sums[rid])

    def retold(self, chunk: TextChunk, told: Retelling, size: int) -> None:
        """The next chunk of a choice that is compared. What goes beyond what was shown is taken.

        It is another text, or cannot be cut where we are: the client is told, and nothing is spliced.
        """
        beyond = told.beyond(chunk)
        if told.lost:
            self.fail(lost(chunk.rid))
        elif told.met:
            self.doubted.discard(chunk.rid)
            if beyond is not None:
                self._take(beyond, size)

    def _take(self, chunk: TextChunk, size: int) -> None:
        self.positions[chunk.rid] = Position(chunk.end, chunk.seq)
        self._sums[chunk.rid] = zlib.crc32(chunk.text.encode(), self._sums[chunk.rid])
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


class Retelling:
    """Chunks of a text from its start on, against what somebody has of it: `place` and the CRC-32 until there.

    Attributes:
        met: they have led to the place.
        lost: they cannot: the text is another one, ends before, or cannot be cut there.
    """

    def __init__(self, place: Position, digest: int) -> None:
        self.met = place == Position()
        self.lost = False
        self.crc = 0  # of all chunks so far
        self._place, self._digest = place, digest

    def beyond(self, chunk: TextChunk) -> TextChunk | None:
        """What of the next chunk is behind the place."""
        text = chunk.text.encode()
        there = self._place.end - chunk.offset  # bytes of the chunk that stand before the place
        shown = zlib.crc32(text[: max(0, there)], self.crc)
        self.crc = zlib.crc32(text, self.crc)
        if self.met:
            return chunk
        after = Position(chunk.end, chunk.seq)
        if after == self._place:
            self.met, self.lost = shown == self._digest, shown != self._digest
            # What ends there now had not when it was shown: the end is news.
            return replace(_behind(chunk, chunk.end), seq=chunk.seq + 1) if self.met and chunk.finish else None
        if after < self._place and (chunk.finish is None or chunk.end < self._place.end):
            self.lost = chunk.finish is not None
            return None
        # Ids and log-probabilities of tokens cannot be cut where the text is, nor compared.
        whole = there <= 0 or not (chunk.token_ids or chunk.logprobs)
        self.met = whole and shown == self._digest
        self.lost = not self.met
        return _behind(chunk, self._place.end) if self.met else None


def _behind(chunk: TextChunk, end: int) -> TextChunk:
    """What of a chunk stands behind a byte offset, which is one of its characters' beginning: the text is the same."""
    if chunk.offset >= end:
        return chunk
    return replace(chunk, offset=end, text=chunk.text.encode()[end - chunk.offset :].decode())


def lost(rid: str) -> StreamGone:
    return StreamGone(
        f"The store has lost what this stream ({rid.partition('-')[0]}) had said already, and cannot say the same "
        "again: send the request again.",
        code="stream_lost",
    )

"""Events of a stream and their places, of which a client names the last one it has when it resumes.

id: 0192f3a4b5c67d8e9f0a1b2c3d4e5f60-5:12.1,9.1-,        request ':' the place of each choice [':end']
                                      |    |    '- nothing sent of choice 2
                                      |    '- up to the entry (byte 9, seq 1), not its finish, should it have one
                                      '- up to the entry (byte 12, seq 1), with which the choice ended

Behind a place stands what was said until there: 12.1.c0ffee, the CRC-32 of the choice's text. A store that lost its
tail is filled again, maybe in other chunks, or with other text than the client has: a stream that is gone on with is
compared, and what goes on is what stands behind the client's text, or nothing does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from ...shared.chunks import TextChunk
from ...shared.errors import InvalidRequest, StreamGone


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """How far one choice is sent: up to an entry of its text stream, with its finish (`whole`) or without one."""

    end: int  # byte offset after the entry's text
    seq: int
    whole: bool = True
    digest: str = field(default="", compare=False)  # of the text until there; an earlier release's event has none

    def __str__(self) -> str:
        return f"{self.end}.{self.seq}" + (f".{self.digest}" if self.digest else "") + ("" if self.whole else "-")


OPENED = Place(0, 0)  # the role is sent, no text yet: entries begin at seq 1


def place_of(chunk: TextChunk) -> Place:
    return Place(chunk.end, chunk.seq, chunk.finish is not None)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event: its JSON value, and the place that a choice has reached with it (None: all choices have ended)."""

    data: Any
    index: int = -1
    place: Place | None = None


class Cursor:
    """The places of all choices of a stream; says each event's id, and drops those that the client has.

    Args:
        request: our id of the request.
        choices: how many there are.
        seen: the places the client reported; None for a new stream.
    """

    def __init__(self, request: str, choices: int, seen: LastEvent | None = None) -> None:
        self._request = request
        self._seen = seen
        self._places: list[Place | None] = list(seen.places) if seen else [None] * choices
        self._crcs = [0] * choices
        self._met: set[int] = set()  # choices that have passed the place which the client reported

    def follow(self, index: int, chunk: TextChunk) -> list[TextChunk]:
        """The next chunk of a choice, before its events; cut in two where the client's text ends within it.

        Raises:
            StreamGone: the choice does not lead to the client's place, or by another way than the client came.
        """
        before = self._crcs[index]
        self._crcs[index] = zlib.crc32(chunk.text.encode(), before)
        seen = self._seen.places[index] if self._seen else None
        if seen is None or seen <= OPENED or index in self._met:
            return [chunk]
        if chunk.end < seen.end and chunk.finish is None:
            return [chunk]
        text = chunk.text.encode()
        said = f"{zlib.crc32(text[: seen.end - chunk.offset], before):x}"
        if chunk.end < seen.end or seen.digest not in ("", said):
            raise _gone()
        if chunk.end > seen.end and (seen.whole or not seen.digest):
            raise _gone()
        if seen.whole and seen.digest:
            return [replace(chunk, seq=min(chunk.seq, seen.seq))]  # the choice had ended there: the client has it all
        if chunk.end == seen.end and chunk.finish is None:
            if chunk.seq >= seen.seq:
                self._met.add(index)
            return [chunk]
        self._met.add(index)
        return _cut(chunk, text, seen)

    def advance(self, event: StreamEvent) -> str | None:
        """The event's id, or None when the client has it already."""
        if event.place is None:
            return None if self._seen and self._seen.ended else f"{self._id()}:end"
        seen = self._seen.places[event.index] if self._seen else None
        if seen is not None and event.place <= seen:
            return None
        self._places[event.index] = replace(event.place, digest=f"{self._crcs[event.index]:x}")
        return self._id()

    def _id(self) -> str:
        return f"{self._request}:{','.join('' if place is None else str(place) for place in self._places)}"


def _cut(chunk: TextChunk, text: bytes, seen: Place) -> list[TextChunk]:
    """What the client has of a chunk, and what it has not."""
    here = seen.end - chunk.offset
    # Ids and log-probabilities of tokens cannot be cut where the text is: the client has all, or it cannot go on.
    if here < len(text) and (chunk.token_ids or chunk.logprobs):
        raise _gone()
    had = replace(chunk, text=text[:here].decode(), seq=seen.seq, finish=None)
    new = replace(
        chunk, offset=seen.end, text=text[here:].decode(), token_ids=None, logprobs=None, prompt_logprobs=None
    )
    return [had, new if new.text else replace(new, seq=max(chunk.seq, seen.seq))]


def _gone() -> StreamGone:
    return StreamGone(
        "The store has lost what this stream had said already, and says something else now: send the request again.",
        code="stream_lost",
    )


@dataclass(frozen=True, slots=True)
class LastEvent:
    """A `Last-Event-ID`, read."""

    request: str
    places: tuple[Place | None, ...]
    ended: bool = False

    @classmethod
    def parse(cls, text: str) -> LastEvent:
        """Raises InvalidRequest when it is no id of ours."""
        request, *rest = text.split(":")
        try:
            if not request or not 1 <= len(rest) <= 2 or rest[1:] not in ([], ["end"]):
                raise ValueError
            return cls(request, tuple(map(_place, rest[0].split(","))), ended=len(rest) == 2)
        except ValueError as e:
            raise InvalidRequest(f"Last-Event-ID {text[:80]!r} is not one that this server sent.") from e


def _place(text: str) -> Place | None:
    if not text:
        return None
    end, seq, *digest = text.removesuffix("-").split(".")
    if len(digest) > 1 or not all(part.isascii() and part.isalnum() for part in (end, seq, *digest)):
        raise ValueError(text)
    return Place(int(end), int(seq), not text.endswith("-"), "".join(digest))

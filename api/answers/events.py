"""Events of a stream and their places, of which a client names the last one it has when it resumes.

id: 0192f3a4b5c67d8e9f0a1b2c3d4e5f60-5:12.1,9.1-,        request ':' the place of each choice [':end']
                                      |    |    '- nothing sent of choice 2
                                      |    '- of the entry (byte 9, seq 1): its text, its finish not yet
                                      '- all up to the entry (byte 12, seq 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...shared.chunks import TextChunk
from ...shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """How far one choice is sent: up to an entry of its text stream, whole or without its finish."""

    end: int  # byte offset after the entry's text
    seq: int
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.end}.{self.seq}" + ("" if self.whole else "-")


OPENED = Place(0, 0)  # the role is sent, no text yet: entries begin at seq 1


def place_of(chunk: TextChunk, *, whole: bool = True) -> Place:
    return Place(chunk.end, chunk.seq, whole)


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

    def advance(self, event: StreamEvent) -> str | None:
        """The event's id, or None when the client has it already."""
        if event.place is None:
            return None if self._seen and self._seen.ended else f"{self._id()}:end"
        seen = self._seen.places[event.index] if self._seen else None
        if seen is not None and event.place <= seen:
            return None
        self._places[event.index] = event.place
        return self._id()

    def _id(self) -> str:
        return f"{self._request}:{','.join('' if place is None else str(place) for place in self._places)}"


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
    end, _, seq = text.removesuffix("-").partition(".")
    if not (end.isascii() and end.isdigit() and seq.isascii() and seq.isdigit()):
        raise ValueError(text)
    return Place(int(end), int(seq), not text.endswith("-"))

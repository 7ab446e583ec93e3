"""Server-sent events out of bytes, however the network cuts them."""

from __future__ import annotations


class SseParser:
    """Collects the `data` of events; fields that OpenAI-compatible servers do not use are dropped.

    Lines end in LF or CRLF. The lone CR that the standard also allows is not a line's end here: no server sends it.
    """

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # data lines of an unfinished event

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the data of the events that they complete, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

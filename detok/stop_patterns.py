"""Patterns on a stream of text: the twin of stops.py for requests with `stop_regex`, whose stop strings it finds, too.

The output ends with the first character at which some match is complete. Of several that are complete there, a stop
string comes before a pattern, then the list's order counts, and of one pattern's the longest is what is cut off. What
may still become a match waits, for `MAX_MATCH` characters at most: what would be longer is no match.
"""

from __future__ import annotations

from ..shared.patterns import program

MAX_MATCH = 1000


class PatternMatcher:
    """See `StopMatcher`, whose methods and attributes it has. `partial` is what may still become a match.

    Raises:
        PatternError: a pattern cannot be walked.
    """

    __slots__ = ("_at", "_keep", "_live", "_names", "_program", "matched", "partial")

    def __init__(self, stops: tuple[str, ...], patterns: tuple[str, ...], *, keep: bool = False) -> None:
        self._program = program(patterns, stops)
        self._names = (*stops, *patterns)
        self._keep = keep
        self._live: dict[int, int] = {}  # states that wait for their character, and where their match began
        self._at = 0  # characters walked
        self.partial = ""
        self.matched: str | None = None

    def restore(self, partial: str) -> None:
        """Take the state of another matcher of the same request."""
        self._live, self._at, self.partial = {}, 0, partial
        for char in partial:
            self._walk(char)

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text; return what may go out. While not `armed` a match that completes is ordinary text."""
        whole, begins = self.partial + text, self._at - len(self.partial)
        for i, char in enumerate(text, 1):
            complete = self._walk(char)
            if complete is not None and armed:
                index, start = complete
                self.matched, self.partial, self._live = self._names[index], "", {}
                return text[:i] if self._keep else whole[: start - begins]
        held = self._at - min(self._live.values(), default=self._at)
        self.partial = whole[len(whole) - held :]
        return text if self._keep else whole[: len(whole) - held]

    def flush(self) -> str:
        """The output ends here: what was held is text."""
        out = "" if self._keep else self.partial
        self._live, self.partial = {}, ""
        return out

    def _walk(self, char: str) -> tuple[int, int] | None:
        """Take a character; what is complete with it (its index, and where it began)."""
        tests, follow, ends, at = self._program.tests, self._program.follow, self._program.ends, self._at
        complete: tuple[int, int] | None = None
        after: dict[int, int] = {}
        for state, start in (dict.fromkeys(self._program.starts, at) | self._live).items():
            if tests[state](char):
                if ends[state] >= 0 and (complete is None or (ends[state], start) < complete):
                    complete = ends[state], start
                for then in follow[state]:
                    after[then] = min(start, after.get(then, at))
        self._at = at + 1
        self._live = {state: start for state, start in after.items() if self._at - start < MAX_MATCH}
        return complete

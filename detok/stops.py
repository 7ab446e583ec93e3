"""Stop strings on a stream of text: what may go out now, what must wait, and where the output ends.

The stops form one Aho-Corasick automaton, so each character is looked at once, however long the text and however many
stops there are. A node of it is the longest suffix of the text that is a prefix of some stop: exactly what is held.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


class _Automaton:
    """Node 0 is the empty string. Per node: `depth` its length, `stop` the index of the stop that completes there."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.stop: list[int | None] = [None]
        for index, stop in enumerate(stops):
            self._insert(stop, index)
        self._link()
        # Nothing but a first character leaves node 0: the regex engine skips to it.
        self.first = re.compile("[" + "".join(re.escape(c) for c in sorted(self.edges[0])) + "]")

    def next(self, node: int, char: str) -> int:
        while (target := self.edges[node].get(char)) is None:
            if node == 0:
                return 0
            node = self.fail[node]
        return target

    def held(self, node: int) -> int:
        """Characters that may still become a stop: those of the node, or, where no stop goes on, of its suffixes."""
        while not self.edges[node]:
            node = self.fail[node]
        return self.depth[node]

    def _insert(self, stop: str, index: int) -> None:
        node = 0
        for char in stop:
            target = self.edges[node].get(char)
            if target is None:
                target = self.edges[node][char] = len(self.edges)
                self.edges.append({})
                self.depth.append(self.depth[node] + 1)
                self.fail.append(0)
                self.stop.append(None)
            node = target
        if self.stop[node] is None:
            self.stop[node] = index

    def _link(self) -> None:
        """Breadth first: the fail link is the longest proper suffix in the trie, and hands its stop on."""
        queue = deque(self.edges[0].values())
        while queue:
            node = queue.popleft()
            for char, target in self.edges[node].items():
                fail = self.fail[target] = self.next(self.fail[node], char)
                inherited, own = self.stop[fail], self.stop[target]
                if inherited is not None and (own is None or inherited < own):
                    self.stop[target] = inherited
                queue.append(target)


SHARED_CHARS = 256  # of all the stops of a request: longer lists are rare, and would make the cache large

_shared = lru_cache(maxsize=256)(_Automaton)


def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _shared(stops) if sum(map(len, stops)) <= SHARED_CHARS else _Automaton(stops)


class StopMatcher:
    """Finds the stop that completes first; of two that complete together, the first in the list.

    Args:
        stops: none of them empty.
        keep: leave the stop itself in the text (`no_stop_trim`); then nothing has to be held.

    Attributes:
        matched: the stop that ended the output. Afterwards nothing more comes out.
        partial: the longest suffix of the text that is a proper prefix of some stop; the whole state.
    """

    __slots__ = ("_automaton", "_keep", "_node", "matched", "partial")

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._automaton = _automaton(stops)
        self._keep = keep
        self._node = 0
        self.partial = ""
        self.matched: str | None = None

    def restore(self, partial: str) -> None:
        """Take the state of another matcher of the same request."""
        self._node, self.partial = 0, partial
        for char in partial:
            self._node = self._automaton.next(self._node, char)

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text; return what may go out. While not `armed` a stop that completes is ordinary text."""
        automaton, node, i = self._automaton, self._node, 0
        while i < len(text):
            if node == 0:
                start = automaton.first.search(text, i)
                if start is None:
                    break
                i = start.start()
            node = automaton.next(node, text[i])
            i += 1
            index = automaton.stop[node]
            if index is not None and armed:
                return self._end(automaton.stops[index], text[:i])
        return self._release(node, text)

    def flush(self) -> str:
        """The output ends here: what was held is text."""
        out = "" if self._keep else self.partial
        self._node, self.partial = 0, ""
        return out

    def _release(self, node: int, text: str) -> str:
        if not node and not self.partial:
            return text
        text_and_partial = self.partial + text
        cut = len(text_and_partial) - self._automaton.held(node)
        self._node, self.partial = node, text_and_partial[cut:]
        return text if self._keep else text_and_partial[:cut]

    def _end(self, stop: str, text: str) -> str:
        held = "" if self._keep else self.partial
        self.matched, self.partial, self._node = stop, "", 0
        return text if self._keep else (held + text)[: -len(stop)]

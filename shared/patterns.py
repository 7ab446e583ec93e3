"""Regular expressions that are walked character by character, in time linear in the text.

Many requests share a detokenizer, so no pattern may take long: nothing is tried twice, and a pattern has so many states
at most. What is asked is where the first match of a growing text ends, so greedy and lazy are the same.

Patterns are Python's, without what looks around a match (anchors, word boundaries, lookaround) or back (references).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import or_
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARS = 1000  # of one pattern
MAX_STATES, MAX_MOVES = 500, 5000  # of all patterns of a request: what a character of text may cost
MAX_PARTS = 20_000  # that are looked at while a pattern is compiled
_AGAIN = -2  # as an end: the loop's beginning, which is not known yet

Test = Callable[[str], bool]


class PatternError(ValueError):
    """A pattern that cannot be walked, and why."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What may come next: characters' states, and the index of what is complete already, or -1."""

    states: frozenset[int]
    end: int

    def __or__(self, other: _Entry) -> _Entry:
        ends = sorted({self.end, other.end} - {-1})  # `_AGAIN` before the others
        return _Entry(self.states | other.states, ends[0] if ends else -1)


class Program:
    """Several patterns as one automaton without empty moves: a state is a character to come, and what may follow it.

    Args:
        literals: texts, which come before the patterns.

    Attributes:
        tests: whether a state takes a character.
        follow: the states that are next.
        ends: the index of the first literal or pattern that is complete behind a state's character, or -1.
        starts: the states of first characters.

    Raises:
        PatternError: a pattern is none, wants what is not walked, matches the empty text, or takes too many states.
    """

    def __init__(self, patterns: Sequence[str], literals: Sequence[str] = ()) -> None:
        self.tests: list[Test] = []
        self.follow: list[tuple[int, ...]] = []
        self.ends: list[int] = []
        self._parts = 0
        starts: set[int] = set()
        for index, text in enumerate((*literals, *patterns)):
            entry = self._text(text, index) if index < len(literals) else self._pattern(text, index)
            if entry.end >= 0:
                raise PatternError("it matches the empty text")
            starts |= entry.states
        if sum(map(len, self.follow)) > MAX_MOVES:
            raise PatternError("it goes on in too many ways: write fewer alternatives within repeats")
        self.starts = tuple(sorted(starts))

    def _text(self, text: str, index: int) -> _Entry:
        entry = _Entry(frozenset(), index)
        for char in reversed(text):
            entry = self._state(partial(str.__eq__, char), entry)
        return entry

    def _pattern(self, text: str, index: int) -> _Entry:
        if len(text) > MAX_CHARS:
            raise PatternError(f"it has {len(text)} characters, and may have {MAX_CHARS}")
        try:
            with warnings.catch_warnings(action="ignore"):
                parsed = parser.parse(text)
            return self._all(parsed, _Entry(frozenset(), index), parsed.state.flags)
        except (re.error, OverflowError, RecursionError) as e:
            raise PatternError(f"it is no regular expression: {e}") from e

    def _state(self, test: Test, then: _Entry) -> _Entry:
        if len(self.tests) >= MAX_STATES:
            raise PatternError(f"it takes more than {MAX_STATES} states: write shorter repeats")
        self.tests.append(test)
        self.follow.append(tuple(sorted(then.states)))
        self.ends.append(then.end)
        return _Entry(frozenset({len(self.tests) - 1}), -1)

    def _all(self, items: Iterable[tuple[Any, Any]], then: _Entry, flags: int) -> _Entry:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise PatternError("it repeats too much")
        for what, value in reversed(list(items)):
            then = self._one(what, value, then, flags)
        return then

    def _one(self, what: Any, value: Any, then: _Entry, flags: int) -> _Entry:
        if what in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._state(_test_of(what, value, flags), then)
        if what is op.BRANCH:
            return reduce(or_, [self._all(branch, then, flags) for branch in value[1]])
        if what is op.SUBPATTERN:
            _group, add, remove, items = value
            return self._all(items, then, (flags | add) & ~remove)
        if what in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, body = value
            return self._repeat(least, most, body, then, flags)
        raise PatternError(
            f"it wants {str(what).lower().replace('_', ' ')}, which needs more than the match's own text"
        )

    def _repeat(self, least: int, most: Any, items: Any, then: _Entry, flags: int) -> _Entry:
        if most is op.MAXREPEAT:
            then = self._loop(items, then, flags)
        else:
            behind = then
            for _ in range(most - least):
                then = self._all(items, then, flags) | behind
        for _ in range(least):
            then = self._all(items, then, flags)
        return then

    def _loop(self, items: Any, then: _Entry, flags: int) -> _Entry:
        """Any number of `items`: what is next behind them is what is next before them, too."""
        first = len(self.tests)
        body = self._all(items, _Entry(frozenset(), _AGAIN), flags)
        whole = _Entry(body.states, -1) | then
        for state in range(first, len(self.tests)):
            if self.ends[state] == _AGAIN:
                self.follow[state] = tuple(sorted({*self.follow[state], *whole.states}))
                self.ends[state] = whole.end
        return whole


program = lru_cache(maxsize=128)(Program)


def _test_of(what: Any, value: Any, flags: int) -> Test:
    """Whether a character is what one item of a parsed pattern says."""
    if what is op.ANY:
        return _any if flags & re.DOTALL else partial(str.__ne__, "\n")
    negated, items = what is op.NOT_LITERAL, [(op.LITERAL, value)]
    if what is op.IN:
        negated = value[0][0] is op.NEGATE
        items = value[negated:]
    tests = [_test_of_item(kind, each, flags) for kind, each in items]
    if flags & re.IGNORECASE:
        return lambda char: negated is not any(test(c) for test in tests for c in _cases(char))
    return lambda char: negated is not any(test(char) for test in tests)


def _any(_char: str) -> bool:
    return True


def _cases(char: str) -> set[str]:
    return {c for c in (char, char.lower(), char.upper(), char.casefold()) if len(c) == 1}


def _test_of_item(kind: Any, value: Any, flags: int) -> Test:
    if kind is op.LITERAL:
        return partial(str.__eq__, chr(value))
    if kind is op.RANGE:
        low, high = map(chr, value)
        return lambda char: low <= char <= high
    inverse, test = CATEGORIES[value]
    if flags & re.ASCII:
        return lambda char: inverse is not (char.isascii() and test(char))
    return lambda char: inverse is not test(char)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


CATEGORIES: dict[Any, tuple[bool, Test]] = {
    op.CATEGORY_DIGIT: (False, str.isdecimal),
    op.CATEGORY_NOT_DIGIT: (True, str.isdecimal),
    op.CATEGORY_SPACE: (False, str.isspace),
    op.CATEGORY_NOT_SPACE: (True, str.isspace),
    op.CATEGORY_WORD: (False, _is_word),
    op.CATEGORY_NOT_WORD: (True, _is_word),
}

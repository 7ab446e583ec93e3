"""Patterns that end an output: found where Python's `re` finds them, however the text is cut, in bounded time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import pytest
from headrace.detok.state import DecodeState
from headrace.detok.stop_patterns import MAX_MATCH, PatternMatcher
from headrace.shared.chunks import Finish, TextChunk, TokenChunk
from headrace.shared.messages import DecodeParams
from headrace.shared.patterns import MAX_MOVES, MAX_STATES, PatternError, Program
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit.tokenizers import byte_level

# --- patterns as drawn: small, over few letters, so that they meet ---------------------------------------------------

LETTERS = "abBé1_ \n"
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "é",
        r"\n",
        ".",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        "[ab]",
        "[^a]",
        "[a-z1]",
        r"[^\W\d]",
        r"[\s_]",
        "(?i:B)",
    ]
)
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "??"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("({}){}".format, inner, REPEATS)
        | st.builds("(?s:{})".format, inner)
        | st.builds("(?a:{})".format, inner)
    ),
    max_leaves=8,
)
TEXTS = st.text(LETTERS, max_size=12)


def first_end(patterns: Sequence[str], text: str) -> tuple[int, int, int] | None:
    """Where the first match is complete, which pattern it is of, and where it begins: tried one by one."""
    for end in range(1, len(text) + 1):
        for index, pattern in enumerate(patterns):
            for start in range(end):
                if re.fullmatch(pattern, text[start:end]):
                    return end, index, start
    return None


def matcher(patterns: Sequence[str], stops: Sequence[str] = (), *, keep: bool = False) -> PatternMatcher:
    try:
        return PatternMatcher(tuple(stops), tuple(patterns), keep=keep)
    except PatternError as e:
        assume("empty text" not in str(e) and "too many" not in str(e) and "states" not in str(e))
        raise


@settings(deadline=None, max_examples=300)
@given(st.lists(PATTERNS, min_size=1, max_size=2), TEXTS, st.data())
def test_the_output_ends_where_re_says(patterns: list[str], text: str, data: st.DataObject) -> None:
    """Cut anywhere, and handed over to another matcher at each cut."""
    keep = data.draw(st.booleans())
    expected = first_end(patterns, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    one, out = matcher(patterns, keep=keep), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out += one.feed(text[start:end])
        if one.matched is not None:
            break
        two = matcher(patterns, keep=keep)
        two.restore(one.partial)
        one = two
    if expected is None:
        assert (out + one.flush(), one.matched) == (text, None)
    else:
        end, index, start = expected
        assert (out, one.matched) == (text[: end if keep else start], patterns[index])


@settings(deadline=None, max_examples=200)
@given(PATTERNS, TEXTS, TEXTS)
def test_only_what_may_become_a_match_waits(pattern: str, text: str, more: str) -> None:
    """What went out is not needed by any match that comes, and nothing waits in vain for one that cannot come."""
    one = matcher([pattern])
    sent = one.feed(text)
    assume(one.matched is None)
    assert sent + one.partial == text
    found = first_end([pattern], text + more)
    assert found is None or found[2] >= len(sent)


def test_exactly_what_a_match_may_begin_with_waits() -> None:
    one = matcher([r"\n+Human:", "a{3}b"])
    assert (one.feed("so\n\nHu"), one.partial) == ("so", "\n\nHu")
    assert (one.feed("mble aa"), one.partial) == ("\n\nHumble ", "aa")
    assert (one.feed("aa"), one.partial) == ("a", "aaa")
    assert (one.feed("b"), one.matched) == ("", "a{3}b")


def test_a_match_that_grows_too_long_is_none() -> None:
    one = matcher(["<.*>"])
    assert one.feed("<" + "x" * (MAX_MATCH - 2)) == ""
    assert one.feed("x") == "<" + "x" * (MAX_MATCH - 1)
    assert (one.feed(">"), one.feed("<b>"), one.matched) == (">", "", "<.*>")


def test_stop_strings_come_first_and_unarmed_matches_are_text() -> None:
    one = matcher(["b."], ["abc"])
    assert (one.feed("xabc"), one.matched) == ("x", "abc")
    two = matcher([r"\d"])
    assert two.feed("a1b", armed=False) == "a1b"
    assert (two.feed("c2"), two.matched) == ("c", r"\d")


# --- within a request -------------------------------------------------------------------------------------------------

BYTES = byte_level()


def decode(text: str, **options: object) -> list[TextChunk]:
    from headrace.detok.vocab import Vocabulary

    params = DecodeParams(tokenizer="t", prompt_tokens=0, return_token_ids=True, **options)  # type: ignore[arg-type]
    state = DecodeState("r", params, Vocabulary(BYTES.tokenizer))
    ids = [token for char in text for token in BYTES.spelled(char)]
    steps = [TokenChunk("r", i, (token,), finish=None) for i, token in enumerate(ids)]
    steps.append(TokenChunk("r", len(ids), (), finish=Finish("length")))
    return [chunk for step in steps if (chunk := state.push(step)) is not None]


def test_a_request_ends_at_a_pattern_which_is_trimmed_like_a_stop_string() -> None:
    chunks = decode("Grüße\n\nHuman: hi", stop_regex=(r"\n+\w+:",))
    assert "".join(chunk.text for chunk in chunks) == "Grüße"
    assert chunks[-1].finish == Finish("stop", r"\n+\w+:")
    assert chunks[-1].usage.completion_tokens == sum(len(chunk.token_ids or ()) for chunk in chunks)


def test_a_pattern_waits_for_min_new_tokens_and_may_be_kept() -> None:
    chunks = decode("1a2b", stop_regex=(r"\d",), no_stop_trim=True, min_new_tokens=2)
    assert "".join(chunk.text for chunk in chunks) == "1a2"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
        ("a$", "wants at"),
        (r"\bword", "wants at"),
        ("(?<=a)b", "wants assert"),
        ("(?!a)b", "wants assert"),
        (r"(a)\1", "wants groupref"),
        ("(?>a)b", "wants atomic"),
        ("a++", "wants possessive"),
        (f"a{{{MAX_STATES + 1}}}", "states"),
        ("((a{100}){100}){100}", "states"),
        ("((){1000}){1000}a", "repeats too much"),
        ("a" * 1001, "1001 characters"),
        ("(" + "|".join(f"{i:02}" for i in range(90)) + ")+", "too many ways"),
        ("(" * 900, "no regular expression"),
    ],
)
def test_what_cannot_be_walked_is_said(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        Program([pattern])


def test_a_hostile_pattern_costs_what_its_states_are_allowed() -> None:
    """Where `re` would try 2^n ways, each character is tried by each state once."""
    tried = 0

    def counted(char: str) -> bool:
        nonlocal tried
        tried += 1
        return char == "a"

    one = matcher(["((a+)+)+b"])
    one._program.tests[:] = [counted if test("a") else test for test in one._program.tests]
    text = "a" * 500
    assert one.feed(text) + one.partial == text
    assert tried <= len(text) * len(one._program.tests)
    assert sum(map(len, one._program.follow)) <= MAX_MOVES


def test_what_python_warns_of_is_no_line_of_the_log() -> None:
    with warnings.catch_warnings(action="error"):
        Program(["[[a]"])

"""Bodies out of bytes: what is JSON is read, whatever its texts hold; what has too many values is refused unread."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from headrace.api import bodies
from headrace.api.bodies import MAX_CONTAINERS, MAX_VALUES, decode
from headrace.api.validation import is_deeper
from headrace.shared.errors import InvalidRequest, TooLarge
from hypothesis import given
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('\\"[]{},:a\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('\\",[a'), max_size=4), inner),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    return asyncio.run(decode(data))


def counted(value: Any) -> tuple[int, int]:
    """Commas outside texts, and arrays and objects."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [counted(v) for v in (value.values() if isinstance(value, dict) else value)]
    return sum(i[0] for i in inner) + max(0, len(inner) - 1), sum(i[1] for i in inner) + 1


@given(JSON, st.integers(1, 6), st.integers(0, 6))
def test_what_stands_in_texts_counts_for_nothing(value: Any, most_values: int, most_containers: int) -> None:
    commas, containers = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_VALUES", most_values)
        patch.setattr(bodies, "MAX_CONTAINERS", most_containers)
        if commas >= most_values or containers > most_containers:
            with pytest.raises(TooLarge):
                read(orjson.dumps(value))
        else:
            assert read(orjson.dumps(value)) == value


@pytest.mark.parametrize(
    "value",
    [[1] * (MAX_VALUES + 1), ["a"] * (MAX_VALUES + 1), [[1]] * MAX_CONTAINERS, [{"a": 1}] * MAX_CONTAINERS],
    ids=["ids", "texts", "arrays", "objects"],
)
def test_too_many_values_are_refused(value: list[Any]) -> None:
    with pytest.raises(TooLarge, match="more than"):
        read(orjson.dumps(value))


@pytest.mark.parametrize(
    "value",
    [[1] * MAX_VALUES, [[1]] * (MAX_CONTAINERS - 1), ['f({"a", [b]}, "\\");\n' * 100_000]],
    ids=["ids", "arrays", "a text of code"],
)
def test_as_many_as_may_be_are_read(value: list[Any]) -> None:
    assert read(orjson.dumps(value)) == value


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": NaN}', b'"' * (1 << 19), b"[" * (1 << 13), b" " * (1 << 19)])
def test_what_is_no_json_is_a_400(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as e:
        read(data)
    assert e.value.code == "invalid_json"


@given(JSON, st.integers(0, 6))
def test_depth(value: Any, levels: int) -> None:
    def depth(value: Any) -> int:
        if not isinstance(value, (list, dict)):
            return 0
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)

    assert is_deeper(value, levels) == (depth(value) > levels)

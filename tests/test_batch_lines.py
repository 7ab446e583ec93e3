"""The lines of an input file: where they end, and every code of the contract on validation."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from headrace.api.batches.model import LineError
from headrace.api.batches.validate import physical_lines, request_lines, validate
from hypothesis import given
from hypothesis import strategies as st
from kit.batches import CHAT, line

BODY = {"model": "m", "messages": []}


def errors_of(data: bytes, endpoint: str = CHAT, max_lines: int = 10) -> list[tuple[str, str | None, int | None]]:
    found = validate(io.BytesIO(data), endpoint, {"m", "n"}, max_lines)
    return [(error.code, error.param, error.line) for error in found.errors]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\n\nb", [(1, b"a"), (3, b"b")]),
        (b"a\r\n \r\n\tb\r\r\n", [(1, b"a"), (3, b"\tb\r")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        ("a\u2028b\u0085c\x0bd\n".encode(), [(1, "a\u2028b\u0085c\x0bd".encode())]),
        (b"a\rb", [(1, b"a\rb")]),
        (b"\n\n", []),
    ],
)
def test_physical_lines(data: bytes, expected: list[tuple[int, bytes]]) -> None:
    assert list(physical_lines(io.BytesIO(data))) == expected


def test_a_good_file_with_mark_crlf_and_blank_lines() -> None:
    data = b"\xef\xbb\xbf" + line("a").replace(b"\n", b"\r\n") + b"\r\n\n" + line("b").rstrip()
    found = validate(io.BytesIO(data), CHAT, {"m"}, 2)
    assert (found.total, found.models, found.errors) == (2, {"m"}, [])
    assert [(r.number, r.custom_id) for r in request_lines(io.BytesIO(data))] == [(1, "a"), (4, "b")]
    assert [r.custom_id for r in request_lines(io.BytesIO(data), skip={1})] == ["b"]


def test_line_separators_inside_a_string_are_no_line_ends() -> None:
    data = json.dumps(
        {"custom_id": "a\u2028\u0085\x0b", "method": "POST", "url": CHAT, "body": BODY}, ensure_ascii=False
    ).encode()
    data = data.replace(b"\\u000b", b"\\u000b")
    assert errors_of(data) == []
    assert [r.custom_id for r in request_lines(io.BytesIO(data))] == ["a\u2028\u0085\x0b"]


def test_every_malformed_line_is_named() -> None:
    data = b"{nonsense\n" + line("a") + b'["an array"]\n' + line("b") + b"NaN\n"
    assert errors_of(data) == [("invalid_json_line", None, n) for n in (1, 3, 5)]
    assert validate(io.BytesIO(b"{"), CHAT, {"m"}, 9).errors == [
        LineError("invalid_json_line", "This line is not parseable as valid JSON.", None, 1)
    ]


def test_a_repeated_custom_id() -> None:
    assert errors_of(line("a") + line("a") + line("b") + line("a")) == [
        ("duplicate_custom_id", "custom_id", 2),
        ("duplicate_custom_id", "custom_id", 4),
    ]


def test_a_custom_id_is_a_string_kept_as_it_is() -> None:
    assert errors_of(line(7) + line(None)) == [("invalid_type", "custom_id", 1), ("invalid_type", "custom_id", 2)]
    data = line(" a ") + line("a") + line("🦩") + line("")
    assert errors_of(data) == []
    assert [r.custom_id for r in request_lines(io.BytesIO(data))] == [" a ", "a", "🦩", ""]


def test_each_missing_field_is_named() -> None:
    assert errors_of(b'{"custom_id":"a","body":{"model":"m","messages":[]}}') == [
        ("missing_required_parameter", "method", 1),
        ("missing_required_parameter", "url", 1),
    ]
    assert errors_of(b"{}") == [
        ("missing_required_parameter", name, 1) for name in ("custom_id", "method", "url", "body")
    ]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "invalid_url", "url"),
        ({"url": "/evil/v1/chat/completions"}, "invalid_url", "url"),
        ({"body": {**BODY, "stream": True}}, "streaming_unsupported", "body.stream"),
        ({"body": {**BODY, "model": "gpt-none"}}, "model_not_found", "body.model"),
        ({"body": {"messages": []}}, "invalid_request", "body.model"),
        ({"body": {"model": "m"}}, "invalid_request", "body.messages"),
        ({"body": []}, "invalid_type", "body"),
    ],
)
def test_each_code_with_its_line(changes: dict[str, Any], code: str, param: str) -> None:
    assert errors_of(line("a") + line("b", **changes)) == [(code, param, 2)]


def test_false_is_no_stream_and_several_models_are_accepted() -> None:
    assert errors_of(line("a", body={**BODY, "stream": False}) + line("b", body={**BODY, "model": "n"})) == []


def test_completions_need_a_prompt() -> None:
    url = "/v1/completions"
    good, bad = {"model": "m", "prompt": "x"}, {"model": "m", "messages": []}
    assert errors_of(line("a", url=url, body=good) + line("b", url=url, body=bad), url) == [
        ("invalid_request", "body.prompt", 2)
    ]


def test_too_many_and_none() -> None:
    assert errors_of(line("a") + line("b") + line("c"), max_lines=2) == [("too_many_tasks", None, None)]
    assert errors_of(line("a") + b"\n\n" + line("b"), max_lines=2) == []
    assert errors_of(b"\xef\xbb\xbf\r\n\n") == [("empty_file", None, None)]


@given(st.binary(max_size=200))
def test_any_bytes_are_judged_without_an_exception(data: bytes) -> None:
    found = validate(io.BytesIO(data), CHAT, {"m"}, 5)
    assert found.errors or found.total


@given(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=6), st.randoms())
def test_custom_ids_come_back_identical(custom_ids: list[str], random: Any) -> None:
    encodable = [c for c in custom_ids if c.isprintable() or not any("\ud800" <= ch <= "\udfff" for ch in c)]
    data = b"".join(
        line(c).replace(b"\n", random.choice([b"\n", b"\r\n"])) + random.choice([b"", b"\n"]) for c in encodable
    )
    assert [r.custom_id for r in request_lines(io.BytesIO(data))] == encodable

"""The input file: its lines as they lie on the disk, and what is wrong with them.

Lines end at `\\n` alone, with one `\\r` before it dropped: U+2028, U+0085 and \\x0b inside a JSON string are no line
ends. Blank lines hold no request, and count as physical lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from ..fields import kind
from .model import LineError

PROMPT_FIELD = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request of a batch: its physical line, from 1, and what stands in it."""

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Validation:
    """What a file holds. With errors the batch fails, whatever the rest is."""

    total: int = 0
    models: set[str] = field(default_factory=set)
    errors: list[LineError] = field(default_factory=list)


def physical_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the lines that are not blank, without a byte order mark and line ends."""
    for number, raw in enumerate(stream, start=1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def request_lines(stream: BinaryIO, skip: Collection[int] = ()) -> Iterator[RequestLine]:
    """The requests of a file that was found valid, without the lines in `skip`."""
    for number, line in physical_lines(stream):
        if number not in skip:
            request = orjson.loads(line)
            yield RequestLine(number, request["custom_id"], request["body"])


def validate(stream: BinaryIO, endpoint: str, models: Collection[str], max_lines: int) -> Validation:
    """Check every line.

    Args:
        models: the names that the server knows.
        max_lines: the most requests that one batch may hold.
    """
    found = Validation()
    seen: set[str] = set()
    for number, line in physical_lines(stream):
        found.total += 1
        if found.total > max_lines:
            message = f"The batch has more than the limit of {max_lines} requests."
            found.errors.append(LineError("too_many_tasks", message))
            break
        found.errors.extend(_check_line(number, line, endpoint, models, seen, found.models))
    if found.total == 0:
        found.errors.append(LineError("empty_file", "The input file holds no request."))
    return found


def _check_line(
    number: int, line: bytes, endpoint: str, models: Collection[str], seen: set[str], used: set[str]
) -> Iterator[LineError]:
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError:
        request = None
    if not isinstance(request, dict):
        yield LineError("invalid_json_line", "This line is not parseable as valid JSON.", line=number)
        return
    for name in ("custom_id", "method", "url", "body"):
        if name not in request:
            yield LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name, number)
    yield from _check_custom_id(number, request, seen)
    if "method" in request and request["method"] != "POST":
        yield LineError("invalid_method", "The method of this request is not POST.", "method", number)
    if "url" in request and request["url"] != endpoint:
        message = "The URL provided for this request does not match the batch endpoint."
        yield LineError("invalid_url", message, "url", number)
    if "body" in request:
        yield from _check_body(number, request["body"], endpoint, models, used)


def _check_custom_id(number: int, request: dict[str, Any], seen: set[str]) -> Iterator[LineError]:
    if "custom_id" not in request:
        return
    custom_id = request["custom_id"]
    if not isinstance(custom_id, str):
        message = f"Invalid type for 'custom_id': expected a string, but got {kind(custom_id)} instead."
        yield LineError("invalid_type", message, "custom_id", number)
    elif custom_id in seen:
        message = "The custom_id for this request is a duplicate of another request."
        yield LineError("duplicate_custom_id", message, "custom_id", number)
    else:
        seen.add(custom_id)


def _check_body(
    number: int, body: object, endpoint: str, models: Collection[str], used: set[str]
) -> Iterator[LineError]:
    if not isinstance(body, dict):
        message = f"Invalid type for 'body': expected an object, but got {kind(body)} instead."
        yield LineError("invalid_type", message, "body", number)
        return
    if body.get("stream"):
        yield LineError("streaming_unsupported", "Streaming is not supported in a batch.", "body.stream", number)
    model = body.get("model")
    if not isinstance(model, str):
        yield LineError("invalid_request", "Missing required parameter: 'body.model'.", "body.model", number)
    elif model not in models:
        message = f"The provided model '{model}' is not supported by the Batch API."
        yield LineError("model_not_found", message, "body.model", number)
    else:
        used.add(model)
    prompt = PROMPT_FIELD[endpoint]
    if prompt not in body:
        yield LineError("invalid_request", f"Missing required parameter: 'body.{prompt}'.", f"body.{prompt}", number)

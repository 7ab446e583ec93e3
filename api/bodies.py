"""JSON bodies out of bytes, bounded before they are read: what a body costs is decided by its values, not its bytes.

30 MB of one text are decoded in some hundredths of a second, 30 MB of `[[1],[1],…]` take ten, and orjson and pydantic
hold the interpreter while they work: every stream of this replica would stand still meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from ..shared.errors import InvalidRequest, TooLarge

MAX_VALUES = 1_000_000  # numbers, strings and so on: the ids of a prompt of a million tokens
MAX_CONTAINERS = 16_384  # arrays and objects, which cost twenty times as much: messages, parts, tools and their schemas
INLINE_BYTES = 1 << 18  # smaller bodies are decoded on the event loop: a thread's hand-over costs more than the work


async def decode(data: bytes) -> Any:
    """The value that `data` is. NaN, infinities and lone surrogates are no JSON.

    Raises:
        InvalidRequest: it is no JSON.
        TooLarge: it has more values than a request may have.
    """
    return _decode(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(_decode, data)


def _decode(data: bytes) -> Any:
    _check_values(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as e:
        what = "The body is empty" if not data else f"The body is not valid JSON: {e}"
        raise InvalidRequest(f"{what}.", code="invalid_json") from e


def _check_values(data: bytes) -> None:
    """Raises TooLarge where there are too many. Only searches for single bytes, so it is quicker than decoding."""
    if data.count(b",") < MAX_VALUES and _containers(data) <= MAX_CONTAINERS:
        return  # even if no text held any of these bytes
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    # At most two texts, a key and its value, before each comma and each closing bracket: more quotes need no splitting.
    many = plain.count(b'"') > 4 * (MAX_VALUES + MAX_CONTAINERS)
    outside = b"" if many else b"".join(plain.split(b'"')[::2])
    if many or outside.count(b",") >= MAX_VALUES:
        raise TooLarge(f"The body has more than {MAX_VALUES} values.")
    if _containers(outside) > MAX_CONTAINERS:
        raise TooLarge(f"The body has more than {MAX_CONTAINERS} arrays and objects.")


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")

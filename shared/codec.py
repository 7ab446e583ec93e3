"""How messages become bytes: JSON objects with a version, defaults left out; unknown fields are dropped when read."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from .errors import ProtocolError

VERSION = 1

T = TypeVar("T")


def dump(message: Any) -> bytes:
    """A message as JSON, without the fields that stand at their defaults."""
    out = {
        f.name: value
        for f in dataclasses.fields(message)
        if (value := getattr(message, f.name)) != f.default or f.default is dataclasses.MISSING
    }
    return orjson.dumps({"v": VERSION} | out)


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        ProtocolError: it is none, or of another version.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise ProtocolError(f"message is not JSON: {data[:80]!r}") from e
    if not isinstance(value, dict):
        raise ProtocolError(f"message is not an object: {data[:80]!r}")
    if value.get("v", VERSION) != VERSION:
        raise ProtocolError(f"message of version {value['v']}; this release reads {VERSION}")
    return value


def build(cls: type[T], raw: Mapping[str, Any]) -> T:
    """`cls` from decoded JSON: lists become tuples, and what the class names in `NESTED` becomes messages.

    Raises:
        ProtocolError: a field without a default is missing.
    """
    names = _names(cls)  # type: ignore[arg-type]  # a class is hashable
    nested: Mapping[str, type] = getattr(cls, "NESTED", {})
    out: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in names:
            continue
        inner = nested.get(name)
        if inner is not None and isinstance(value, list):
            out[name] = tuple(build(inner, item) for item in value)
        elif inner is not None and isinstance(value, dict):
            out[name] = build(inner, value)
        else:
            out[name] = _tuples(value)
    try:
        return cls(**out)
    except TypeError as e:
        raise ProtocolError(f"{cls.__name__} lacks a field: {e}") from e


@cache
def _names(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def encode_vector(values: npt.ArrayLike) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def decode_vector(text: str) -> npt.NDArray[np.float32]:
    """What `encode_vector` wrote.

    Raises:
        ProtocolError: it did not.
    """
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    except ValueError as e:
        raise ProtocolError(f"{text[:40]!r} is no vector of float32") from e

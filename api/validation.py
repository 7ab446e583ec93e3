"""Bodies to request models; pydantic's errors to one 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..shared.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)

SHOWN = 80  # characters of a refused value that are shown
_FLAT = frozenset({str, int, float, bool, type(None)})  # what holds nothing: a million ids are skipped quickly
MAX_DEPTH = 100  # levels of nesting; templates, pydantic and our own walks go down by recursion


def parse(model: type[M], body: Any) -> M:
    """`body`, as decoded from JSON, as a `model`.

    Raises:
        InvalidRequest: naming the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {_kind(body)}.", code="invalid_body")
    for name, value in body.items():
        if is_deeper(value, MAX_DEPTH):
            raise InvalidRequest(f"{_shown(name)} is nested more than {MAX_DEPTH} levels deep.", param=name[:SHOWN])
    try:
        return model.model_validate(body)
    except ValidationError as e:
        raise _translate(e, body) from e


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep in a decoded JSON value."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(levels):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for values in (outer.values() if isinstance(outer, dict) else outer,)
            if not _FLAT.issuperset(map(type, values))
            for inner in values
            if isinstance(inner, (list, dict))
        ]
    return bool(level)


def _translate(error: ValidationError, body: Mapping[str, Any]) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in _path(first["loc"], body, missing=first["type"] == "missing"))
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(
        f"Invalid value for '{param}': {message[:1].lower()}{message[1:]}; got {_shown(first['input'])}.",
        param=param,
        code="invalid_type" if first["type"].endswith("_type") else "invalid_value",
    )


def _path(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> list[int | str]:
    """The part of pydantic's `loc` that stands in the body: without the names of union members."""
    path: list[int | str] = []
    for part in loc:
        inner = _inside(body, part)
        if inner is not None:
            body = inner[0]
            path.append(part)
    if missing and loc:
        path.append(loc[-1])
    return path


def _inside(body: Any, part: int | str) -> tuple[Any] | None:
    """The value under `part`, in a tuple; None where the body has none."""
    if isinstance(body, dict) and part in body:
        return (body[part],)
    if isinstance(body, list) and isinstance(part, int) and part < len(body):
        return (body[part],)
    return None


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool)) or value is None else _kind(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _kind(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )

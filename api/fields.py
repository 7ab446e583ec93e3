"""Fields of bodies and queries, read one by one, with the errors that OpenAI gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..shared.errors import InvalidRequest

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def kind(value: object) -> str:
    """What a JSON value is, with its article."""
    return _KINDS.get(type(value), "null")


def invalid_type(param: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, but got {kind(value)} instead.",
        param=param,
        code="invalid_type",
    )


def invalid_value(param: str, value: object, supported: Sequence[str]) -> InvalidRequest:
    """The error of a value outside a fixed set, naming the set."""
    names = ", ".join(f"'{name}'" for name in supported)
    return InvalidRequest(
        f"Invalid value: '{value}'. Supported values are: {names}.", param=param, code="invalid_value"
    )


def missing_parameter(param: str) -> InvalidRequest:
    """The error of a required field that is not there."""
    return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def string(body: Mapping[str, Any], name: str) -> str:
    """A required string of a body."""
    if body.get(name) is None:
        raise missing_parameter(name)
    value = body[name]
    if not isinstance(value, str):
        raise invalid_type(name, "a string", value)
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int, prefix: str = "") -> int:
    """A required whole number of a body, in low..high; errors name it as `prefix + name`."""
    param, value = prefix + name, body.get(name)
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid_type(param, "an integer", value)
    return in_range(param, value, low, high)


def integer_text(param: str, text: str, low: int, high: int) -> int:
    """A whole number in low..high, out of a query or a form."""
    try:
        number = int(text)
    except ValueError:
        raise InvalidRequest(
            f"Invalid type for '{param}': expected an integer, but got '{text}' instead.",
            param=param,
            code="invalid_type",
        ) from None
    return in_range(param, number, low, high)


def in_range(param: str, number: int, low: int, high: int) -> int:
    """`number`, or InvalidRequest with the code that tells which bound it is past."""
    if number < low:
        raise InvalidRequest(
            f"Invalid '{param}': integer below minimum value. Expected a value >= {low}, but got {number} instead.",
            param=param,
            code="integer_below_min_value",
        )
    if number > high:
        raise InvalidRequest(
            f"Invalid '{param}': integer above maximum value. Expected a value <= {high}, but got {number} instead.",
            param=param,
            code="integer_above_max_value",
        )
    return number

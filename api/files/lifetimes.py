"""`expires_after` and its like: how long a file shall stay, as a form or a body says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import integer, integer_text, invalid_type, invalid_value, missing_parameter

MIN_S, MAX_S = 3600, 30 * 86400
ANCHORS = ("created_at",)


def lifetime_of_body(body: Mapping[str, Any], name: str) -> int | None:
    """Seconds from `{"anchor": "created_at", "seconds": …}` under `name`, if it is there."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_type(name, "an object", value)
    if value.get("anchor") not in ANCHORS:
        raise invalid_value(f"{name}.anchor", value.get("anchor"), ANCHORS)
    return integer(value, "seconds", MIN_S, MAX_S, prefix=f"{name}.")


def lifetime_of_form(fields: Mapping[str, str], name: str) -> int | None:
    """Seconds from the form's `name[anchor]` and `name[seconds]`, if one of them is there."""
    anchor, seconds = f"{name}[anchor]", f"{name}[seconds]"
    if anchor not in fields and seconds not in fields:
        return None
    for field in (anchor, seconds):
        if field not in fields:
            raise missing_parameter(field)
    if fields[anchor] not in ANCHORS:
        raise invalid_value(anchor, fields[anchor], ANCHORS)
    return integer_text(seconds, fields[seconds], MIN_S, MAX_S)

"""Constrained output: every name that clients have for it as one native field, checked as far as no model is needed.

What is left (a regex that does not parse, a schema no text can satisfy) the worker refuses, with a 400 as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ..shared.errors import InvalidRequest
from ..shared.messages import GRAMMARS, GrammarKind
from .protocol.common import ResponseFormat, SamplingFields
from .protocol.native import SamplingParamsBody

MAX_BYTES = 256 * 1024  # of one grammar; a larger one would take a worker's minutes
MAX_DEPTH = 100  # of a schema: of what is nested deeper nobody generates the end
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
JSON_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

# Older names → native ones.
_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_STRUCTURED: dict[str, GrammarKind] = {
    "json_": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}

# (the client's name of it, the native name, its value)
Named = tuple[str, GrammarKind, Any]


def grammar_of(fields: SamplingFields | SamplingParamsBody, prefix: str) -> dict[str, Any]:
    """The one grammar of a body under its native name, ready for `SamplingParams`; empty where there is none.

    Raises:
        InvalidRequest: there are several, or it can be seen without a model that it is wrong.
    """
    found = [(f"{prefix}{name}", name, value) for name in GRAMMARS if (value := getattr(fields, name)) is not None]
    if isinstance(fields, SamplingFields):
        found += _openai(fields)
    if not found:
        return {}
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise InvalidRequest(f"'{first}' and '{second}' both constrain the output; give one of them.", param=second)
    param, name, value = found[0]
    return {name: _checked(param, name, value)}


def _openai(fields: SamplingFields) -> Iterator[Named]:
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    for name, native in _GUIDED.items():
        if (value := getattr(fields, name)) is not None:
            yield name, native, value
    if (structured := fields.structured_outputs) is not None:
        for name, native in _STRUCTURED.items():
            if (value := getattr(structured, name)) is not None:
                yield f"structured_outputs.{name.rstrip('_')}", native, value
        if structured.json_object:
            yield "structured_outputs.json_object", "json_schema", ANY_OBJECT


def _response_format(given: ResponseFormat) -> Iterator[Named]:
    if given.type == "json_object":
        yield "response_format", "json_schema", ANY_OBJECT
    elif given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest("'json_schema' is missing.", param="response_format.json_schema")
        schema = given.json_schema.schema_
        yield "response_format.json_schema.schema", "json_schema", ANY_OBJECT if schema is None else schema
    elif given.type == "structural_tag":
        yield "response_format", "structural_tag", given.model_dump(exclude_none=True)


def _checked(param: str, name: str, value: Any) -> Any:
    if name == "choice":
        if not value:
            raise InvalidRequest(f"'{param}' is empty: give at least one choice.", param=param)
        _check_size(param, "".join(value))
        return tuple(value)
    if name == "json_schema":
        return _schema(param, value)
    if name == "structural_tag":
        return _structural_tag(param, value)
    if not value.strip():
        raise InvalidRequest(f"'{param}' is empty.", param=param)
    _check_size(param, value)
    return value


def _schema(param: str, value: Any) -> str:
    schema = _parsed(param, value)
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(f"'{param}' should be a JSON schema: an object, or true.", param=param)
    _check_schema(param, schema)
    return _text(param, schema)


def _structural_tag(param: str, value: Any) -> str:
    tag = _parsed(param, value)
    if not isinstance(tag, dict):
        raise InvalidRequest(f"'{param}' should be an object.", param=param)
    if "format" not in tag and {"structures", "triggers"} <= tag.keys():
        tag = {"format": _triggered(param, tag)}
    if not isinstance(tag.get("format"), dict):
        raise InvalidRequest(f"'{param}' has no 'format', and not both 'structures' and 'triggers'.", param=param)
    return _text(param, {"type": "structural_tag", "format": tag["format"]})


def _triggered(param: str, tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form of a structural tag: a list of begin, schema and end."""
    try:
        tags = [
            {
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
    except (TypeError, KeyError) as e:
        raise InvalidRequest(f"Each of 'structures' in '{param}' has begin, schema and end.", param=param) from e
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _parsed(param: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    _check_size(param, value)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"'{param}' is not JSON: {e}.", param=param) from e


def _text(param: str, value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError) as e:  # orjson stops at its depth; a number may be too large for it
        raise InvalidRequest(f"'{param}' cannot be written as JSON: {e}.", param=param) from e
    _check_size(param, text)
    return text


def _check_size(param: str, text: str) -> None:
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest(f"'{param}' has more than {MAX_BYTES // 1024} KB.", param=param)


def _check_schema(param: str, schema: Any) -> None:
    """Raises InvalidRequest where a type is unknown, or the schema is too deep. Level by level: it may be deep."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        for node in level:
            kinds = node.get("type") if isinstance(node, dict) else None
            for kind in kinds if isinstance(kinds, list) else [kinds]:
                if isinstance(kind, str) and kind not in JSON_TYPES:
                    raise InvalidRequest(f"'{param}' names the type {kind[:40]!r}, which JSON lacks.", param=param)
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise InvalidRequest(f"'{param}' is nested more than {MAX_DEPTH} levels deep.", param=param)


# Where a schema's keyword holds no schema but values of any shape, or names.
_NO_SCHEMAS = frozenset({"enum", "const", "default", "examples", "required"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, list):
        yield from node
    elif isinstance(node, dict):
        for keyword, value in node.items():
            if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                yield from value.values()
            elif keyword not in _NO_SCHEMAS and isinstance(value, (dict, list)):
                yield value

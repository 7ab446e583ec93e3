"""A chat's messages as a template wants them: plain dicts, content as one string or as parts, tool arguments read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import orjson

from ..shared.errors import InvalidRequest
from .protocol.chat import ChatMessage, MediaPart, RefusalPart, TextPart, ToolCall
from .templates import ChatTemplate
from .validation import MAX_DEPTH, is_deeper

CONTENT_NEEDED = frozenset({"system", "developer", "user", "tool", "function"})


def check_parts(messages: Sequence[ChatMessage]) -> None:
    """Refuse what no model here can read.

    Raises:
        InvalidRequest: naming the message or part.
    """
    for i, message in enumerate(messages):
        if message.content is None and message.role in CONTENT_NEEDED:
            raise InvalidRequest(f"A {message.role} message needs content.", param=f"messages.{i}.content")
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            if isinstance(part, MediaPart):
                raise InvalidRequest(
                    f"This model reads text only; it cannot take a part of type '{part.type}'.",
                    param=f"messages.{i}.content.{j}",
                )


def characters(messages: Sequence[ChatMessage]) -> int:
    """Length of all the text in a chat."""
    return sum(
        len(content)
        if isinstance(content, str)
        else sum(len(_text(p)) for p in content if not isinstance(p, MediaPart))
        for message in messages
        if (content := message.content) is not None
    )


def for_template(messages: Sequence[ChatMessage], template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages as `template` reads them."""
    return [_message(message, template) for message in messages]


def _message(message: ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    out: dict[str, Any] = dict(message.model_extra or {})
    # OpenAI's newer name for the system prompt; most templates know the older one only.
    out["role"] = "system" if message.role == "developer" and not template.knows_developer else message.role
    out["content"] = _content(message, template)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return out


def _content(message: ChatMessage, template: ChatTemplate) -> str | list[dict[str, str]]:
    if message.content is None:
        return ""  # templates test it for truth, or concatenate it
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}] if _wants_parts(template) else message.content
    texts = [_text(part) for part in message.content if not isinstance(part, MediaPart)]
    if _wants_parts(template):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _wants_parts(template: ChatTemplate) -> bool:
    return template.content_format == "parts"


def _text(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments themselves, so they get what the JSON says, where it can be read."""
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            read = orjson.loads(arguments)
            arguments = arguments if is_deeper(read, MAX_DEPTH) else read
    out: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        out["id"] = call.id
    return out

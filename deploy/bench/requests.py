"""The OpenAI dialect: what is asked, and what an event or an answer says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from .settings import BenchSettings


def request_body(settings: BenchSettings, model: str, prompt: str) -> bytes:
    """The JSON body of one request. `--extra-body` has the last word: it replaces fields, and its nulls remove them."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.output_len,
        "temperature": 0.0,
        "stream": settings.stream,
    }
    if settings.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if settings.stream:
        body["stream_options"] = {"include_usage": True}
    if settings.ignore_eos:
        body["ignore_eos"] = True
    return orjson.dumps({k: v for k, v in (body | settings.extra).items() if v is not None})


@dataclass(frozen=True, slots=True)
class Answer:
    """What one event, or one whole answer, says."""

    has_text: bool = False
    finished: bool = False  # a choice says why it ended
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


def read_answer(payload: bytes) -> Answer:
    """Read a JSON chunk or a JSON answer of either route; what is neither comes back as an error."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        return Answer(error=f"not a JSON object: {_cut(payload)}")
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        return Answer(error=str(message)[:200])
    usage, choices = value.get("usage") or {}, value.get("choices") or ()
    return Answer(
        has_text=any(_has_text(choice) for choice in choices),
        finished=any(choice.get("finish_reason") for choice in choices),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
    )


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    said = choice.get("delta") or choice.get("message") or {}
    # Reasoning and tool calls are generated tokens too; both names of the first are in use.
    return any(said.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def read_failure(status: int, body: bytes) -> str:
    """One line for an HTTP error: its status and the server's message."""
    answer = read_answer(body)
    return f"HTTP {status}: {answer.error if answer.error and body.lstrip()[:1] == b'{' else _cut(body)}"


def _cut(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:200]

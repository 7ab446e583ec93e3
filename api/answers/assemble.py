"""Which answer a plan asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...shared.chunks import TextChunk
from ..plan import Plan
from .chat import ChatStream, chat_body
from .completions import CompletionStream, completion_body
from .embeddings import embeddings_body, encode_body
from .events import StreamEvent
from .native import GenerateStream, generate_body
from .results import Choice, best_of, usage_of


class AnswerStream(Protocol):
    """Turns chunks into events, each choice's in order; a pure function of each choice's chunks."""

    def events(self, index: int, chunk: TextChunk) -> Iterator[StreamEvent]: ...

    def last(self) -> Iterator[StreamEvent]:
        """What follows once all choices have ended."""
        ...


def stream_of(plan: Plan) -> AnswerStream:
    if plan.endpoint == "/v1/chat/completions":
        return ChatStream(plan)
    return CompletionStream(plan) if plan.endpoint == "/v1/completions" else GenerateStream(plan)


def body_of(plan: Plan, choices: Sequence[Choice]) -> Any:
    """The whole answer, as JSON values."""
    if plan.best:
        body = body_of(replace(plan, n=plan.best, best=0), best_of(plan, choices))
        if isinstance(body, dict) and "usage" in body:
            body["usage"] = usage_of(plan, [choice.usage for choice in choices])  # what is not shown was generated, too
        return body
    if plan.endpoint == "/v1/chat/completions":
        return chat_body(plan, choices)
    if plan.endpoint == "/v1/embeddings":
        return embeddings_body(plan, choices)
    if plan.endpoint in ("/encode", "/classify"):
        return encode_body(plan, choices)
    return completion_body(plan, choices) if plan.endpoint == "/v1/completions" else generate_body(plan, choices)

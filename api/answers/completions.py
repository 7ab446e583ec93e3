"""`/v1/completions`: the body, and the chunks of a stream, which have the body's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

from ...shared.chunks import TextChunk, TextLogprob, Usage
from ..plan import Plan
from ..protocol.completions import CompletionBody, CompletionChoiceBody, CompletionLogprobsBody
from .events import StreamEvent, place_of
from .results import Choice, TextOffsets, prompt_offsets, refuse_failed, usage_of


def completion_body(plan: Plan, choices: Sequence[Choice]) -> CompletionBody:
    """The whole answer."""
    return {
        **_head(plan),
        "choices": [_choice_body(plan, i, choice) for i, choice in enumerate(choices)],
        "usage": usage_of(plan, [choice.usage for choice in choices]),
    }


class _Head(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str


def _head(plan: Plan) -> _Head:
    return {
        "id": plan.id,
        "object": "text_completion",
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": plan.fingerprint,
    }


def _choice_body(plan: Plan, index: int, choice: Choice) -> CompletionChoiceBody:
    echo = _echo(plan, index)
    body: CompletionChoiceBody = {
        "index": index,
        "text": echo + choice.text,
        "logprobs": _logprobs(plan, choice, echo),
        "finish_reason": choice.reason,
    }
    if choice.matched is not None:
        body["matched_stop"] = choice.matched
    if plan.token_ids:
        body["token_ids"] = choice.token_ids
    return body


def _echo(plan: Plan, index: int) -> str:
    return plan.echo[plan.prompt_of(index)] if plan.echo else ""


def _logprobs(plan: Plan, choice: Choice, echo: str) -> CompletionLogprobsBody | None:
    if not plan.logprobs:
        return None
    offsets = prompt_offsets(echo, choice.prompt_logprobs) + [offset + len(echo) for offset in choice.offsets]
    return logprobs_body([*choice.prompt_logprobs, *choice.logprobs], offsets, plan.top_logprobs)


def logprobs_body(logprobs: Sequence[TextLogprob], offsets: Sequence[int], top: int) -> CompletionLogprobsBody:
    """Parallel lists, an element per token."""
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [_top(entry) for entry in logprobs] if top else None,
        "text_offset": list(offsets),
    }


def _top(entry: TextLogprob) -> dict[str, float]:
    return {top.token: top.logprob for top in entry.top if top.logprob is not None}


class CompletionStream:
    """Chunks of text; the one that ends a choice carries its reason. `echo` stands before a choice's first text."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._head = _head(plan)
        self._usages = [Usage(0, 0)] * len(plan.rids)
        self._echoes = [_echo(plan, i) for i in range(len(plan.rids))]  # what is still to be repeated
        self._offsets = [TextOffsets(len(echo)) for echo in self._echoes]

    def events(self, index: int, chunk: TextChunk) -> Iterator[StreamEvent]:
        """Raises GenerationFailed when the chunk ends its choice with an error."""
        refuse_failed(chunk.finish)
        self._usages[index] = chunk.usage
        echo, self._echoes[index] = self._echoes[index], ""
        choice: CompletionChoiceBody = {
            "index": index,
            "text": echo + chunk.text,
            "logprobs": self._logprobs(index, echo, chunk),
            "finish_reason": chunk.finish.type if chunk.finish else None,
        }
        if chunk.finish is not None and chunk.finish.matched is not None:
            choice["matched_stop"] = chunk.finish.matched
        if self._plan.token_ids:
            choice["token_ids"] = list(chunk.token_ids or ())
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._plan.continuous_usage:
            body["usage"] = usage_of(self._plan, self._usages)
        elif self._plan.include_usage:
            body["usage"] = None
        yield StreamEvent(body, index, place_of(chunk))

    def last(self) -> Iterator[StreamEvent]:
        if self._plan.include_usage:
            yield StreamEvent({**self._head, "choices": [], "usage": usage_of(self._plan, self._usages)})

    def _logprobs(self, index: int, echo: str, chunk: TextChunk) -> CompletionLogprobsBody | None:
        if not self._plan.logprobs:
            return None
        prompt = chunk.prompt_logprobs or ()  # of the first chunk, as the echo is
        offsets = prompt_offsets(echo, prompt) + self._offsets[index].of(chunk)
        return logprobs_body([*prompt, *(chunk.logprobs or ())], offsets, self._plan.top_logprobs)

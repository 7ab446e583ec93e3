"""`/v1/chat/completions`: the body, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...shared.chunks import Finish, TextChunk, TextLogprob, Usage
from ..plan import Plan
from ..protocol.chat import ChatChoiceBody, ChatCompletionBody, ChatLogprobsBody, ContentLogprobBody, LogprobBody
from .events import OPENED, Place, StreamEvent, place_of
from .results import Choice, refuse_failed, usage_of


def chat_body(plan: Plan, choices: Sequence[Choice]) -> ChatCompletionBody:
    """The whole answer."""
    return {
        "id": plan.id,
        "object": "chat.completion",
        "created": plan.created,
        "model": plan.model,
        "choices": [_choice_body(plan, i, choice) for i, choice in enumerate(choices)],
        "usage": usage_of(plan, [choice.usage for choice in choices]),
        "system_fingerprint": plan.fingerprint,
    }


def _choice_body(plan: Plan, index: int, choice: Choice) -> ChatChoiceBody:
    body: ChatChoiceBody = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs_body(choice.logprobs) if plan.logprobs else None,
        "finish_reason": choice.reason,
    }
    if choice.matched is not None:
        body["matched_stop"] = choice.matched
    return body


def logprobs_body(logprobs: Sequence[TextLogprob]) -> ChatLogprobsBody:
    return {"content": [_content_logprob(entry) for entry in logprobs], "refusal": None}


def _content_logprob(entry: TextLogprob) -> ContentLogprobBody:
    return {**_logprob(entry), "top_logprobs": [_logprob(top) for top in entry.top]}


def _logprob(entry: TextLogprob) -> LogprobBody:
    assert entry.logprob is not None, "only a prompt's first token has none"
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


class ChatStream:
    """Per choice a role chunk, content chunks, and one finish chunk with an empty delta; at last the usage, if asked.

    The role chunks go out with the first text of any choice.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._head: dict[str, Any] = {
            "id": plan.id,
            "object": "chat.completion.chunk",
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": plan.fingerprint,
        }
        self._usages = [Usage(0, 0)] * len(plan.rids)
        self._opened = False

    def events(self, index: int, chunk: TextChunk) -> Iterator[StreamEvent]:
        """Raises GenerationFailed when the chunk ends its choice with an error."""
        refuse_failed(chunk.finish)
        if not self._opened:
            self._opened = True
            for i in range(len(self._usages)):
                yield self._event(i, {"role": "assistant", "content": ""}, OPENED, usage=Usage(0, 0))
        self._usages[index] = chunk.usage
        if chunk.text or chunk.logprobs:
            place = Place(chunk.end, chunk.seq, whole=False)
            logprobs = logprobs_body(chunk.logprobs or ()) if self._plan.logprobs else None
            yield self._event(index, {"content": chunk.text}, place, usage=chunk.usage, logprobs=logprobs)
        if chunk.finish is not None:
            yield self._event(index, {}, place_of(chunk), usage=chunk.usage, finish=chunk.finish)

    def last(self) -> Iterator[StreamEvent]:
        if self._plan.include_usage:
            yield StreamEvent({**self._head, "choices": [], "usage": usage_of(self._plan, self._usages)})

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        place: Any,
        *,
        usage: Usage,
        logprobs: ChatLogprobsBody | None = None,
        finish: Finish | None = None,
    ) -> StreamEvent:
        reason = finish.type if finish is not None else None
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if finish is not None and finish.matched is not None:
            choice["matched_stop"] = finish.matched
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._plan.continuous_usage:
            body["usage"] = usage_of(self._plan, self._usages)
        elif self._plan.include_usage:
            body["usage"] = None
        return StreamEvent(body, index, place)

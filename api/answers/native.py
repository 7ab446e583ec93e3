"""`/generate`: one object per choice; a single choice stands alone, several in a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...shared.chunks import Finish, TextChunk, TextLogprob
from ..plan import Plan
from ..protocol.native import FinishBody, GenerateBody, MetaInfo, TokenLogprobBody
from .events import StreamEvent, place_of
from .results import Choice


def generate_body(plan: Plan, choices: Sequence[Choice]) -> GenerateBody | list[GenerateBody]:
    """The whole answer."""
    bodies = [_body(plan, i, choice) for i, choice in enumerate(choices)]
    return bodies[0] if len(bodies) == 1 else bodies


def _body(plan: Plan, index: int, choice: Choice) -> GenerateBody:
    return {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": _meta(plan, index, choice),
    }


def _meta(plan: Plan, index: int, choice: Choice) -> MetaInfo:
    meta: MetaInfo = {
        "id": plan.rids[index],
        "finish_reason": _finish(choice.finish, choice.usage.completion_tokens),
        "prompt_tokens": choice.usage.prompt_tokens,
        "completion_tokens": choice.usage.completion_tokens,
        "cached_tokens": choice.usage.cached_tokens,
        "weight_version": choice.weight_version,
    }
    if plan.prompt_logprobs:
        meta["input_token_logprobs"] = [_logprob(entry) for entry in choice.prompt_logprobs]
        if plan.top_logprobs:
            meta["input_top_logprobs"] = [_list(entry.top) for entry in choice.prompt_logprobs]
        if plan.named_logprobs:
            meta["input_token_ids_logprobs"] = [_list(entry.asked) for entry in choice.prompt_logprobs]
    if plan.logprobs:
        meta["output_token_logprobs"] = [_logprob(entry) for entry in choice.logprobs]
    if plan.top_logprobs:
        meta["output_top_logprobs"] = [_list(entry.top) for entry in choice.logprobs]
    if plan.named_logprobs:
        meta["output_token_ids_logprobs"] = [_list(entry.asked) for entry in choice.logprobs]
    return meta


def _list(entries: Sequence[TextLogprob]) -> list[TokenLogprobBody] | None:
    """None at the first token of a prompt."""
    return [_logprob(entry) for entry in entries] or None


def _finish(finish: Finish | None, length: int) -> FinishBody | None:
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": length}
    return {"type": finish.type, "matched": finish.matched}


def _logprob(entry: TextLogprob) -> TokenLogprobBody:
    return entry.logprob, entry.token_id, entry.token


class GenerateStream:
    """An event per chunk: all of the choice so far, or, asked for, what is new. `index` where there are several."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._choices = [Choice() for _ in plan.rids]

    def events(self, index: int, chunk: TextChunk) -> Iterator[StreamEvent]:
        """Raises GenerationFailed when the chunk ends its choice with an error."""
        choice = self._choices[index] if self._plan.cumulative else Choice()
        choice.add(chunk)
        body = _body(self._plan, index, choice)
        if len(self._choices) > 1:
            body["index"] = index
        yield StreamEvent(body, index, place_of(chunk))

    def last(self) -> Iterator[StreamEvent]:
        return iter(())

"""`/v1/completions`: request model and the shapes of replies."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from pydantic import Field

from .common import Prompt, SamplingFields, StreamOptions, UsageBody


class CompletionRequest(SamplingFields):
    model: str
    prompt: Prompt
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    return_token_ids: bool = False
    add_special_tokens: bool = True


class CompletionLogprobsBody(TypedDict):
    """Parallel lists, one element per token; `text_offset` in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]  # none of a prompt's first token
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoiceBody(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: str | None
    matched_stop: NotRequired[str | int]
    token_ids: NotRequired[list[int]]


class CompletionBody(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoiceBody]
    usage: NotRequired[UsageBody | None]
    system_fingerprint: str

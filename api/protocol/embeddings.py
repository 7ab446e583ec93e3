"""`/v1/embeddings`, and the native `/encode` and `/classify`: request models and the shapes of replies."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from pydantic import Field

from .common import IdsPrompt, Prompt, RequestModel, TextPrompt


class EmbeddingRequest(RequestModel):
    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class EncodeRequest(RequestModel):
    """Exactly one of `text` and `input_ids`; either may be a batch."""

    model: str | None = None  # may be left out where one model is registered
    text: TextPrompt | None = None
    input_ids: IdsPrompt | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class EmbeddingBody(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsBody(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage


class EncodeMeta(TypedDict):
    id: str
    prompt_tokens: int


class EncodeBody(TypedDict):
    embedding: list[float] | str
    meta_info: EncodeMeta


class ClassifyBody(TypedDict):
    """`scores` follow `logits`: of all classes together 1, or each by itself where several may hold. A reward model has
    one logit and neither label nor scores."""

    logits: list[float]
    meta_info: EncodeMeta
    scores: NotRequired[list[float]]
    labels: NotRequired[list[str]]
    label: NotRequired[str]

"""`/v1/models`: the shape of a model."""

from __future__ import annotations

from typing import Literal, TypedDict

from ...shared.model_card import ModelCard


class ModelBody(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None  # of an adapter, its base model
    max_model_len: int


def model_body(card: ModelCard) -> ModelBody:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "root": card.pool,
        "parent": card.pool if card.lora else None,
        "max_model_len": card.context_length,
    }

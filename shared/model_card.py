"""What the registry keeps of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .codec import build, dump, parse
from .messages import Task

DEFAULT_VERSION = "default"  # of weights that were never updated


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the other roles know of a model. Permanent; registered by a worker or by `headrace model add`."""

    name: str  # what clients call it
    pool: str  # the base model whose workers serve it; an adapter's is its base model's
    tokenizer: str  # sha256 of tokenizer.json
    context_length: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    dtype: str = ""
    weight_version: str = DEFAULT_VERSION
    lora: str = ""  # the folder of the adapter that this name stands for, as workers of the pool see it; "": the base
    task: Task = "generate"
    dimensions: int = 0  # of an embedding
    labels: tuple[str, ...] = ()  # of a classifier's classes
    multi_label: bool = False  # whether several of them may hold at once
    created: int = 0  # Unix seconds

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> ModelCard:
        return build(cls, parse(data))

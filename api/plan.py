"""How a request is answered: all that stays of it once its jobs are queued.

A stream's plan is kept beside its first job, so that any replica can go on with the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from ..shared.errors import ProtocolError
from ..shared.ids import choices
from .translate import Endpoint

ID_PREFIX: dict[Endpoint, str] = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of one answer. Choice j of prompt i is choice `i * n + j`."""

    endpoint: Endpoint
    families: tuple[str, ...]  # of each prompt, the family of its choices
    n: int
    model: str
    tenant: str
    created: int  # Unix seconds
    fingerprint: str
    best: int = 0  # of each prompt, how many choices are shown: those of the highest mean logprob; 0: all
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    named_logprobs: bool = False  # /generate: of ids that the request named
    prompt_logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: tuple[str, ...] = ()  # of each prompt, the text to repeat before each choice
    cumulative: bool = False  # /generate: an event holds all the text so far
    dimensions: int = 0  # of the embeddings to give; 0: all
    base64: bool = False  # embeddings as base64 instead of numbers
    labels: tuple[str, ...] = ()  # of a classifier
    multi_label: bool = False

    @property
    def request(self) -> str:
        """Our id of the request: the first family's."""
        return self.families[0]

    @property
    def id(self) -> str:
        """What the client sees as the answer's id."""
        return ID_PREFIX.get(self.endpoint, "") + self.request

    @property
    def rids(self) -> tuple[str, ...]:
        return tuple(rid for family in self.families for rid in choices(family, self.n))

    def prompt_of(self, index: int) -> int:
        """Which prompt a choice belongs to."""
        return index // self.n

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Raises ProtocolError when another release wrote it in a way we cannot read."""
        try:
            raw: dict[str, Any] = orjson.loads(data)
            known: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in cls.__slots__
            }
            return cls(**known)
        except (ValueError, TypeError, AttributeError) as e:
            raise ProtocolError(f"the plan of a stream cannot be read: {e}") from e

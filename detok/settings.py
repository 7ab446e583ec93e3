"""The detokenizer's settings."""

from __future__ import annotations

from pydantic import Field

from ..shared.settings import Bytes, HealthSettings


class DetokSettings(HealthSettings):
    """One detokenizer serves every model: it takes its share of the shards, and tokenizers from the store."""

    slice_requests: int = Field(
        256, ge=1, description="requests read and published at once; leases are renewed in between"
    )
    text_budget: Bytes = Field(0, ge=0, description="finished text to keep for readers (512mb); 0: a share of memory")

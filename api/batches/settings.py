"""Settings of `headrace batch`."""

from __future__ import annotations

from pydantic import Field

from ...shared.settings import HealthSettings
from ..settings import InferenceSettings


class BatchSettings(InferenceSettings, HealthSettings):
    """One driver process. It reads and answers lines as the api does requests, with the same settings."""

    batch_drivers: int = Field(4, ge=1, description="batches that this process drives at once")
    batch_window: int = Field(64, ge=1, description="lines of one batch that are in the queue at once")
    batch_slice_s: float = Field(30.0, ge=0, description="seconds of driving one batch before another has its turn")
    batch_lease_s: float = Field(10.0, ge=0.5, description="seconds until a silent driver's batch moves to another")
    max_batch_lines: int = Field(50_000, ge=1, description="requests that one batch may hold")

"""Settings of `headrace top`."""

from __future__ import annotations

from pydantic import Field

from ...shared.settings import Settings


class TopSettings(Settings):
    """`headrace top`. Reads Redis, and writes nothing."""

    redis_url: str = Field("", description="the Redis that all roles share; by default the one of --data-dir")
    data_dir: str = Field("~/.local/share/headrace", description="data folder of a `headrace serve` on this machine")
    redis_password: str = Field("", description="password of that folder's embedded server")
    interval_s: float = Field(2.0, ge=0.2, description="seconds between two looks; rates are over that time")
    once: bool = Field(False, description="print one picture and end")
    # `json` is a method of pydantic's models, so the field has another name than its flag.
    as_json: bool = Field(False, description="with --once: as JSON, for scripts", validation_alias="json")

"""What to ask, how often, and of whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from ...shared.settings import FloatTuple, IntTuple, Settings
from .prompts import UNIQUE_WORDS

Loop = Literal["closed", "open"]
DEFAULT_CONCURRENCY = (1, 8, 32)


class BenchSettings(Settings):
    """Settings of `headrace bench`; `--input-len 100` is also `HEADRACE_BENCH_INPUT_LEN=100`."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_BENCH_")

    url: str = Field("http://127.0.0.1:8000", description="server to load, with or without its /v1")
    model: str = Field("", description="model to ask for; by default the first of the server's /v1/models")
    api_key: SecretStr = Field(SecretStr(""), description="sent as a bearer token")
    label: str = Field("", description="what the report calls the server, its version for instance")
    endpoint: Literal["chat", "completions"] = Field("completions", description="which OpenAI route to load")
    concurrency: IntTuple = Field((), description="closed loop: requests in flight, one level each (1,8,32)")
    rate: FloatTuple = Field((), description="open loop: Poisson arrivals a second, one level each (0.5,2)")
    num_requests: IntTuple = Field((64,), description="requests of every level, or one number a level (8,32,64)")
    warmup: int = Field(4, ge=0, description="requests before the first level, not counted")
    input_len: int = Field(100, ge=UNIQUE_WORDS, description="words of a prompt, about a token each")
    shared_prefix: int = Field(0, ge=0, description="words at the head of every prompt that all have in common")
    output_len: int = Field(64, ge=1, description="most tokens of an answer (max_tokens)")
    ignore_eos: bool = Field(False, description="ask for answers of full length, where the server knows the field")
    stream: bool = Field(True, description="stream the answers; without it only whole answers are timed")
    extra_body: str = Field("{}", description="JSON object merged into every request; a null removes a field")
    seed: int | None = Field(None, description="of prompts and arrivals; by default a new one for each run")
    timeout_s: float = Field(600.0, gt=0, description="seconds until a request counts as failed")
    output: str = Field("", description="file for the report as JSON")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an address like http://127.0.0.1:8000")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("concurrency", "rate")
    @classmethod
    def _check_levels(cls, levels: tuple[float, ...]) -> tuple[float, ...]:
        if not all(level > 0 and math.isfinite(level) for level in levels):
            raise ValueError("must be above 0")
        return levels

    @field_validator("num_requests")
    @classmethod
    def _check_requests(cls, counts: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        levels = len(_levels(info.data.get("concurrency", ()), info.data.get("rate", ())))
        if len(counts) not in (1, levels) or min(counts) < 1:
            raise ValueError(f"must be one number above 0, or one for each of the {levels} levels")
        return counts

    @field_validator("shared_prefix")
    @classmethod
    def _check_prefix(cls, prefix: int, info: ValidationInfo) -> int:
        longest = info.data.get("input_len", UNIQUE_WORDS) - UNIQUE_WORDS
        if prefix > longest:
            raise ValueError(
                f"must leave {UNIQUE_WORDS} words of --input-len that tell prompts apart: {longest} at most"
            )
        return prefix

    @field_validator("extra_body")
    @classmethod
    def _check_extra(cls, text: str) -> str:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            raise ValueError(f"must be JSON ({e})") from e
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text

    @property
    def levels(self) -> list[tuple[Loop, float, int]]:
        """What is run, in order: the loop, requests in flight or arrivals a second, and the number of requests."""
        levels = _levels(self.concurrency, self.rate)
        counts = self.num_requests if len(self.num_requests) > 1 else self.num_requests * len(levels)
        return [(loop, level, count) for (loop, level), count in zip(levels, counts, strict=True)]

    @property
    def extra(self) -> dict[str, Any]:
        """`extra_body`, decoded."""
        extra: dict[str, Any] = orjson.loads(self.extra_body)
        return extra

    @property
    def path(self) -> str:
        """Route under `url`."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


def _levels(concurrency: Sequence[int], rate: Sequence[float]) -> list[tuple[Loop, float]]:
    closed = concurrency or (() if rate else DEFAULT_CONCURRENCY)
    return [*(("closed", float(users)) for users in closed), *(("open", r) for r in rate)]

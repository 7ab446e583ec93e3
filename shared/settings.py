"""Settings: one typed, frozen object per role; every field is a flag and an environment variable of the same name.

`--redis-url URL` is `HEADRACE_REDIS_URL`; the flag wins. A field that takes several values takes the flag several
times, or the variable with commas. What is wrong is refused at start with a `ConfigError` that names key and value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, SettingsConfigDict

from . import address
from .errors import ConfigError


def _split(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in str(item).split(",") if part)
    return value


def parse_bytes(text: str) -> int:
    """`2gb`, `512MiB`, `1.5g` or a plain number of bytes, in powers of 1,024. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise ValueError("should be a size such as 2gb or 512mb")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes)]
StrTuple = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
IntTuple = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split)]
FloatTuple = Annotated[tuple[float, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Base of the roles' settings."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )


class StoreSettings(Settings):
    """What every role needs to find and trust Redis."""

    redis_url: str = Field(
        "", description="the queue's Redis: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
    )
    control_redis_url: str = Field(
        "", description="Redis of batches, files and RQ, which is no cluster; by default the queue's"
    )
    redis_memory: Bytes = Field(
        0, ge=0, description="memory that Redis (a cluster's node) may use (2gb) where it sets no maxmemory itself"
    )
    lease_s: float = Field(6.0, ge=0.2, description="seconds until a silent worker's requests move to another")
    shard_lease_s: float = Field(3.0, ge=0.2, description="seconds until a silent detokenizer's shards move")
    log_level: str = Field("info", description="debug, info, warning or error")
    log_json: bool = Field(False, description="one JSON object per log line")

    @field_validator("redis_url", "control_redis_url")
    @classmethod
    def _url(cls, value: str, info: ValidationInfo) -> str:
        if value and address.parse(value).kind == "cluster" and info.field_name == "control_redis_url":
            raise ValueError("batches, files and RQ need one server or a primary with sentinels, not a cluster")
        return value

    @property
    def control_url(self) -> str:
        """The Redis of batches, files and RQ.

        Raises:
            ConfigError: the queue is a cluster, and no other Redis is named.
        """
        if self.control_redis_url:
            return self.control_redis_url
        if self.redis_url and address.parse(self.redis_url).kind == "cluster":
            raise ConfigError(
                "--control-redis-url (HEADRACE_CONTROL_REDIS_URL) is not set, and the queue's Redis is a cluster: "
                "batches, files and RQ need one server or a primary with sentinels"
            )
        return self.redis_url


class HealthSettings(StoreSettings):
    """Of a role that has no port of its own otherwise."""

    health_port: int = Field(0, ge=0, le=65535, description="port that answers /health and /live; 0: none")
    health_host: str = Field("127.0.0.1", description="address of --health-port")


S = TypeVar("S", bound=Settings)


def load(cls: type[S], argv: Sequence[str], prog: str) -> S:
    """Read `cls` from flags, then the environment, then its defaults.

    Raises:
        ConfigError: naming the flag, its variable and the value.
        SystemExit: after `--help` (0) or an unknown flag (2), as argparse does.
    """
    source: CliSettingsSource[Any] = CliSettingsSource(cls, cli_prog_name=prog, cli_parse_args=list(argv))
    try:
        return cls(_cli_settings_source=source)
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(cls, error) for error in e.errors())) from e


def _explain(cls: type[Settings], error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"][:1])
    flag, variable = "--" + key.replace("_", "-"), cls.model_config.get("env_prefix", "") + key.upper()
    value = address.redacted(error["input"]) if isinstance(error["input"], str) else error["input"]
    return f"{flag} ({variable}): {error['msg']}, got {value!r}"

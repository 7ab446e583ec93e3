"""Settings of `headrace serve`, and how they reach its children."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ..shared.errors import ConfigError
from ..shared.settings import Bytes, Settings, StoreSettings, StrTuple
from .models import split_name


class ServeSettings(StoreSettings):
    """All roles on one machine. Settings of a role that stand not here are given by their environment variables."""

    model: StrTuple = Field(
        (), description="[NAME=]MODEL, several times for several: a folder, a hub id, or a name that fetch knows"
    )
    served_model_name: str = Field("", description="what clients call the model, when there is one")
    workers: int = Field(1, ge=0, description="worker processes of each model; each gets a GPU where there are GPUs")
    detoks: int = Field(1, ge=1, description="detokenizer processes")
    apis: int = Field(1, ge=1, description="api processes, which share the port")
    batches: int = Field(1, ge=0, description="batch driver processes")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: StrTuple = Field((), description="key that clients must send; several may be given")
    drain_s: float = Field(30.0, ge=0, description="seconds that open requests may take to finish on SIGTERM")

    data_dir: str = Field(
        "~/.local/share/headrace", description="folder of the embedded server's data, of files and batch results"
    )
    redis_host: str = Field("127.0.0.1", description="where the embedded server listens with --redis-port")
    redis_port: int = Field(0, ge=0, le=65535, description="TCP port of the embedded server, for other machines' roles")
    redis_password: str = Field("", description="password of the embedded server")

    task: Literal["auto", "generate", "embed", "classify"] = Field(
        "auto", description="what the models are served for; auto: what each folder says"
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field("auto", description="of embeddings; auto: by the folder")
    normalize: Literal["auto", "yes", "no"] = Field("auto", description="embeddings to length 1; auto: by the folder")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and K/V")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    deterministic: bool = Field(False, description="same bytes whatever else runs")
    context_length: int = Field(0, ge=0, description="tokens, prompt and output together; 0: the model's own")
    threads: int = Field(0, ge=0, description="CPU threads of each worker; 0: the cores, shared by the workers")
    kv_memory: Bytes = Field(0, ge=0, description="memory of each worker's K/V pool (2gb); 0: by what is free")
    max_running: int = Field(0, ge=0, description="sequences that a worker generates together; 0: by device")
    lora: StrTuple = Field((), description="NAME=DIR, a PEFT adapter of the one model; several may be given")
    max_loras: int = Field(8, ge=0, description="adapters that may be loaded at a time")
    max_lora_rank: int = Field(64, ge=1, description="largest rank of an adapter")
    scripted: str = Field("", description="replay this JSON-lines file instead of running a model")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One `--model`: what clients call it, and where it is said to be."""

    name: str
    place: str


def served_models(settings: ServeSettings) -> tuple[ServedModel, ...]:
    """The models of `--model`, in order.

    Raises:
        ConfigError: none is given, two have one name, or one name is given for several models.
    """
    models = [ServedModel(*split_name(value)) for value in settings.model]
    if not models:
        raise ConfigError("--model (HEADRACE_MODEL): give at least one, such as --model smollm2-135m")
    if settings.served_model_name:
        if len(models) > 1:
            raise ConfigError(
                f"--served-model-name (HEADRACE_SERVED_MODEL_NAME): {settings.served_model_name!r} cannot name "
                f"{len(models)} models; write --model NAME=DIR for each"
            )
        models = [ServedModel(settings.served_model_name, models[0].place)]
    if settings.lora and len(models) > 1:
        raise ConfigError(
            f"--lora (HEADRACE_LORA): which of the {len(models)} models is {settings.lora[0]} for? "
            "Load it with /load_lora_adapter once they run"
        )
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--model (HEADRACE_MODEL): two models are called {name!r}; write NAME=DIR for each")
    return tuple(models)


def role_settings(role: str) -> type[Settings]:
    """The settings class of a role."""
    from ..api.batches.settings import BatchSettings
    from ..api.settings import ApiSettings
    from ..detok.settings import DetokSettings
    from ..worker.settings import WorkerSettings

    classes: dict[str, type[Settings]] = {
        "api": ApiSettings,
        "worker": WorkerSettings,
        "detok": DetokSettings,
        "batch": BatchSettings,
    }
    return classes[role]


def child_environment(settings: ServeSettings, role: type[Settings], own: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a child: ours, what was set for serve and the role knows, and what is the child's own.

    The environment, not the command line, since keys and passwords must not show in a list of processes.
    """
    given = settings.model_dump(include=settings.model_fields_set & role.model_fields.keys())
    prefix = role.model_config.get("env_prefix", "")
    values = {prefix + key.upper(): _text(value) for key, value in (given | dict(own)).items()}
    return dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | values


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

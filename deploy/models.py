"""What `--model` may be: a local Hugging Face folder, a GGUF file, a name of the catalog, or a hub id."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ..shared.errors import ConfigError, ModelRefused
from ..shared.settings import Settings, StoreSettings, load
from .catalog import CATALOG
from .fetch import HUB_FILES, HUB_PROBE_S, fetch, from_gguf

GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_NAMED = re.compile(r"([\w.-]+)=(.+)")


def split_name(value: str) -> tuple[str, str]:
    """`NAME=MODEL` as (name, model); without a name, the model's last path component names it."""
    found = _NAMED.fullmatch(value)
    if found:
        return found[1], found[2]
    place = Path(value).expanduser()
    if place.is_file() and place.suffix == GGUF:
        return place.stem, value
    return place.resolve().name if place.exists() else value.split("/")[-1], value


def resolve(model: str, *, needs: str = "config.json") -> Path:
    """The folder of a model, fetched first when it is known by name.

    Args:
        model: a folder, a .gguf file, a name of the catalog, or a hub id.
        needs: a file that the folder must have.

    Raises:
        ModelRefused: there is no such folder, or it lacks `needs`.
        FetchFailed: a name of the catalog could not be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / needs).is_file():
            raise ModelRefused(f"--model: {folder.resolve()} is no Hugging Face model folder: it has no {needs}")
        return folder.resolve()
    if folder.is_file() and folder.suffix == GGUF:
        return from_gguf(folder)
    if model in CATALOG:
        return fetch(CATALOG[model])
    if _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _from_hub(model)
    raise ModelRefused(
        f"--model: the folder {model} does not exist; give a Hugging Face folder, a .gguf file, a hub id (owner/name), "
        f"or one of {', '.join(CATALOG)}"
    )


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, etag_timeout=HUB_PROBE_S))
    except (HfHubHTTPError, LocalEntryNotFoundError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelRefused(f"--model: {hub_id} is no folder here, and the hub did not give it: {reason}") from e


class FetchSettings(Settings):
    """`headrace fetch NAME`."""

    name: CliPositionalArg[str] = Field(description=", ".join(CATALOG) + ", or a hub id")


def fetch_command(argv: Sequence[str]) -> int:
    """Print the model's folder as the last line of standard output."""
    settings = load(FetchSettings, argv, "headrace fetch")
    if settings.name not in CATALOG and not _HUB_ID.fullmatch(settings.name):
        raise ConfigError(f"{settings.name!r} is not in the catalog: {', '.join(CATALOG)}, or a hub id (owner/name)")
    print(resolve(settings.name))
    sys.stdout.flush()
    return 0


class ModelAddSettings(StoreSettings):
    """`headrace model add MODEL`."""

    place: CliPositionalArg[str] = Field(description="[NAME=]MODEL: a folder, a name that fetch knows, or a hub id")
    context_length: int = Field(0, ge=0, description="tokens, prompt and output together; 0: the model's own")


def model_command(argv: Sequence[str]) -> int:
    """Register a model for good; requests for it wait in the queue until a worker of it starts."""
    from ..shared.clients import connect
    from ..shared.registry import register_model
    from ..shared.store import open_store
    from ..worker.card import load_card
    from ..worker.settings import WorkerSettings

    verb, *rest = list(argv) or [""]
    if verb != "add":
        raise ConfigError(f"there is `headrace model add [NAME=]MODEL`, got {verb!r}")
    settings = load(ModelAddSettings, rest, "headrace model add")
    name, place = split_name(settings.place)
    model = f"{name}={resolve(place)}"
    card, tokenizer = load_card(WorkerSettings(model=model, context_length=settings.context_length))
    open_store(settings)
    with connect(settings.redis_url, "model") as client:
        register_model(client, card, tokenizer)
    print(f"{card.name}: {card.architecture}, {card.context_length} tokens of context, registered")
    return 0

"""`headrace doctor`: looks at this machine as `serve` would, and says what to do about what is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..shared.errors import ConfigError, HeadraceError
from ..shared.store import check_control, open_store
from .data_folder import DataFolder
from .embedded import find_server, server_version
from .models import resolve
from .preflight import bind, gpus
from .settings import ServeSettings, served_models


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: fine, or in the way of `serve`."""

    what: str
    fine: bool
    says: str


def run(settings: ServeSettings) -> int:
    """Print the findings; 0 when all is well, 1 otherwise."""
    findings = list(examine(settings))
    for finding in findings:
        print(f"{'ok ' if finding.fine else 'NO '} {finding.what:<10} {finding.says}")
    return 0 if all(finding.fine for finding in findings) else 1


def examine(settings: ServeSettings) -> Iterator[Finding]:
    """Everything that `serve` with these settings needs, in the order in which it needs it."""
    yield Finding("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]} (needed: 3.11 or newer)")
    yield Finding("headrace", True, version("headrace"))
    if not settings.scripted:
        yield _packages()
        yield _devices(settings)
    yield _tried("redis", lambda: _redis(settings))
    yield _tried("data", lambda: f"{DataFolder(settings.data_dir).path} can be written")
    yield _tried("port", lambda: _port(settings))
    if settings.model:
        yield _tried("model", lambda: _models(settings))


def _tried(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except HeadraceError as e:
        return Finding(what, False, str(e))


def _packages() -> Finding:
    needed = ("torch", "transformers", "safetensors")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        says = f"{', '.join(missing)} missing: pip install 'headrace[worker]' (api, detok and batch work without)"
        return Finding("worker", False, says)
    return Finding("worker", True, ", ".join(f"{name} {version(name)}" for name in needed))


def _devices(settings: ServeSettings) -> Finding:
    found = gpus("auto")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fine = bool(found) or not settings.device.startswith("cuda")
    return Finding("devices", fine, f"GPUs: {', '.join(found) or 'none'}; CPU cores: {cores}")


def _redis(settings: ServeSettings) -> str:
    if settings.redis_url:
        store = open_store(settings)
        check_control(settings)
        return f"{store.server} at --redis-url, {store.memory / 2**30:.1f} GiB, {store.shards} shards"
    path = find_server()
    return f"embedded {Path(path).name} {'.'.join(map(str, server_version(path)))}"


def _port(settings: ServeSettings) -> str:
    with bind(settings.host, settings.port):
        return f"{settings.host}:{settings.port} is free"


def _models(settings: ServeSettings) -> str:
    needs = "tokenizer.json" if settings.scripted else "config.json"
    found = {model.name: resolve(model.place, needs=needs) for model in served_models(settings)}
    for name, folder in found.items():
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{name}: {folder} has no tokenizer.json; save one with AutoTokenizer.save_pretrained")
    return ", ".join(f"{name} in {folder}" for name, folder in found.items())

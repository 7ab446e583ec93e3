"""A trace of some steps by torch's profiler, on request: a file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ...shared.errors import Conflict, InvalidRequest

log = logging.getLogger(__name__)


class Profiler:
    """One trace at a time, of a bounded number of steps.

    Args:
        folder: where traces are written; empty refuses them.
        name: what their names begin with.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._name = name.replace("/", "_")
        self._profile: profile | None = None
        self._path = Path()
        self._left = 0

    def start(self, steps: int) -> str:
        """Trace the next `steps` steps. Returns where the trace will be.

        Raises:
            Conflict: one is being made.
            InvalidRequest: the worker has no folder for traces, or cannot write to it.
        """
        if self._profile is not None:
            raise Conflict(f"a trace is being made, {self._left} steps are left; /stop_profile ends it")
        if not self._folder:
            raise InvalidRequest("--profile-dir of the worker names no folder for traces")
        folder = Path(self._folder).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # torch only logs it when the trace cannot be written
        except OSError as e:
            raise InvalidRequest(f"--profile-dir of the worker cannot be written to: {e.strerror}") from e
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self._path = folder / f"{self._name}-{socket.gethostname()}-{time.time_ns() % 10**9:09d}-{stamp}.json"
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile, self._left = profile(activities=kinds), steps
        self._profile.start()
        return str(self._path)

    def stop(self) -> str:
        """End the trace and write it. Returns where it is.

        Raises:
            Conflict: none is being made.
        """
        if self._profile is None:
            raise Conflict("no trace is being made; it ends by itself after its steps")
        done, self._profile = self._profile, None
        done.stop()
        done.export_chrome_trace(str(self._path))
        log.info("trace written to %s", self._path)
        return str(self._path)

    def step(self) -> None:
        """A step was made."""
        if self._profile is not None:
            self._left -= 1
            if self._left <= 0:
                self.stop()

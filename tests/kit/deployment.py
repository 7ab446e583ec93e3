"""A deployment of real processes on one Redis, scripted or with a model: `headrace api`, `worker`, `detok`, `batch`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from kit.tokenizers import byte_level

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
RUN = "from headrace.deploy.cli import main; raise SystemExit(main())"


class Deployment:
    """Processes by role. Leaving the context kills what is left.

    Args:
        scripts: the scripted worker's lines.
        model: the folder of a real model instead.
    """

    def __init__(
        self, redis_url: str, folder: Path, scripts: Sequence[dict[str, Any]] = (), model: Path | None = None
    ) -> None:
        self.redis_url, self.folder = redis_url, folder
        self.urls: dict[str, str] = {}  # of roles that are to use another URL
        self._worker_flags: tuple[str, ...] = ("--model", f"m={model}")
        if model is None:
            self._script(folder, scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._roles: list[str] = []

    def script_of(self, name: str, scripts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Flags of a worker that follows other lines than the rest: who wrote what can be read in the text."""
        path = self.folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, scripts)))
        return ("--scripted", str(path))

    def _script(self, folder: Path, scripts: Sequence[dict[str, Any]]) -> None:
        self.tokenizer = byte_level()
        self.model = folder / "m"
        self.model.mkdir()
        (self.model / "tokenizer.json").write_bytes(self.tokenizer.blob)
        (self.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        vocab_size = self.tokenizer.tokenizer.get_vocab_size()
        config = {"architectures": ["Scripted"], "max_position_embeddings": 512, "vocab_size": vocab_size}
        (self.model / "config.json").write_text(json.dumps(config))
        (folder / "scripts.jsonl").write_text("\n".join(map(json.dumps, scripts)))
        self._worker_flags = ("--model", f"m={self.model}", "--scripted", str(folder / "scripts.jsonl"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._listener.close()

    def start(
        self, role: str, *flags: str, failpoints: str = "", clock_off_s: int = 0, tree: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one process of a role.

        Args:
            failpoints: what befalls it, as in HEADRACE_FAILPOINTS.
            clock_off_s: how far its wall clock is off.
            tree: another checkout, whose code it runs.
        """
        own = {
            "api": ("--fd", str(self._listener.fileno()), "--data-dir", str(self.folder / "data")),
            "batch": ("--data-dir", str(self.folder / "data")),
            "worker": self._worker_flags,
            "detok": (),
        }
        log = self.folder / f"{role}-{len(self._processes)}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
        environment["HEADRACE_FAILPOINTS"] = failpoints
        if tree is not None:
            environment["PYTHONPATH"] = str(tree / ".typing")
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _clock(clock_off_s) + RUN,
                    role,
                    "--redis-url",
                    self.urls.get(role, self.redis_url),
                    *own[role],
                    *flags,
                ],
                stderr=stderr,
                cwd=self.folder,
                env=environment,
                pass_fds=[self._listener.fileno()] if role == "api" else [],
            )
        self._processes.append(process)
        self._roles.append(role)
        return process

    @property
    def running(self) -> list[tuple[str, subprocess.Popen[bytes]]]:
        """The processes that have not ended, with their roles."""
        return [(role, p) for role, p in zip(self._roles, self._processes, strict=True) if p.poll() is None]

    def ready(self) -> None:
        """Wait until a request would succeed."""
        for _ in range(1200):
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the deployment is not ready\n{self.logs()}")

    def logs(self) -> str:
        """What all processes have said so far."""
        return "\n".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))


def _clock(off_s: int) -> str:
    return f"import time; now = time.time; time.time = lambda: now() + {off_s}; " if off_s else ""


def terminate(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, and the exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(60)

"""`headrace serve` and single roles as real processes, with a scripted worker behind them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from headrace.deploy.process import is_alive
from kit.tiny_models import CONTEXT_LENGTH, EOS_ID, VOCAB_SIZE, save_tokenizer

HEADRACE = str(Path(sys.executable).parent / "headrace")
LIMIT_S = 120.0


def scripted_model(folder: Path, *lines: dict[str, Any]) -> list[str]:
    """A model folder without weights and a script for it; returns the flags that serve them as `m`."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": CONTEXT_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, lines or ({"tokens": 8},))))
    return ["--model", f"m={folder}", "--scripted", str(script)]


def headrace(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [HEADRACE, *args], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ | env
    )


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    found: list[int] = []
    todo = [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def wait_until(check: Any, what: str, limit_s: float = LIMIT_S) -> Any:
    """Poll until `check()` is true, and return it."""
    until = time.monotonic() + limit_s
    while not (value := check()):
        assert time.monotonic() < until, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.05)
    return value


def all_gone(pids: Sequence[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


class Serve:
    """`headrace serve` with a data folder and a port of its own, from `with` on; killed at its end if still there."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.data = data
        self._flags = ["--data-dir", str(data), "--port", "0", "--redis-memory", "256mb", *flags]
        self._log = data.with_suffix(".log")

    def __enter__(self) -> Serve:
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [HEADRACE, "serve", *self._flags], stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self._log.read_text()

    def ready(self) -> str:
        """Wait for the ready line and return the URL in it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http://"), f"{line!r}\n{self.said}"
        return line.split()[1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as e:
            left = {pid: _command(pid) for pid in (self.pid, *self.children())}
            raise AssertionError(f"it does not end; there are still {left}\n{self.said}") from e

    def children(self) -> list[int]:
        return descendants(self.pid)


def ask(url: str, content: str = "hi", **more: Any) -> str:
    """One chat answer."""
    body = {"model": "m", "messages": [{"role": "user", "content": content}]} | more
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])

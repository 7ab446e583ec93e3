"""A deployment with its control routes, and what a test asks of them."""

from __future__ import annotations

import subprocess
from typing import Any

import httpx
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.shared.registry import ProcessInfo, processes
from headrace.worker.scripted import LOAD_TEXT
from kit.deployment import Deployment
from kit.serving import wait_until

LEASE = ("--lease-s", "3")


class Control:
    """A deployment with two workers of the model `m`, and its control routes.

    Args:
        wait_s: how long the api waits for workers.
        flags: of the workers.
    """

    def __init__(self, deployment: Deployment, *flags: str, wait_s: float = 2) -> None:
        self.deployment = deployment
        self._flags = flags
        self.http = httpx.Client(base_url=deployment.url, timeout=60)
        deployment.start("api", "--control-wait-s", str(wait_s))
        deployment.start("detok", "--shard-lease-s", "3")
        self.workers = [self.start() for _ in range(2)]
        self.wait_for(2)

    def start(self) -> subprocess.Popen[bytes]:
        return self.deployment.start("worker", *LEASE, *self._flags)

    def bury(self, worker: subprocess.Popen[bytes]) -> None:
        """Let a worker that was killed be off the list, as the end of its heartbeat does after some seconds."""
        worker.wait()
        with connect(self.deployment.redis_url) as store:
            for process in processes(store):
                if process.pid == worker.pid:
                    store.delete(keys.worker(process.id))

    def refill(self) -> None:
        """Two workers, which are not paused."""
        for worker in self.workers:
            if worker.poll() is not None:
                self.bury(worker)
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        self.workers += [self.start() for _ in range(2 - len(self.workers))]
        self.wait_for(2)
        self.post("/continue_generation")

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.ready()) == count, f"{count} workers are ready")
        self.deployment.ready()

    def ready(self) -> list[ProcessInfo]:
        with connect(self.deployment.redis_url) as store:
            return [p for p in processes(store) if p.role == "worker" and p.state == "ready"]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, f"{answer.text}\n{self.deployment.logs()}"
        return answer.json()

    def error(self, path: str, status: int, **body: Any) -> str:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    def generate(self, prompt: str = "hi") -> Any:
        return self.post("/generate", model="m", text=prompt, sampling_params={"max_new_tokens": 100})

    def aborted(self, prompt: str = "hi") -> str:
        """Why a request ended before its end."""
        return self.error("/generate", 499, model="m", text=prompt, sampling_params={"max_new_tokens": 100})

    def text(self, tokens: int) -> str:
        ids = self.deployment.tokenizer.tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
        return str(self.deployment.tokenizer.tokenizer.decode([ids[i % len(ids)] for i in range(tokens)]))

    def running(self) -> int:
        with connect(self.deployment.redis_url) as store:
            shards = range(keys.DEFAULT_SHARDS)
            lanes = [keys.jobs(s, "m", lane) for s in shards for lane in ("rt", "std", "batch")]
            return sum(store.xlen(stream) for stream in lanes)

"""Rolling restarts of every role, and scaling, under load: no request fails, and every text is whole."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from headrace.worker.scripted import LOAD_TEXT
from kit.deployment import Deployment, terminate
from kit.serving import wait_until

TOKENS = 16
CLIENTS = 6
SCRIPT = {"tokens": TOKENS, "tokens_per_s": 16}  # a request takes a second: some run at every moment
LONG_TOKENS = 100
LONG_SCRIPT = {"when": "long", "tokens": LONG_TOKENS, "tokens_per_s": 16}
LONG = {"model": "m", "prompt": "long", "max_tokens": LONG_TOKENS, "stream": True}
BODY = {"model": "m", "prompt": "x", "max_tokens": TOKENS}
FLAGS = {"worker": ("--lease-s", "6"), "detok": ("--shard-lease-s", "3"), "api": (), "batch": ()}


class Load:
    """Clients that ask one request after another, each on a connection of its own, whole and streamed in turn."""

    def __init__(self, url: str, expected: str) -> None:
        self._url, self._expected = url, expected
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        self.answered = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Wait until as many requests as there are clients were answered from now on."""
        before = self.answered
        wait_until(lambda: self.answered >= before + CLIENTS or self.wrong, "requests are not answered")

    def _ask(self, number: int) -> None:
        while not self._ended.is_set():
            try:
                text = self._stream() if number % 2 else self._whole()
            except (httpx.HTTPError, AssertionError, ValueError, KeyError) as e:
                self.wrong.append(repr(e))
                continue
            if text != self._expected:
                self.wrong.append(text)
            self.answered += 1

    def _whole(self) -> str:
        answer = httpx.post(f"{self._url}/v1/completions", json=BODY, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _stream(self) -> str:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=BODY | {"stream": True}, timeout=60, trust_env=False
        ) as answer:
            assert answer.status_code == 200, answer.read()
            lines = list(answer.iter_lines())
        assert "data: [DONE]" in lines, "the stream broke off"
        return text_of(lines)


def text_of(lines: Sequence[str]) -> str:
    """What the events of a stream spell."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def load_text(deployment: Deployment, tokens: int) -> str:
    """What a scripted worker says."""
    tokenizer = deployment.tokenizer.tokenizer
    ids = tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
    return str(tokenizer.decode([ids[i % len(ids)] for i in range(tokens)]))


@contextmanager
def under_load(deployment: Deployment) -> Iterator[Load]:
    with Load(deployment.url, load_text(deployment, TOKENS)) as load:
        load.goes_on()
        yield load
        load.goes_on()
    assert load.wrong == [], f"{load.wrong[:3]}\n{deployment.logs()}"


def ready(deployment: Deployment, role: str) -> list[int]:
    """The pids of a role's ready processes."""
    listed = httpx.get(f"{deployment.url}/server_info", trust_env=False).json()["processes"]
    return [process["pid"] for process in listed if process["role"] == role and process["state"] == "ready"]


def start(deployment: Deployment, role: str) -> subprocess.Popen[bytes]:
    """Start one more of a role, and wait until it works."""
    process = deployment.start(role, *FLAGS[role])
    wait_until(lambda: process.pid in ready(deployment, role), f"the new {role} is not ready")
    return process


@pytest.fixture
def deployment(redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(redis_url, tmp_path, [LONG_SCRIPT, SCRIPT]) as deployment:
        yield deployment


def test_each_role_is_restarted_under_load_and_no_request_fails(deployment: Deployment) -> None:
    running = {role: [deployment.start(role, *FLAGS[role])] for role in FLAGS}
    deployment.ready()
    with under_load(deployment) as load:
        for role in ("worker", "detok", "api", "batch"):
            old = running[role].pop()
            start(deployment, role)
            assert terminate(old) == 0
            load.goes_on()
    assert "ERROR" not in deployment.logs()


def test_workers_scale_from_one_to_eight_and_back_under_load(deployment: Deployment) -> None:
    workers = [deployment.start("worker")]
    for role in ("detok", "api"):
        deployment.start(role, *FLAGS[role])
    deployment.ready()
    with under_load(deployment) as load:
        workers += [deployment.start("worker") for _ in range(7)]
        wait_until(lambda: len(ready(deployment, "worker")) == 8, "eight workers are not ready")
        load.goes_on()
        for worker in workers[:-1]:
            worker.terminate()
        assert [worker.wait(60) for worker in workers[:-1]] == [0] * 7
        assert ready(deployment, "worker") == [workers[-1].pid]
        load.goes_on()


def test_a_draining_replica_asks_its_clients_to_come_back_elsewhere(deployment: Deployment) -> None:
    """Answers on connections that are kept alive say that they are the last; the health says why."""
    api = deployment.start("api", "--drain-delay-s", "60")
    for role in ("worker", "detok"):
        deployment.start(role, *FLAGS[role])
    deployment.ready()
    with httpx.Client(base_url=deployment.url, timeout=60, trust_env=False) as http:
        assert "close" not in http.get("/health").headers.get("connection", "")
        api.terminate()
        wait_until(lambda: http.get("/health").status_code == 503, "it does not say that it drains")
        health = http.get("/health")
        assert health.json()["state"] == "draining"
        assert health.headers["connection"] == "close"
        answer = http.post("/v1/completions", json=BODY)  # what comes all the same is answered
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        wait_until(lambda: states(http, api.pid) == {"draining"}, "the registry does not say that it drains")
        api.terminate()  # a second signal does not wait
        assert api.wait(60) == 0


def states(http: httpx.Client, pid: int) -> set[str]:
    listed = http.get("/server_info").json()["processes"]
    return {process["state"] for process in listed if process["pid"] == pid}


def test_a_stream_that_outlives_its_replicas_drain_goes_on_elsewhere(deployment: Deployment) -> None:
    """We cut it off, not its client: it stays for longer than `--resume-grace-s`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    old = deployment.start("api", "--fd", "-1", "--port", port, "--drain-s", "1", "--resume-grace-s", "0.1")
    for role in ("worker", "detok", "api"):
        deployment.start(role, *FLAGS[role])
    deployment.ready()
    wait_until(lambda: old.pid in ready(deployment, "api"), "the old replica is not ready")
    first: list[str] = []

    def read_until_cut() -> None:
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=LONG, timeout=60, trust_env=False) as answer:
            for line in answer.iter_lines():
                first.append(line)
                if len(first) == 9:  # three events
                    old.terminate()

    with pytest.raises(httpx.RemoteProtocolError):
        read_until_cut()
    assert old.wait(60) == 0
    whole = "\n".join(first).rpartition("\n\n")[0]  # but for what was cut in two
    last = next(line for line in reversed(whole.split("\n")) if line.startswith("id: ")).removeprefix("id: ")
    url = f"{deployment.url}/v1/streams/{last.partition(':')[0]}"
    rest = httpx.get(url, headers={"Last-Event-ID": last}, timeout=60, trust_env=False).text
    assert text_of([*whole.split("\n"), *rest.split("\n")]) == load_text(deployment, LONG_TOKENS)

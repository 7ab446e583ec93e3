"""`headrace serve` as its user meets it: real processes, a real Valkey, a scripted worker."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from kit.serving import HEADRACE, Serve, all_gone, ask, descendants, headrace, scripted_model, wait_until

TEXT = " The water runs"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    return scripted_model(tmp_path / "model", {"tokens": 15})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_serves_drains_and_comes_back_on_the_same_data(data: Path, model: list[str]) -> None:
    with Serve(data, *model) as serve:
        url = serve.ready()
        assert ask(url) == TEXT
        roles = {p["role"] for p in httpx.get(f"{url}/server_info").json()["processes"]}
        assert roles == {"api", "worker", "detok", "batch"}
        file = httpx.post(f"{url}/v1/files", data={"purpose": "user_data"}, files={"file": ("a.txt", b"kept")}).json()
        children = serve.children()
        assert len(children) == 5  # the four roles and Valkey
        assert serve.stop() == 0
        assert all_gone(children)
    with Serve(data, *model) as serve:
        url = serve.ready()
        assert httpx.get(f"{url}/v1/files/{file['id']}/content").content == b"kept"
        assert ask(url) == TEXT
        assert serve.stop(signal.SIGINT) == 0


def test_sigkill_leaves_no_orphan_and_no_damage(data: Path, model: list[str], seed: int) -> None:
    """Killed while it starts, while it loads its roles and while it serves, at random; then it serves as ever."""
    moments = random.Random(seed)
    for _ in range(3):
        with Serve(data, *model) as serve:
            children: list[int] = []
            for _ in range(moments.randrange(1, 60)):  # a moment that the machine's speed does not move to one place
                children = sorted({*children, *descendants(serve.pid)})
            serve.stop(signal.SIGKILL)
            wait_until(lambda found=children: all_gone(found), "every child is gone")
    with Serve(data, *model) as serve:
        serve.ready()
        children = serve.children()
        serve.stop(signal.SIGKILL)
        wait_until(lambda: all_gone(children), "every child is gone")
    with Serve(data, *model) as serve:
        assert ask(serve.ready()) == TEXT
        assert serve.stop() == 0


def test_a_drain_lets_open_requests_finish(data: Path, tmp_path: Path) -> None:
    slow = scripted_model(tmp_path / "slow", {"tokens": 40, "tokens_per_s": 10})
    with Serve(data, *slow) as serve:
        url = serve.ready()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content":" ' in line or '"content":"T' in line)
            serve.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert [line for line in rest if line][-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line or '"finish_reason":"stop"' in line for line in rest)
        assert serve.process.wait(60) == 0


def test_a_second_signal_is_immediate(data: Path, tmp_path: Path) -> None:
    endless = scripted_model(tmp_path / "slow", {"tokens": 200, "tokens_per_s": 1})
    with Serve(data, *endless, "--drain-s", "1000") as serve:
        url = serve.ready()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
            children = serve.children()
            serve.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in serve.said, "the drain began")
            serve.process.send_signal(signal.SIGTERM)
            assert serve.process.wait(60) == 0
        assert all_gone(children)


def test_a_role_that_dies_is_started_again(data: Path, model: list[str]) -> None:
    with Serve(data, *model) as serve:
        url = serve.ready()
        for role in ("worker", "detok", "api", "batch", "valkey"):
            victim = _pid_of(serve, role)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda role=role, victim=victim: _pid_of(serve, role) not in (0, victim), f"another {role}")
            assert wait_until(lambda: _try(url), f"an answer after {role} died") == TEXT
        assert serve.stop() == 0


def _pid_of(serve: Serve, role: str) -> int:
    """Pid of the role's process, by its title; 0 while it has none."""
    for pid in serve.children():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if title.startswith(f"headrace: {role}") or (role == "valkey" and "valkey-server" in title.split(" ")[0]):
            return pid
    return 0


def _try(url: str) -> str | None:
    try:
        return ask(url)
    except (httpx.TransportError, AssertionError):
        return None


def test_a_second_serve_is_refused_and_told_of_the_first(data: Path, model: list[str]) -> None:
    with Serve(data, *model) as first:
        url = first.ready()
        second = headrace("serve", *model, "--data-dir", str(data), "--port", "0")
        assert second.returncode == 2
        assert f"pid {first.pid}" in second.stderr
        assert url in second.stderr
        assert ask(url) == TEXT  # the first one does not mind
        assert first.stop() == 0


def test_a_taken_port(data: Path, model: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = headrace("serve", *model, "--data-dir", str(data), "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert "--port" in done.stderr
    assert not (data / "valkey").exists()


def test_a_model_folder_that_is_not_there(data: Path, tmp_path: Path) -> None:
    done = headrace("serve", "--model", str(tmp_path / "nowhere"), "--data-dir", str(data), "--port", "0")
    assert done.returncode == 2
    assert f"{tmp_path}/nowhere does not exist" in done.stderr
    assert not (data / "valkey").exists()


def test_a_folder_that_is_no_model(data: Path, tmp_path: Path) -> None:
    done = headrace("serve", "--model", str(tmp_path), "--data-dir", str(data), "--port", "0")
    assert done.returncode == 2
    assert "has no config.json" in done.stderr


def test_a_worker_that_refuses_its_model_ends_everything(data: Path, tmp_path: Path, model: list[str]) -> None:
    (tmp_path / "model" / "config.json").write_text("{")
    done = headrace("serve", *model, "--data-dir", str(data), "--port", "0")
    assert done.returncode == 2
    assert "worker.0 cannot start" in done.stderr
    assert "config.json is not JSON" in done.stderr


def test_a_data_folder_that_cannot_be_written(tmp_path: Path, model: list[str]) -> None:
    (tmp_path / "file").write_text("")
    done = headrace("serve", *model, "--data-dir", str(tmp_path / "file" / "data"), "--port", "0")
    assert done.returncode == 2
    assert f"{tmp_path}/file/data cannot be written" in done.stderr


def test_a_redis_that_evicts(data: Path, model: list[str], redis_url: str) -> None:
    flags = ["serve", *model, "--data-dir", str(data), "--port", "0", "--redis-url", redis_url]
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = headrace(*flags)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 2
    assert "allkeys-lru" in done.stderr
    assert "noeviction" in done.stderr


def test_an_outer_redis_is_used_and_left_alone(data: Path, model: list[str], redis_url: str) -> None:
    with Serve(data, *model, "--redis-url", redis_url) as serve:
        assert ask(serve.ready()) == TEXT
        assert not (data / "valkey").exists()
        assert serve.stop() == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.hexists("hr:models", "m")


def test_api_keys_reach_the_api_and_no_list_of_processes_nor_log(data: Path, model: list[str]) -> None:
    with Serve(data, *model, "--api-key", "sesame", "--log-json") as serve:
        url = serve.ready()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        for pid in serve.children():
            assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert serve.stop() == 0
    assert "sesame" not in serve.said
    roles = {json.loads(line)["role"] for line in serve.said.splitlines()}  # relayed without a prefix
    assert {"serve", "worker", "detok"} <= roles


@pytest.fixture
def alone(tmp_path: Path, model: list[str], redis_url: str) -> Iterator[str]:
    """Each role as a command of its own on one Redis, two of each; yields the first api's URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = ["--redis-url", redis_url]
    files = [*common, "--data-dir", str(tmp_path / "files")]
    commands = [["worker", *model, *common]] * 2 + [["detok", *common]] * 2
    commands += [["batch", *files], ["api", *files, "--port", str(port)]]
    running = [subprocess.Popen([HEADRACE, *command], stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in running:
            process.terminate()
        assert [process.wait(60) for process in running] == [0] * len(running)


def test_roles_run_alone_on_one_redis(alone: str) -> None:
    def healthy() -> bool:
        try:
            return httpx.get(f"{alone}/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(healthy, "the api is healthy")
    wait_until(lambda: len(httpx.get(f"{alone}/server_info").json()["processes"]) == 6, "all six are listed")
    assert [ask(alone) for _ in range(4)] == [TEXT] * 4

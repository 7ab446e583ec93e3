"""Starting, ready, draining, stuck: what each role says of itself, and what is said of one that hangs."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace.shared.clients import connect
from headrace.shared.errors import ConfigError
from headrace.shared.health import LEAST_LIMIT_S, Health, Progress
from headrace.shared.registry import Membership, ProcessInfo, processes
from kit.deployment import Deployment, terminate
from kit.serving import wait_until

TOKENS = 12


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def asks(port: int, path: str = "/health") -> tuple[int, Any]:
    """Status and state; (0, None) while nobody listens."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
    except httpx.TransportError:
        return 0, None
    return answer.status_code, answer.json().get("status")


def stalled(progress: Progress, seconds: float) -> Progress:
    """As if the loop had not turned for so long."""
    progress._turned_at -= seconds
    return progress


def test_a_loop_is_stuck_only_when_it_has_work_and_is_over_its_limit() -> None:
    busy = [True]
    loop = Progress(6.0, lambda: busy[0])
    assert stalled(loop, 5).stalled_s() == 0
    assert stalled(loop, 2).stalled_s() >= 7
    busy[0] = False
    assert loop.stalled_s() == 0
    busy[0] = True
    with loop.allow(60):
        assert loop.stalled_s() == 0
    assert loop.stalled_s() == 0  # what was allowed counts as a turn
    short = Progress(0.1)
    assert stalled(short, LEAST_LIMIT_S / 2).stalled_s() == 0
    assert stalled(short, LEAST_LIMIT_S).stalled_s() > 0


def test_the_port_tells_the_states_apart(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    member, port = Membership(ProcessInfo("worker", model="m")), free_port()
    hanging, loop_ends = threading.Event(), threading.Event()

    def work() -> None:
        progress.thread = threading.get_ident()
        while not loop_ends.wait(0.05):
            progress.turn()
            while hanging.is_set() and not loop_ends.wait(0.05):
                pass

    with Health(member, lambda: connect(redis_url)) as health, connect(redis_url) as client:
        health.serve("127.0.0.1", port)
        with pytest.raises(ConfigError, match="--health-port"):
            Health(member, lambda: connect(redis_url)).serve("127.0.0.1", port)
        assert asks(port) == (503, "starting")
        assert asks(port, "/live")[0] == 200
        progress = Progress(2.0)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            member.update("ready")
            member.beat(client)
            health.watch(progress)
            assert asks(port) == (200, "ready")
            hanging.set()
            wait_until(lambda: asks(port) == (503, "stuck"), "nobody says that it hangs")
            assert asks(port, "/live")[0] == 503
            wait_until(lambda: [p.state for p in processes(client)] == ["stuck"], "the registry does not say it")
            assert "in work" in caplog.text  # the log shows where the loop stands
            hanging.clear()
            wait_until(lambda: asks(port) == (200, "ready"), "it gets on again, and nobody says so")
            member.update("draining")
            assert asks(port) == (503, "draining")
            assert asks(port, "/live")[0] == 200
            assert asks(port, "/nope")[0] == 404
        finally:
            loop_ends.set()
            thread.join()


def states(deployment: Deployment, role: str) -> list[str]:
    listed = httpx.get(f"{deployment.url}/server_info").json()["processes"]
    return sorted(process["state"] for process in listed if process["role"] == role)


def test_a_hung_forward_pass_loses_its_requests_and_its_health(redis_url: str, tmp_path: Path) -> None:
    """The process lives and its step never returns: another worker goes on, and everybody can see which one hangs."""
    script = {"tokens": TOKENS, "tokens_per_s": 10}
    flags = ("--lease-s", "2")
    with Deployment(redis_url, tmp_path, [script]) as deployment:
        port, hangs = free_port(), f"worker.step=stall:600@{TOKENS // 2}"
        hung = deployment.start("worker", *flags, "--health-port", str(port), failpoints=hangs)
        deployment.start("detok", *flags, "--shard-lease-s", "2")
        deployment.start("api")
        deployment.ready()
        assert asks(port) == (200, "ready")
        body = {"model": "m", "prompt": "x", "max_tokens": TOKENS}
        with httpx.Client(base_url=deployment.url, timeout=120, trust_env=False) as http:
            answer = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
            answers: list[httpx.Response] = []
            answer.start()
            wait_until(lambda: asks(port) == (503, "stuck"), "its health does not tell that it hangs")
            wait_until(lambda: states(deployment, "worker") == ["stuck"], "/server_info does not tell it")
            health = http.get("/health")
            assert (health.status_code, health.json()["state"]) == (503, "stuck")
            deployment.start("worker", *flags)
            answer.join(120)
            assert answers[0].json()["usage"]["completion_tokens"] == TOKENS
            wait_until(lambda: states(deployment, "worker") == ["ready", "stuck"], "both are listed, as they are")
        assert hung.poll() is None
        assert "stuck: there is work" in deployment.logs()


@pytest.mark.parametrize("role", ["detok", "batch"])
def test_the_other_roles_have_a_port_too(redis_url: str, tmp_path: Path, role: str) -> None:
    port = free_port()
    with Deployment(redis_url, tmp_path, [{"tokens": 1}]) as deployment:
        process: subprocess.Popen[bytes] = deployment.start(role, "--health-port", str(port))
        wait_until(lambda: asks(port) == (200, "ready"), f"the {role} is not ready")
        assert httpx.get(f"http://127.0.0.1:{port}/health").json()["role"] == role
        assert terminate(process) == 0

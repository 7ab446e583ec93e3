"""Logs: what concerns a request says which, in every role, so that one word finds its whole life."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace.shared import logs
from headrace.shared.errors import ConfigError
from headrace.shared.ids import new_family
from kit.deployment import Deployment
from kit.serving import wait_until

SCRIPTS: list[dict[str, Any]] = [
    {"when": "poison", "steps": [[65]], "die_at": 0},
    {"when": "slow", "tokens": 40, "tokens_per_s": 8},
]
FLAGS = ("--log-json", "--lease-s", "2")
RID = re.compile(r"[0-9a-f]{32}-\d+")


def lines(deployment: Deployment) -> list[dict[str, Any]]:
    """What all processes have logged, with the file that it stands in."""
    found = []
    for path in deployment.folder.glob("*.log"):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                found.append(json.loads(line) | {"file": path.name})
    return found


def life(deployment: Deployment, family: str) -> list[tuple[str, str]]:
    """Role and message of each line that names a request, in order."""
    named = [line for line in lines(deployment) if family in line.get("request_id", "")]
    return [(line["role"], line["message"]) for line in sorted(named, key=lambda line: line["time"])]


def said(deployment: Deployment, family: str, role: str, words: str) -> bool:
    return any(by == role and words in message for by, message in life(deployment, family))


def test_one_word_finds_the_life_of_a_request(redis_url: str, tmp_path: Path) -> None:
    with Deployment(redis_url, tmp_path, SCRIPTS) as deployment:
        first = deployment.start("worker", *FLAGS)
        deployment.start("detok", *FLAGS)
        deployment.start("api", "--log-json", "--resume-grace-s", "0.2")
        deployment.ready()
        body = {"model": "m", "prompt": "slow", "max_tokens": 40, "stream": True}
        url = f"{deployment.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, headers={"X-Request-Id": "from-outside"}) as answer:
            events = answer.iter_lines()
            family = next(line for line in events if line.startswith("id: ")).removeprefix("id: ").partition(":")[0]
            first.send_signal(signal.SIGKILL)
            deployment.start("worker", *FLAGS)
            wait_until(lambda: said(deployment, family, "worker", "taken over at token"), "nobody took it over")
        assert said(deployment, family, "detok", "silent for a lease")
        taken = next(line for line in lines(deployment) if line["message"].startswith("taken over"))
        assert taken["http_id"] == "from-outside"

        for _ in range(2):
            deployment.start("worker", *FLAGS)
        with httpx.Client(timeout=120) as http:
            failed = http.post(url, json={"model": "m", "prompt": "poison", "max_tokens": 4})
        assert failed.status_code == 500
        dead = [line for line in lines(deployment) if "is given up" in line["message"]]
        assert [line["level"] for line in dead] == ["error"]
        assert said(deployment, dead[0]["request_id"].partition(".")[0], "worker", "runs alone")
        named = [line for line in lines(deployment) if RID.search(line["message"]) and not line.get("request_id")]
        assert named == [], "a request stands in the words, and not in the field"


def test_a_line_names_a_few_of_many(caplog: pytest.LogCaptureFixture) -> None:
    rids = [f"{new_family(8)}.0" for _ in range(logs.NAMED + 3)]
    assert logs.about(rids[0]) == {"request_id": rids[0], "http_id": ""}
    named = logs.about(*rids)["request_id"].split(",")
    assert named == [*rids[: logs.NAMED], "+3"]


def test_lines_are_text_or_json(capfd: pytest.CaptureFixture[str]) -> None:
    root, level, handlers = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:]
    token = logs.http_id.set("from-outside")
    try:
        logs.setup("api", "info")
        logging.getLogger("x").info("hello %d", 7, extra=logs.about("r.0"))
        logs.setup("api", "info", as_json=True)
        logging.getLogger("x").info("hello %d", 7, extra=logs.about("r.0"))
        logging.getLogger("x").info("alone")
    finally:
        logs.http_id.reset(token)
        root.handlers[:] = handlers
        root.setLevel(level)
    text, with_id, alone = capfd.readouterr().err.splitlines()
    assert text.endswith("INFO    api hello 7 request=r.0 http=from-outside")
    assert {"message": "hello 7", "request_id": "r.0", "http_id": "from-outside"}.items() <= json.loads(with_id).items()
    assert "request_id" not in json.loads(alone)
    with pytest.raises(ConfigError, match="--log-level"):
        logs.setup("api", "loud")

"""Workers and detokenizers killed at random moments under open streams: every text is exact, and nothing is left.

The seed of a run stands in pytest's header; HEADRACE_TEST_SEED repeats it. `make test` runs one short round with a new
seed each time, `make long` many, and writes them into docs/long-runs.md.
"""

from __future__ import annotations

import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.worker.scripted import LOAD_TEXT
from kit.deployment import Deployment
from openai import OpenAI

STREAMS = 16
TOKENS = 60
FLAGS = {"worker": ("--lease-s", "3"), "detok": ("--lease-s", "3", "--shard-lease-s", "3"), "api": ()}


def stream(client: OpenAI, prompt: str) -> str:
    create: Any = client.completions.create
    chunks = create(model="m", prompt=prompt, max_tokens=TOKENS, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def left_over(redis_url: str) -> dict[str, int]:
    """Unfinished requests and jobs in each shard that has some."""
    with connect(redis_url) as store:
        counts = {
            key: store.zcard(key) if key.endswith("act") else store.xlen(key)
            for shard in range(keys.DEFAULT_SHARDS)
            for key in (keys.active(shard), *(keys.jobs(shard, "m", lane) for lane in ("rt", "std", "batch")))
        }
    return {key: count for key, count in counts.items() if count}


def round_of_kills(deployment: Deployment, moments: random.Random) -> list[str]:
    """The texts of all streams, while one role after another is killed and started again."""
    roles = [(role, deployment.start(role, *FLAGS[role])) for role in ("worker", "worker", "detok", "detok", "api")]
    deployment.ready()
    victims: list[tuple[str, subprocess.Popen[bytes]]] = roles[:4]
    with (
        OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        texts = [threads.submit(stream, client, f"stream {i}") for i in range(STREAMS)]
        while not all(text.done() for text in texts):
            time.sleep(moments.uniform(0.3, 1.5))
            i = moments.randrange(len(victims))
            role, process = victims[i]
            process.kill()
            victims[i] = (role, deployment.start(role, *FLAGS[role]))
            time.sleep(4)  # longer than a lease: a request is charged for a death only if it had no time to go on
        return [text.result() for text in texts]


def check(redis_url: str, folder: Path, seed: int) -> None:
    script = {"tokens": TOKENS, "tokens_per_s": 8}
    with Deployment(redis_url, folder, [script]) as deployment:
        tokenizer = deployment.tokenizer.tokenizer
        ids = tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
        expected = str(tokenizer.decode([ids[i % len(ids)] for i in range(TOKENS)]))
        texts = round_of_kills(deployment, random.Random(seed))
        assert texts == [expected] * STREAMS, f"seed {seed}\n{deployment.logs()}"
        assert left_over(redis_url) == {}


def test_streams_survive_kills_at_random_moments(redis_url: str, tmp_path: Path, seed: int) -> None:
    check(redis_url, tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("round_", range(20))
def test_many_rounds_of_kills(redis_url: str, tmp_path: Path, seed: int, round_: int) -> None:
    check(redis_url, tmp_path, seed + round_)

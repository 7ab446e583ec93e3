"""Many streams at once through real processes, while something befalls Redis; nothing may be left of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.worker.scripted import LOAD_TEXT
from kit.deployment import Deployment
from kit.serving import wait_until
from openai import OpenAI

STREAMS, TOKENS = 16, 60
SCRIPT: dict[str, Any] = {"tokens": TOKENS, "tokens_per_s": 12}
LEASES = ("--lease-s", "3")


def nothing() -> None:
    """What befalls Redis: nothing."""


@contextmanager
def started(redis_url: str, folder: Path, control_url: str = "") -> Iterator[Deployment]:
    """A deployment of a worker, a detokenizer and an api; ready."""
    with Deployment(redis_url, folder, [SCRIPT]) as deployment:
        deployment.start("worker", *LEASES)
        deployment.start("detok", *LEASES)
        control = ("--control-redis-url", control_url) if control_url else ()
        deployment.start("api", "--durability", "relaxed", *control)
        deployment.ready()
        yield deployment


def expected(deployment: Deployment) -> str:
    """The text of each stream."""
    ids = deployment.tokenizer.tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
    return str(deployment.tokenizer.tokenizer.decode([ids[i % len(ids)] for i in range(TOKENS)]))


def texts_through(deployment: Deployment, befall: Callable[[], None]) -> list[str]:
    """The texts of all streams; `befall` comes when each has begun."""
    begun = threading.Barrier(STREAMS + 1)

    def stream(client: OpenAI, prompt: str) -> str:
        create: Any = client.completions.create
        text = ""
        for chunk in create(model="m", prompt=prompt, max_tokens=TOKENS, stream=True):
            before, text = text, text + "".join(choice.text for choice in chunk.choices)
            if text and not before:
                begun.wait(60)
        return text

    with (
        OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        texts = [threads.submit(stream, client, f"stream {i}") for i in range(STREAMS)]
        begun.wait(60)
        befall()
        return [text.result() for text in texts]


def left_over(redis_url: str) -> dict[str, int]:
    """Unfinished requests, held jobs and bodies in each shard that has some."""
    with connect(redis_url) as store:
        shards = int(store.hget(keys.SCHEMA, "shards"))
        counts = {
            key: store.zcard(key) if key.endswith("act") else store.xlen(key)
            for shard in range(shards)
            for key in (keys.active(shard), *(keys.jobs(shard, "m", lane) for lane in ("rt", "std", "batch")))
        }
    return {key: count for key, count in counts.items() if count}


def check_texts(deployment: Deployment, befall: Callable[[], None] = nothing) -> None:
    """Each stream's text is exact, and nothing of them is left in Redis."""
    texts = texts_through(deployment, befall)
    assert texts == [expected(deployment)] * STREAMS, deployment.logs()
    wait_until(lambda: not left_over(deployment.redis_url), f"left: {left_over(deployment.redis_url)}")

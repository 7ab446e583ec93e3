"""How long other streams stand still while the api reads a large body.

    python bench/large_bodies.py --model DIR [--megabytes 30] [flags of serve and worker]

A scripted worker sends a token every 10 ms into one stream; beside it bodies of several kinds are posted, one after the
other. Prints a line of JSON for each: its status, its seconds, and the longest gap between two events of the stream
meanwhile, beside the longest gap while nothing was posted, in ms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from urllib.parse import urlsplit

import orjson
from serving import serving

KINDS: dict[str, Callable[[int], object]] = {
    "one text": lambda size: "word " * (size // 5),
    "texts of 100 characters": lambda size: ["word " * 20] * (size // 103),
    "one prompt's ids": lambda size: [12345] * (size // 6),
    "prompts of one id": lambda size: [[1]] * (size // 4),
    "999,990 ids": lambda size: [12345] * 999_990,
    "16,000 prompts of one id": lambda size: [[1]] * 16_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model, or of its tokenizer")
    parser.add_argument("--megabytes", type=int, default=30)
    args, flags = parser.parse_known_args()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"tokens": 1_000_000, "tokens_per_s": 100}) + "\n")
        script.flush()
        with serving(["--model", f"m={args.model}", "--scripted", script.name, *flags]) as server:
            measure(server.url, args.megabytes << 20)


def measure(url: str, size: int) -> None:
    for name, make in KINDS.items():
        body = orjson.dumps({"model": "m", "prompt": make(size), "max_tokens": 1})
        times: list[float] = []
        threading.Thread(target=follow, args=(url, times), daemon=True).start()
        while len(times) < 200:
            time.sleep(0.1)
        quiet = longest(times, times[0])
        begin = time.monotonic()
        status = post(url, body).status
        seconds = time.monotonic() - begin
        time.sleep(0.5)
        figures = {"status": status, "seconds": round(seconds, 2), "longest_gap_ms": longest(times, begin)}
        print(json.dumps({"body": name, **figures, "quiet_gap_ms": quiet}), flush=True)


def longest(times: list[float], begin: float) -> float:
    since = [t for t in times[:] if t >= begin - 0.02]
    return round(1000 * max(b - a for a, b in pairwise(since)), 1)


def follow(url: str, times: list[float]) -> None:
    """When each event of a stream came."""
    body = {"model": "m", "prompt": "Tell.", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    response = post(url, orjson.dumps(body))
    if response.status != 200:
        raise SystemExit(response.read().decode())
    for line in lines(response):
        if line.startswith(b"data:"):
            times.append(time.monotonic())


def lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline():
        yield line


def post(url: str, body: bytes) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection.getresponse()


if __name__ == "__main__":
    main()

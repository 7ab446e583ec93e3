"""What an open stream costs an api process while nothing comes: `python bench/idle_streams.py --model DIR`.

    [--streams 0 500 1000 2000] [--seconds 20] [--at-once 64] [flags of serve]

A scripted worker accepts requests and says nothing for ten minutes; one api process holds their streams, which get a
comment every 15 s. Only the tokenizer of DIR is loaded. Prints a line of JSON for each number of streams: the process's
resident memory, its CPU time and that of Redis a second, and per stream over none. The target: at least 1,000 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving import Serving, serving

SILENCE_MS = 600_000
WANTED_FILES = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument("--streams", type=int, nargs="*", default=[0, 500, 1000, 2000])
    parser.add_argument("--seconds", type=float, default=20.0, help="that each number of streams is looked at")
    parser.add_argument("--at-once", type=int, default=64, help="streams that are opened at the same time")
    args, flags = parser.parse_known_args()
    os.environ["HEADRACE_FIRST_TOKEN_WAIT_S"] = "0.2"  # of the api: headers wait no longer for a token
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(WANTED_FILES, hard), hard))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"steps": [[1]], "prefill_ms": SILENCE_MS}) + "\n")
        script.flush()
        served = ["--model", f"m={args.model}", "--scripted", script.name, "--max-running", "100000"]
        with serving([*served, *flags]) as server:
            asyncio.run(run(server, args.streams, args.seconds, args.at_once))


async def run(server: Serving, numbers: list[int], seconds: float, at_once: int) -> None:
    """More and more streams in one api process."""
    open_streams: list[asyncio.StreamWriter] = []
    none: dict[str, float] = {}
    for number in numbers:
        while len(open_streams) < number:
            more = min(at_once, number - len(open_streams))
            open_streams += await asyncio.gather(*(opened(server.url) for _ in range(more)))
        await asyncio.sleep(3)  # what came before has settled
        seen = await look(server, seconds)
        none = none or seen
        each = {f"{name}_per_stream": round((seen[name] - none[name]) / number, 4) for name in seen} if number else {}
        print(json.dumps({"streams": number, **seen, **each}), flush=True)
    for writer in open_streams:
        writer.close()


async def opened(url: str) -> asyncio.StreamWriter:
    """A stream that is accepted: its headers have come."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=4096)
    body = json.dumps({"model": "m", "prompt": "silence", "max_tokens": 8, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    status = await asyncio.wait_for(reader.readline(), 60)
    if b" 200 " not in status:
        raise SystemExit(f"a stream was refused: {status!r}")
    return writer


async def look(server: Serving, seconds: float) -> dict[str, float]:
    """Memory of the api in KB, and CPU ms a second of api and Redis."""
    before, began = server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    spent, after = time.monotonic() - began, server.cpu_s()
    cpu = {f"{role}_cpu_ms_per_s": round(1000 * (after[role] - before[role]) / spent, 2) for role in ("api", "redis")}
    return {"api_rss_kb": float(rss_kb(server)), **cpu}


def rss_kb(server: Serving) -> int:
    (api,) = (pid for pid in server.pids("api"))
    status: dict[str, Any] = dict(line.split(":", 1) for line in Path(f"/proc/{api}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0])


if __name__ == "__main__":
    main()

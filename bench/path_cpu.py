"""CPU time that each role takes for a token, and what it takes while nothing runs.

    python bench/path_cpu.py --model DIR [--rates 60 25 10] [--concurrency 1 8 32] [--seconds 15] [--idle 10]
                             [--forward] [flags of serve and worker]

By default a scripted worker steps at the rates (tokens/s of each request), so that only the path is measured: its loop,
Redis, detokenizer, api. `--forward` runs the model instead. Prints a line of JSON per concurrency, all of it per token:
CPU µs and voluntary context switches (wake-ups) by role, Redis's calls by command. Then one line for a deployment that
is idle, and one with a silent stream open: CPU ms and wake-ups a second by role, and Redis's calls a second. CPU time
hardly depends on what else the machine does, so that figures of two runs may be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from headrace.deploy.bench.command import measure
from headrace.deploy.bench.settings import BenchSettings
from headrace.shared.clients import connect
from headrace.shared.settings import load
from serving import Serving, serving

SILENT_WORD = "silence"


def main() -> None:
    args, flags = parse()
    for rate, concurrency in zip(args.rates, args.concurrency, strict=True):
        with deployment(args, rate, flags) as server:
            print(json.dumps(tokens(server, args, rate, concurrency)), flush=True)
    with deployment(args, args.rates[0], flags) as server:
        print(json.dumps({"state": "idle", **quiet(server, args.idle)}), flush=True)
        if not args.forward:
            with silent_stream(server):
                print(json.dumps({"state": "a silent stream", **quiet(server, args.idle)}), flush=True)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model, or of its tokenizer")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[60.0, 25.0, 10.0], help="one for each concurrency")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load for each concurrency, about")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds that each quiet state is looked at")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--forward", action="store_true", help="run the model instead of a script")
    args, flags = parser.parse_known_args()
    if len(args.rates) != len(args.concurrency):
        parser.error("--rates: give one number for each --concurrency")
    return args, flags


@contextlib.contextmanager
def deployment(args: argparse.Namespace, rate: float, flags: Sequence[str]) -> Iterator[Serving]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"when": SILENT_WORD, "steps": [[1]], "prefill_ms": 600_000}) + "\n")
        script.write(json.dumps({"tokens": args.output_len, "tokens_per_s": rate}) + "\n")
        script.flush()
        scripted = [] if args.forward else ["--scripted", script.name]
        with serving(["--model", f"m={args.model}", *scripted, *flags]) as server:
            yield server


def tokens(server: Serving, args: argparse.Namespace, rate: float, concurrency: int) -> dict[str, Any]:
    """One closed loop, and what it took by role."""
    rounds = max(1, round(args.seconds * rate / args.output_len))
    load_flags = f"--url {server.url} --model m --ignore-eos --warmup 0 --input-len 32 --output-len {args.output_len} "
    load_flags += f"--concurrency {concurrency} --num-requests "
    run(load_flags + str(concurrency))  # warms everything up
    before, redis_before = server.usage(), redis_calls(server)
    result = run(load_flags + str(rounds * concurrency))
    after, redis_after = server.usage(), redis_calls(server)
    count = result.output_tokens
    roles = {role: asdict(usage - before[role]) for role, usage in after.items() if role in before}
    return {
        "concurrency": concurrency,
        "tokens": count,
        "tokens_per_s": round(result.output_tokens_per_s, 1),
        "inter_token_ms": asdict(result.itl_ms) if result.itl_ms else None,
        "cpu_us": {
            **{role: round(used["cpu_s"] * 1e6 / count) for role, used in roles.items()},
            "client": round(result.client_cpu_s * 1e6 / count),
        },
        "wakeups": {role: round(used["switches"] / count, 2) for role, used in roles.items()},
        "redis_calls": difference(redis_before, redis_after, count),
    }


def run(flags: str) -> Any:
    _, (result,) = measure(load(BenchSettings, flags.split(), "path_cpu.py"), seed=1)
    if result.errors:
        raise SystemExit(f"requests failed: {result.errors}")
    return result


def quiet(server: Serving, seconds: float) -> dict[str, Any]:
    """What the deployment takes while nothing moves, a second."""
    time.sleep(3)  # what came before has settled
    before, redis_before = server.usage(), redis_calls(server)
    time.sleep(seconds)
    after, redis_after = server.usage(), redis_calls(server)
    return {
        "cpu_ms": {role: round((usage - before[role]).cpu_s * 1000 / seconds, 2) for role, usage in after.items()},
        "wakeups": {role: round((usage - before[role]).switches / seconds, 1) for role, usage in after.items()},
        "redis_calls": difference(redis_before, redis_after, seconds),
    }


@contextlib.contextmanager
def silent_stream(server: Serving) -> Iterator[None]:
    """A stream that is accepted, and says nothing."""
    place = urlsplit(server.url)
    with contextlib.closing(http.client.HTTPConnection(place.hostname or "", place.port or 0)) as connection:
        body = {"model": "m", "prompt": SILENT_WORD, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        yield


def redis_calls(server: Serving) -> dict[str, int]:
    """Calls of each command so far, those of scripts too."""
    with contextlib.closing(connect(server.redis_url)) as client:
        stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}


def difference(before: dict[str, int], after: dict[str, int], by: float) -> dict[str, float]:
    """Calls by command in between, divided by `by`: the most frequent first, and none that hardly occurs."""
    calls = {name: round((count - before.get(name, 0)) / by, 3) for name, count in after.items()}
    return {name: each for name, each in sorted(calls.items(), key=lambda kv: -kv[1]) if each > 0.01}


if __name__ == "__main__":
    main()

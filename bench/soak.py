"""Soaks over a deployment of real processes with a scripted worker: what grows, what is left, and who takes over.

    python bench/soak.py --model DIR requests [--count 100000] [--concurrency 64]     clients of all kinds, many leave
    python bench/soak.py --model DIR rate [--rate 500] [--seconds 900] [--http]       short requests at a fixed rate
    python bench/soak.py --model DIR takeover [--streams 1000] [--tokens 4000]        a detokenizer is killed

    [--look 10] [--seed 1] [--keep-s 20] [flags of serve]

Only the tokenizer of DIR is loaded. The first two print a line of JSON at each look: resident memory of every process,
memory and keys of Redis, consumers of the job streams, processes that are listed; then whether each is flat (the last
quarter's mean at most 1.1 of the second's), that each request has ended once, and what is left, which should be
nothing. Finished streams are kept for `--keep-s` alone, so that what a deployment keeps by intent is all there in the
first quarter. `rate` submits as the api does, without HTTP, unless told otherwise: two cores are not enough for 500 a
second with it. The exit status is 1 where something is not as it should be. For `takeover`, see takeover.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop
from headrace.shared.clients import connect
from serving import Serving, serving
from soak_clients import SCRIPT, Clients
from soak_rate import HttpLoad, Load, NativeLoad
from soak_watch import Watch, settled
from takeover import measure

WANTED_FILES = 8192


def main() -> None:
    args, flags = parse()
    os.environ["HEADRACE_KEEP_S"] = str(args.keep_s)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(WANTED_FILES, hard), hard))
    if args.mode == "takeover":
        well = measure(args, flags)
    else:
        with deployment(args.model, SCRIPT, flags) as server:
            well = uvloop.run((requests if args.mode == "requests" else rate)(server, args))
    raise SystemExit(not well)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument("--look", type=float, default=10.0, help="seconds from look to look")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-s", type=float, default=20.0, help="seconds that the text of a finished stream is kept")
    modes = parser.add_subparsers(dest="mode", required=True)
    many = modes.add_parser("requests")
    many.add_argument("--count", type=int, default=100_000)
    many.add_argument("--concurrency", type=int, default=64)
    steady = modes.add_parser("rate")
    steady.add_argument("--rate", type=float, default=500.0, help="requests a second")
    steady.add_argument("--seconds", type=float, default=900.0)
    steady.add_argument("--http", action="store_true", help="through the api")
    killed = modes.add_parser("takeover")
    killed.add_argument("--streams", type=int, default=1000)
    killed.add_argument("--tokens", type=int, default=4000, help="that each stream has when the first one is killed")
    killed.add_argument("--kills", type=int, default=3, help="detokenizers to kill, one after the other")
    return parser.parse_known_args()


@contextlib.contextmanager
def deployment(model: str, script: Sequence[dict[str, Any]], flags: Sequence[str]) -> Iterator[Serving]:
    """All roles, with a worker that replays these lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(map(json.dumps, script)))
        file.flush()
        with serving(["--model", f"m={model}", "--scripted", file.name, "--max-running", "4096", *flags]) as server:
            yield server


async def requests(server: Serving, args: argparse.Namespace) -> bool:
    """So many requests of clients that may leave."""
    clients = Clients(server.url, args.seed)
    with connect(server.redis_url) as store:
        watch = Watch(server, store, args.look, lambda: {"ended": clients.tally.total()})
        async with watch.looking():
            await clients.run(args.count, args.concurrency)
        left = await settled(store)
    return said(watch.verdict(args.count), left, {"tally": dict(clients.tally)}, not clients.problems)


async def rate(server: Serving, args: argparse.Namespace) -> bool:
    """Short requests at a fixed rate, whatever becomes of those before."""
    kind: type[Load] = HttpLoad if args.http else NativeLoad
    with connect(server.redis_url) as store:
        async with kind(server) as load:
            watch = Watch(server, store, args.look, load.progress)
            async with watch.looking():
                await load.run(args.rate, args.seconds, args.seed)
            left = await settled(store)
    return said(watch.verdict(load.sent), left, load.summary(), load.well)


def said(verdict: dict[str, Any], left: dict[str, Any], more: dict[str, Any], well: bool) -> bool:
    """Print the end of a soak; returns whether all was well."""
    flat = all(row["flat"] is not False for row in verdict.values())
    print(json.dumps({"verdict": verdict}), json.dumps({"left": left}), json.dumps(more), sep="\n", flush=True)
    print(json.dumps({"flat": flat, "nothing_left": not left["problems"], "requests_well": well}), flush=True)
    return flat and well and not left["problems"]


if __name__ == "__main__":
    main()

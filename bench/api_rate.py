"""How many short requests a second the path carries when generation costs nothing: a scripted worker answers.

    python bench/api_rate.py --model DIR [--concurrency 32] [--num-requests 2000] [--tokens 4] [--apis 1] [--stream]
                             [flags of serve]

Only the tokenizer of DIR is loaded. Prints a line of JSON: requests/s, times in ms, and the CPU time each role takes
for a request (µs). The target: at least 500 requests/s with one api process, which needs about a core of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict

from headrace.deploy.bench.command import measure
from headrace.deploy.bench.settings import BenchSettings
from headrace.shared.settings import load
from serving import serving

SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of a request")
    parser.add_argument("--apis", type=int, default=1)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=False)
    args, flags = parser.parse_known_args()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"tokens": args.tokens, "finish": "length"}) + "\n")
        script.flush()
        served = ["--model", f"m={args.model}", "--scripted", script.name, "--max-running", "256"]
        with serving([*served, "--apis", str(args.apis), *flags]) as server:
            load_flags = f"--url {server.url} --model m --input-len 16 --output-len {args.tokens} --warmup 32 "
            load_flags += f"--concurrency {args.concurrency} --num-requests {args.num_requests} "
            load_flags += "--stream" if args.stream else "--no-stream"
            before = server.cpu_s()
            _, (result,) = measure(load(BenchSettings, load_flags.split(), "api_rate.py"), SEED)
            after = server.cpu_s()
    spent = {
        role: round((seconds - before.get(role, 0.0)) * 1e6 / args.num_requests) for role, seconds in after.items()
    }
    spent["client"] = round(result.client_cpu_s * 1e6 / args.num_requests)
    times = {name: asdict(d) for name in ("ttft_ms", "e2e_ms") if (d := getattr(result, name)) is not None}
    rate = {"requests_per_s": round(result.requests_per_s, 1), "completed": result.completed, "errors": result.errors}
    print(json.dumps({"apis": args.apis, "stream": args.stream} | rate | times | {"cpu_us_per_request": spent}))


if __name__ == "__main__":
    main()

"""What the path costs: HTTP, Redis and detokenizer over the bare engine loop, on one model and the same requests.

    python bench/queue_price.py --model DIR [--concurrency 1 8 32] [--num-requests 8 24 64] [--rounds 3]
                                [--input-len 100] [--output-len 64] [--output FILE] [flags of serve and worker]

Both sides run the same prompts as a closed loop, in turn, round after round, so that a drift of the machine's speed
falls on both. Prints a line of JSON per concurrency, medians over the rounds: the ratio of output tokens/s, what the
path adds to the first token and between tokens at the median (ms), and the CPU time each role takes for a token (µs).
The targets: at most 5% of the throughput, 5 ms on the first token, 3 ms on the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.deploy.bench.command import measure
from headrace.deploy.bench.prompts import PromptSource
from headrace.deploy.bench.report import environment
from headrace.deploy.bench.results import LevelResult, summarize
from headrace.deploy.bench.samples import Sample
from headrace.deploy.bench.settings import BenchSettings
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.interface import Engine
from headrace.worker.settings import WorkerSettings
from serving import Serving, serving
from tokenizers import Tokenizer


def main() -> None:
    args, flags = parse()
    engine, tokenizer = load_engine(args.model, flags)
    with serving(["--model", f"m={args.model}", *flags]) as server:
        run_round(engine, tokenizer, server, args, seed=0)  # warms both sides up
        rounds = [run_round(engine, tokenizer, server, args, seed) for seed in range(1, args.rounds + 1)]
    engine.close()
    prices = [price(level, [pairs[i] for pairs in rounds]) for i, level in enumerate(args.concurrency)]
    for line in prices:
        print(json.dumps({key: value for key, value in line.items() if key != "rounds"}), flush=True)
    if args.output:
        report = {"environment": environment(), "settings": vars(args), "dtype": engine.card.dtype, "prices": prices}
        Path(args.output).write_text(json.dumps(report, indent=2))


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-requests", type=int, nargs="+", default=[8, 24, 64], help="one for each concurrency")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=100)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output", default="", help="file for the JSON report")
    args, flags = parser.parse_known_args()
    if len(args.num_requests) != len(args.concurrency):
        parser.error("--num-requests: give one number for each --concurrency")
    return args, flags


def load_engine(model: str, flags: Sequence[str]) -> tuple[Engine, Tokenizer]:
    from headrace.worker.engine.engine import TransformersEngine

    engine = TransformersEngine(load(WorkerSettings, ["--model", model, *flags], "queue_price.py"))
    return engine, Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


Pair = tuple[LevelResult, LevelResult, dict[str, float]]


def run_round(engine: Engine, tokenizer: Tokenizer, server: Serving, args: argparse.Namespace, seed: int) -> list[Pair]:
    """Each concurrency once on either side, engine first in every second round: (engine, path, CPU seconds by role)."""
    pairs = []
    for concurrency, count in zip(args.concurrency, args.num_requests, strict=True):
        level_seed = seed * 1000 + concurrency

        def bare(concurrency: int = concurrency, count: int = count, level_seed: int = level_seed) -> LevelResult:
            source = PromptSource(words=args.input_len, seed=level_seed)
            prompts = [tokenizer.encode(source.prompt(i)).ids for i in range(count)]
            return run_engine(engine, prompts, concurrency, args.output_len)

        before = bare() if seed % 2 else None
        path, cpu_s = run_path(server, args, concurrency, count, level_seed)
        pairs.append((before or bare(), path, cpu_s))
    return pairs


def run_engine(engine: Engine, prompts: Sequence[Sequence[int]], concurrency: int, output_len: int) -> LevelResult:
    """The worker's loop without its queue: as many sequences as `concurrency`, another when one ends."""
    waiting = iter(enumerate(prompts))
    running: dict[str, Sample] = {}
    done: list[Sample] = []
    cpu = time.process_time()
    while len(done) < len(prompts):
        while len(running) < concurrency and (following := next(waiting, None)) is not None:
            number, ids = following
            sample = running[str(number)] = Sample(start=time.perf_counter(), prompt_tokens=len(ids))
            sample.sent = sample.start
            engine.add(job(str(number), ids, output_len))
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            sample = running[output.rid]
            if output.token_ids:
                sample.text_times.append(now)
                sample.completion_tokens = (sample.completion_tokens or 0) + len(output.token_ids)
            if output.finish is not None:
                sample.end = now
                done.append(running.pop(output.rid))
    engine.check_integrity()
    return summarize("closed", concurrency, done, time.process_time() - cpu)


def job(rid: str, ids: Sequence[int], output_len: int) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True, sampling_seed=0)
    return GenerateJob(rid=rid, model="m", pool="m", tokenizer="", input_ids=tuple(ids), sampling=sampling)


def run_path(
    server: Serving, args: argparse.Namespace, concurrency: int, count: int, seed: int
) -> tuple[LevelResult, dict[str, float]]:
    """The same load over HTTP, and the CPU seconds that each role took for it."""
    flags = f"--url {server.url} --model m --ignore-eos --warmup 0 --seed {seed} --input-len {args.input_len} "
    flags += f"--output-len {args.output_len} --concurrency {concurrency} --num-requests {count}"
    before = server.cpu_s()
    _, (result,) = measure(load(BenchSettings, flags.split(), "queue_price.py"), seed)
    if result.errors:
        raise SystemExit(f"requests failed: {result.errors}")
    return result, {role: seconds - before.get(role, 0.0) for role, seconds in server.cpu_s().items()}


def price(concurrency: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians over the rounds of what one side's number says beside the other's of the same round."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 4)

    def added_ms(name: str) -> float | None:
        both = [(getattr(path, name), getattr(bare, name)) for bare, path, _ in pairs]
        return median([path.p50 - bare.p50 for path, bare in both]) if all(p and b for p, b in both) else None

    roles = sorted({role for _, _, cpu_s in pairs for role in cpu_s})
    return {
        "concurrency": concurrency,
        "engine_tokens_per_s": median([bare.output_tokens_per_s for bare, _, _ in pairs]),
        "path_tokens_per_s": median([path.output_tokens_per_s for _, path, _ in pairs]),
        "ratio": median([path.output_tokens_per_s / bare.output_tokens_per_s for bare, path, _ in pairs]),
        "first_token_added_ms": added_ms("ttft_ms"),
        "inter_token_added_ms": added_ms("itl_ms"),
        "engine_cpu_us_per_token": median([bare.client_cpu_s * 1e6 / bare.output_tokens for bare, _, _ in pairs]),
        "path_cpu_us_per_token": {
            **{r: median([cpu.get(r, 0.0) * 1e6 / path.output_tokens for _, path, cpu in pairs]) for r in roles},
            "client": median([path.client_cpu_s * 1e6 / path.output_tokens for _, path, _ in pairs]),
        },
        "rounds": [{"engine": asdict(bare), "path": asdict(path), "path_cpu_s": cpu} for bare, path, cpu in pairs],
    }


if __name__ == "__main__":
    main()

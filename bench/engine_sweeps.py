"""The bare engine on one device: decoding by batch size, prefill by prompt length, and many requests of mixed lengths.

    python bench/engine_sweeps.py --model DIR [--output FILE.csv] [--only decode prefill mixed] [worker flags]

decode   N sequences of 128 tokens in, 64 out: tokens/s and the median step; the share of bandwidth: the weights' bytes
         and the K/V that a step reads over its time, against a measured copy (bytes read plus written)
prefill  one prompt of N tokens: tokens/s
overlap  decode, with and without it in turns in one engine: the median step of either
mixed    --requests of --low … --high tokens in and out, all added at once: output tokens/s, the figure that peers print
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings
from table import Table

Line = dict[str, Any]
SWEEPS = ("decode", "overlap", "prefill", "mixed")
COLUMNS = ("sweep", "n", "tokens_per_s", "step_ms", "step_ms_without", "decode_tokens_per_s", "of_copy")


def job(rid: str, prompt: int, output: int, vocabulary: int, temperature: float) -> GenerateJob:
    ids = tuple(random.randrange(vocabulary) for _ in range(prompt))
    sampling = SamplingParams(max_new_tokens=output, temperature=temperature, ignore_eos=True, sampling_seed=1)
    return GenerateJob(rid=rid, model="", pool="", tokenizer="", input_ids=ids, sampling=sampling)


def run(engine: TransformersEngine, jobs: list[GenerateJob]) -> tuple[float, int, list[float]]:
    """Seconds, tokens made, and the seconds of the steps in which every job made a token."""
    for each in jobs:
        engine.add(each)
    tokens, full, begun = 0, [], time.perf_counter()
    while engine.has_work():
        start = time.perf_counter()
        made = sum(len(output.token_ids) for output in engine.step())
        if made == len(jobs):
            full.append(time.perf_counter() - start)
        tokens += made
    return time.perf_counter() - begun, tokens, full


def decode(engine: TransformersEngine, args: argparse.Namespace, weights: int, copied: float) -> Iterator[Line]:
    for count in args.batch:
        seconds, tokens, steps = run(engine, [job(str(i), 128, 64, args.vocabulary, 0.0) for i in range(count)])
        median = statistics.median(steps)
        read = weights + count * (128 + 32) * args.kv_bytes
        yield {
            "sweep": "decode",
            "n": count,
            "tokens_per_s": round(tokens / seconds),
            "step_ms": round(median * 1e3, 3),
            "decode_tokens_per_s": round(count / median),
            "of_copy": round(read / median / copied, 3) if copied else "",
        }


def overlap(engine: TransformersEngine, args: argparse.Namespace) -> Iterator[Line]:
    """What planning ahead gains: nothing on a CPU, which the host's work waits for."""
    pipeline = engine._pipeline
    given = pipeline.overlap
    for count in args.batch:
        medians: dict[bool, list[float]] = {True: [], False: []}
        for pipeline.overlap in (False, True) * 3:
            jobs = [job(str(i), 128, 64, args.vocabulary, 0.0) for i in range(count)]
            medians[pipeline.overlap].append(statistics.median(run(engine, jobs)[2]))
        best = {on: min(of) for on, of in medians.items()}
        yield {
            "sweep": "overlap",
            "n": count,
            "step_ms": round(best[True] * 1e3, 3),
            "step_ms_without": round(best[False] * 1e3, 3),
            "decode_tokens_per_s": round(count / best[True]),
        }
    pipeline.overlap = given


def prefill(engine: TransformersEngine, args: argparse.Namespace) -> Iterator[Line]:
    for length in args.prompt:
        times = [run(engine, [job("p", length, 1, args.vocabulary, 0.0)])[0] for _ in range(4)][1:]
        median = statistics.median(times)
        yield {
            "sweep": "prefill",
            "n": length,
            "tokens_per_s": round(length / median),
            "step_ms": round(median * 1e3, 3),
        }


def mixed(engine: TransformersEngine, args: argparse.Namespace) -> Iterator[Line]:
    random.seed(0)
    lengths = [(random.randint(args.low, args.high), random.randint(args.low, args.high)) for _ in range(args.requests)]
    jobs = [job(str(i), given, made, args.vocabulary, 0.6) for i, (given, made) in enumerate(lengths)]
    seconds, tokens, _ = run(engine, jobs)
    yield {"sweep": "mixed", "n": args.requests, "tokens_per_s": round(tokens / seconds), "step_ms": ""}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on a GPU, read plus written; 0 on a CPU, where nothing is compared with it."""
    if device.type != "cuda":
        return 0.0
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    start.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 20 * 2 * source.numel() / (start.elapsed_time(end) / 1e3)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path)
    made.add_argument("--only", nargs="+", choices=SWEEPS, default=SWEEPS)
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    made.add_argument("--prompt", type=int, nargs="+", default=[128, 512, 2048, 8192])
    made.add_argument("--requests", type=int, default=256)
    made.add_argument("--low", type=int, default=100)
    made.add_argument("--high", type=int, default=1024)
    return made


def read_bytes(model: Any) -> tuple[int, int]:
    """Of the weights, which each step reads, and of a token's K/V."""
    parameters = {p.data_ptr(): p for p in model.parameters()}.values()
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * next(model.parameters()).element_size()
    return sum(p.numel() * p.element_size() for p in parameters), token


def main() -> None:
    args, flags = parser().parse_known_args()
    begun = time.perf_counter()
    settings = load(WorkerSettings, ["--prefix-cache", "off", *flags], "engine_sweeps.py")
    engine = TransformersEngine(settings)
    started = time.perf_counter() - begun
    runner = engine._stepper.runner
    device = runner._cache.device
    weights, args.kv_bytes = read_bytes(runner._model)
    args.vocabulary = engine.card.vocab_size
    about = {
        "model": engine.card.name,
        "dtype": engine.card.dtype,
        "graphs": runner._graphs is not None,
        "overlap": engine._pipeline.overlap,
        "start_s": round(started, 1),
    }
    table = Table(device, [*about, *COLUMNS], args.output)
    run(engine, [job("warm", 64, 8, args.vocabulary, 0.6)])
    sweeps = {
        "decode": lambda: decode(engine, args, weights, copy_bandwidth(device)),
        "overlap": lambda: overlap(engine, args),
        "prefill": lambda: prefill(engine, args),
        "mixed": lambda: mixed(engine, args),
    }
    for sweep in args.only:
        for line in sweeps[sweep]():
            table.add(about | line)
    engine.close()


if __name__ == "__main__":
    main()

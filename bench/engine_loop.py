"""The bare engine loop, without queue, HTTP or detokenizer: what the rest of the path is measured against.

    python bench/engine_loop.py --model DIR [--concurrency 1 8 32] [--input 32] [--output 128] [worker flags]

Prints one line of JSON per concurrency: output tokens/s, and milliseconds of a decoding step, by the clock and in
CPU time of all threads (which says more on a busy machine).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings


def job(number: int, length: int, output: int, vocabulary: int, temperature: float) -> GenerateJob:
    """A request with a random prompt that generates exactly `output` tokens."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(100, vocabulary, (length,), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=output, temperature=temperature, ignore_eos=True, sampling_seed=number)
    return GenerateJob(rid=str(number), model="", pool="", tokenizer="", input_ids=tuple(ids), sampling=sampling)


def measure(engine: TransformersEngine, concurrency: int, args: argparse.Namespace) -> dict[str, float]:
    """`concurrency` equal requests, all added at once, run to their end."""
    for number in range(concurrency):
        engine.add(job(number, args.input, args.output, engine.card.vocab_size, args.temperature))
    tokens, steps, cpu, start = 0, [], [], time.perf_counter()
    while engine.has_work():
        began, cpu_began = time.perf_counter(), time.process_time()
        made = sum(len(output.token_ids) for output in engine.step())
        tokens += made
        if made == concurrency:
            steps.append((time.perf_counter() - began) * 1e3)
            cpu.append((time.process_time() - cpu_began) * 1e3)
    wall = time.perf_counter() - start
    engine.check_integrity()
    return {
        "concurrency": concurrency,
        "tokens_per_s": round(tokens / wall, 1),
        "step_ms_median": round(statistics.median(steps), 2),
        "step_ms_best": round(min(steps), 2),
        "step_cpu_ms_median": round(statistics.median(cpu), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=32, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="generated tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    args, worker_flags = parser.parse_known_args()
    engine = TransformersEngine(load(WorkerSettings, worker_flags, "engine_loop.py"))
    measure(engine, 1, argparse.Namespace(**(vars(args) | {"output": 8})))  # warm up
    for concurrency in args.concurrency:
        print(json.dumps({"dtype": engine.card.dtype} | measure(engine, concurrency, args)), flush=True)


if __name__ == "__main__":
    main()

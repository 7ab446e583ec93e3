"""What a step costs in Python before and after the model runs: planning, and noting what came of it.

    python bench/scheduler_cost.py [--running 32 256 512] [--waiting 64] [--speculate 0]

Sequences that decode, with nothing but the scheduler. Prints a line of JSON per count: microseconds a step, median and
best of many steps, the prefix cache's part (a key for each full block) included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.worker.engine.blocks import BlockAllocator
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.sequence import Sequence

PROMPT, OUTPUT, BLOCK_SIZE, STEPS = 100, 400, 16, 200


def sequence(number: int) -> Sequence:
    ids = random.Random(number).choices(range(50_000), k=PROMPT)
    job = GenerateJob(str(number), "m", "m", "", tuple(ids), SamplingParams(max_new_tokens=OUTPUT))
    return Sequence(job, ids, PROMPT, PROMPT + OUTPUT, frozenset(), seed=0, arrival=number)


def step(scheduler: Scheduler) -> float:
    """One step, with tokens from nowhere; seconds."""
    begun = time.perf_counter()
    for piece in scheduler.schedule():
        sampled = piece.num_sampled
        scheduler.commit(piece)
        if sampled:
            piece.sequence.append(7)
            scheduler.verify(piece)
    return time.perf_counter() - begun


def measure(running: int, waiting: int, speculate: int) -> dict[str, float]:
    blocks = BlockAllocator(running * (PROMPT + OUTPUT) // BLOCK_SIZE + running + 1, BLOCK_SIZE)
    scheduler = Scheduler(blocks, max_running=running, max_batch_tokens=max(8192, running), speculate=speculate)
    for number in range(running + waiting):
        scheduler.add(sequence(number))
    while len(scheduler.running) < running or any(s.num_pending > 1 for s in scheduler.running):
        step(scheduler)
    micros = [step(scheduler) * 1e6 for _ in range(STEPS)]
    return {"running": running, "us_per_step": round(statistics.median(micros)), "us_best": round(min(micros))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 512])
    parser.add_argument("--waiting", type=int, default=64, help="sequences that wait for a place")
    parser.add_argument("--speculate", type=int, default=0)
    args = parser.parse_args()
    for running in args.running:
        print(json.dumps(measure(running, args.waiting, args.speculate)), flush=True)


if __name__ == "__main__":
    main()

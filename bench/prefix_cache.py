"""What the prefix cache saves: requests that share their beginning, one after the other and all at once.

    python bench/prefix_cache.py --model DIR [--shared 400] [--own 16] [--requests 8] [--output 4] [worker flags]

The bare engine loop with random prompts; engines with and without the cache take turns. Prints a line of JSON per way
of arriving: seconds and CPU seconds without and with, and the share of prompt tokens that were found.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings


def run(engine: TransformersEngine, jobs: list[GenerateJob], at_once: bool) -> tuple[float, float]:
    """Seconds by the clock and of CPU time."""
    engine.flush_cache()
    begun, cpu = time.perf_counter(), time.process_time()
    for job in jobs:
        engine.add(job)
        while engine.has_work() and not at_once:
            engine.step()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - begun, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=int, default=400, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt after them")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output", type=int, default=4)
    args, flags = parser.parse_known_args()
    plain = TransformersEngine(load(WorkerSettings, [*flags, "--prefix-cache", "off"], "prefix_cache.py"))
    caching = TransformersEngine(load(WorkerSettings, flags, "prefix_cache.py"))
    draw = random.Random(0)
    ids = range(100, caching.card.vocab_size)
    shared = draw.choices(ids, k=args.shared)
    sampling = SamplingParams(max_new_tokens=args.output, temperature=0.0, ignore_eos=True)
    prompts = [(*shared, *draw.choices(ids, k=args.own)) for _ in range(args.requests)]
    jobs = [GenerateJob(str(i), "m", "m", "", prompt, sampling) for i, prompt in enumerate(prompts)]
    for engine in (plain, caching):
        run(engine, jobs[:1], at_once=False)  # warm up
    for at_once in (False, True):
        before = caching.stats()
        (wall, cpu), (less_wall, less_cpu) = run(plain, jobs, at_once), run(caching, jobs, at_once)
        asked, found = (caching.stats()[key] - before[key] for key in ("prefix_queried_tokens", "prefix_hit_tokens"))
        report = {
            "arrive": "at once" if at_once else "one by one",
            "seconds": [round(wall, 2), round(less_wall, 2)],
            "cpu_s": [round(cpu, 2), round(less_cpu, 2)],
            "found": round(found / asked, 2),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

"""What guessed tokens gain, and what they cost where nothing repeats itself: the bare engine loop with and without.

    python bench/speculation.py --model DIR [--speculate 4] [--concurrency 1 8] [--output 64] [worker flags]

Two kinds of prompt: a text that goes round, and plain beginnings of stories. Greedy. The engines take turns; prints a
line of JSON per kind and concurrency: output tokens/s of both, CPU seconds of both (which say more on a busy machine),
steps of both, and the share of guesses that came true.
"""

from __future__ import annotations

import argparse
import json
import time

from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings
from tokenizers import Tokenizer

TEXT = "The mill stands by the river. A headrace carries water from the weir to the wheel, a tailrace carries it back. "
PROMPTS = {
    "copies": TEXT * 2 + TEXT[:40],
    "stories": "Once upon a time a {} met a miller who told it",
}
ANIMALS = ("fox", "hare", "crow", "toad", "goat", "bear", "wolf", "hen")


def run(engine: TransformersEngine, jobs: list[GenerateJob]) -> tuple[float, float, int, dict[str, list[int]]]:
    """Seconds by the clock and of CPU time, steps, and the tokens of each job."""
    out: dict[str, list[int]] = {job.rid: [] for job in jobs}
    engine.flush_cache()
    for job in jobs:
        engine.add(job)
    begun, cpu, steps = time.perf_counter(), time.process_time(), 0
    while engine.has_work():
        for output in engine.step():
            out[output.rid] += output.token_ids
        steps += 1
    return time.perf_counter() - begun, time.process_time() - cpu, steps, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculate", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=int, default=64)
    args, flags = parser.parse_known_args()
    flags += ["--model", args.model]
    plain = TransformersEngine(load(WorkerSettings, flags, "speculation.py"))
    guessing = TransformersEngine(load(WorkerSettings, [*flags, "--speculate", str(args.speculate)], "speculation.py"))
    tokenizer = Tokenizer.from_file(f"{args.model}/tokenizer.json")
    sampling = SamplingParams(max_new_tokens=args.output, temperature=0.0, ignore_eos=True)
    for kind, prompt in PROMPTS.items():
        for concurrency in args.concurrency:
            texts = [prompt.format(ANIMALS[i % len(ANIMALS)]) for i in range(concurrency)]
            ids = [tuple(tokenizer.encode(text).ids) for text in texts]
            jobs = [GenerateJob(str(i), "m", "m", "", one, sampling) for i, one in enumerate(ids)]
            speculation = guessing._scheduler.speculation
            drafted, accepted = speculation.drafted, speculation.accepted
            (alone, cpu, steps, expected), (guessed, less, fewer, out) = run(plain, jobs), run(guessing, jobs)
            made = args.output * concurrency
            report = {
                "kind": kind,
                "concurrency": concurrency,
                "tokens_per_s": [round(made / alone, 1), round(made / guessed, 1)],
                "cpu_s": [round(cpu, 1), round(less, 1)],
                "steps": [steps, fewer],
                "came_true": round((speculation.accepted - accepted) / max(speculation.drafted - drafted, 1), 2),
                "same_tokens": out == expected,
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

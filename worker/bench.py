"""`headrace bench engine`: the worker's engine alone, without queue, HTTP or detokenizer.

What the rest of the path is measured against. It takes the worker's own flags and writes one line of JSON per level.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import Field, field_validator

from ..shared.messages import GenerateJob, SamplingParams
from ..shared.settings import IntTuple, load
from .interface import Engine
from .settings import WorkerSettings


class EngineBenchSettings(WorkerSettings):
    """Settings of `headrace bench engine`: a worker's, and what to run."""

    concurrency: IntTuple = Field((1, 8, 32), description="sequences at a time, one level each")
    input_len: int = Field(100, ge=1, description="tokens of a prompt, random ones")
    shared_prefix: int = Field(0, ge=0, description="tokens at the head of every prompt that all have in common")
    output_len: int = Field(64, ge=2, description="tokens that each sequence generates")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    repeat: int = Field(0, ge=0, description="a prompt's tokens come again after so many; 0: never (for --speculate)")
    seed: int = Field(0, description="of the prompts")

    @field_validator("concurrency")
    @classmethod
    def _levels(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if not levels or min(levels) < 1:
            raise ValueError("must be 1 or more, one level each")
        return levels


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench engine`.

    Raises:
        ConfigError: as a worker's start does.
    """
    settings = load(EngineBenchSettings, argv, "headrace bench engine")
    from .pace import calm_threads

    calm_threads()
    from .engine.engine import TransformersEngine  # loads torch

    engine = TransformersEngine(settings)
    _run(engine, _jobs(settings, engine, 1, salt=-1))  # what is compiled or allocated first is not measured
    for number, level in enumerate(settings.concurrency):
        line: dict[str, Any] = {"model": engine.card.name, "dtype": engine.card.dtype, "concurrency": level}
        line |= _run(engine, _jobs(settings, engine, level, salt=number))
        sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()
    engine.close()
    return 0


def _jobs(settings: EngineBenchSettings, engine: Engine, count: int, *, salt: int) -> list[GenerateJob]:
    """Equal requests over random prompts, which no other level has."""
    shared = _tokens(random.Random(settings.seed), settings.shared_prefix, engine.card.vocab_size)
    jobs = []
    for number in range(count):
        source = random.Random(f"{settings.seed} {salt} {number}")
        own = _tokens(source, settings.repeat or settings.input_len, engine.card.vocab_size)
        ids = (shared + own * (settings.input_len // len(own) + 1))[: settings.shared_prefix + settings.input_len]
        sampling = SamplingParams(
            max_new_tokens=settings.output_len,
            temperature=settings.temperature,
            ignore_eos=True,
            sampling_seed=number,
        )
        rid = f"{salt}-{number}"
        jobs.append(GenerateJob(rid=rid, model="", pool="", tokenizer="", input_ids=tuple(ids), sampling=sampling))
    return jobs


def _tokens(source: random.Random, count: int, vocab_size: int) -> list[int]:
    low = min(100, vocab_size // 2)  # above most vocabularies' control tokens
    return [source.randrange(low, vocab_size) for _ in range(count)]


def _run(engine: Engine, jobs: Sequence[GenerateJob]) -> dict[str, Any]:
    """All jobs added at once, run to their end; steps in which every sequence decoded are timed."""
    for job in jobs:
        engine.add(job)
    before, tokens, first, steps, cpu = dict(engine.stats()), 0, 0.0, [], []
    start = time.perf_counter()
    while engine.has_work():
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = engine.step()
        ended = time.perf_counter()
        tokens += sum(len(output.token_ids) for output in outputs)
        first = first or (ended - start if any(output.token_ids for output in outputs) else 0.0)
        if sum(bool(output.token_ids) for output in outputs) == len(jobs):
            steps.append((ended - began) * 1e3)
            cpu.append((time.process_time() - cpu_began) * 1e3)
    wall = time.perf_counter() - start
    engine.check_integrity()
    spent = {key: value - before[key] for key, value in engine.stats().items() if key.endswith("_seconds")}
    return {
        "tokens_per_s": round(tokens / wall, 1),
        "first_token_ms": round(first * 1e3, 1),
        "step_ms": {"median": round(statistics.median(steps), 2), "best": round(min(steps), 2)} if steps else None,
        "step_cpu_ms_median": round(statistics.median(cpu), 2) if cpu else None,
        "seconds": {key.removesuffix("_seconds"): round(value, 3) for key, value in spent.items()},
    }

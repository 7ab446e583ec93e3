"""The command: find the model, warm up, run each level, report."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from ...shared.errors import ConfigError
from ...shared.settings import load
from . import report
from .client import Client
from .load import closed_loop, open_loop, poisson_arrivals
from .prompts import PromptSource
from .requests import request_body
from .results import LevelResult, summarize
from .samples import Sample
from .settings import BenchSettings, Loop


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench`. Returns 0, or 1 when a level had no request answered.

    Raises:
        ConfigError: a setting is wrong, or the server cannot be asked at all.
    """
    settings = load(BenchSettings, argv, "headrace bench")
    output = _writable(settings.output)
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    machine = report.environment()
    model, results = measure(settings, seed)
    report.print_table(f"{settings.label or settings.url}  {model}  seed {seed}", results)
    if output is not None:
        output.write_bytes(
            orjson.dumps(report.build(settings, machine, model, seed, results), option=orjson.OPT_INDENT_2)
        )
    return 0 if all(result.completed for result in results) else 1


def measure(settings: BenchSettings, seed: int) -> tuple[str, list[LevelResult]]:
    """Load the server level by level; returns the model's name and the results, in the order of the settings.

    Raises:
        ConfigError: the server cannot be asked at all.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_measure(settings, seed))
    # Where the platform has it: it halves what an event costs.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(settings, seed))


async def _measure(settings: BenchSettings, seed: int) -> tuple[str, list[LevelResult]]:
    client = Client(settings.url, api_key=settings.api_key.get_secret_value(), timeout_s=settings.timeout_s)
    try:
        model = settings.model or await _first_model(client, settings.url)
        requests = _requests(client, settings, model, seed)
        await _warm_up(client, settings, [next(requests) for _ in range(settings.warmup)])
        results = []
        for loop, level, count in settings.levels:
            batch = [next(requests) for _ in range(count)]
            samples, cpu_s = await _run_level(client, loop, level, batch, seed)
            results.append(summarize(loop, level, samples, cpu_s))
            _progress(results[-1])
        return model, results
    finally:
        await client.close()


async def _run_level(
    client: Client, loop: Loop, level: float, requests: Sequence[bytes], seed: int
) -> tuple[list[Sample], float]:
    """The samples of a level, and the CPU seconds that this process took meanwhile."""
    arrivals = poisson_arrivals(level, len(requests), seed) if loop == "open" else []
    cpu = time.process_time()
    if loop == "open":
        samples = await open_loop(client.send, requests, arrivals)
    else:
        samples = await closed_loop(client.send, requests, int(level))
    return samples, time.process_time() - cpu


def _requests(client: Client, settings: BenchSettings, model: str, seed: int) -> Iterator[bytes]:
    """Requests without end, no prompt twice: warm-up and every level take theirs from here."""
    source = PromptSource(words=settings.input_len, shared_prefix=settings.shared_prefix, seed=seed)
    index = 0
    while True:
        yield client.post(settings.path, request_body(settings, model, source.prompt(index)))
        index += 1


async def _first_model(client: Client, url: str) -> str:
    try:
        models = orjson.loads(await client.get("/v1/models"))["data"]
        return str(models[0]["id"])
    except OSError as e:
        raise ConfigError(f"--url {url}: /v1/models: {e}; start the server first, or name another one") from e
    except (orjson.JSONDecodeError, LookupError, TypeError) as e:
        raise ConfigError(f"--url {url}: /v1/models names no model; say which with --model") from e


async def _warm_up(client: Client, settings: BenchSettings, requests: Sequence[bytes]) -> None:
    """All at once, so that the server has met a batch; a server that answers none of them is not measured."""
    samples = await closed_loop(client.send, requests, len(requests)) if requests else []
    if samples and all(sample.error for sample in samples):
        raise ConfigError(f"--url {settings.url}{settings.path}: every warm-up request failed: {samples[0].error}")


def _progress(r: LevelResult) -> None:
    line = (
        f"{r.loop} {r.level:g}: {r.completed}/{r.requests} in {r.duration_s:.1f} s, {r.output_tokens_per_s:.1f} tok/s"
    )
    print(line, file=sys.stderr, flush=True)


def _writable(output: str) -> Path | None:
    """The report's path, tried before minutes are spent on it."""
    if not output:
        return None
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        path.open("ab").close()
        if not known:
            path.unlink()  # a run that fails leaves no empty report
    except OSError as e:
        raise ConfigError(f"--output {output}: {e.strerror}; name a file that can be written") from e
    return path

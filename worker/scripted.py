"""A worker without a model: it replays given token ids through the real queue. For tests, and as a source of load.

FILE holds JSON lines; a request takes the first line whose `when` stands in its prompt (as text), or that has none:

    {"when": "text", "steps": [[id, …], …], "finish": "stop"|"length", "step_ms": 0,
     "logprobs": [[lp, [[id, lp], …]], …]}
    {"tokens": N, "tokens_per_s": R}     N ordinary ids at that rate (R 0: as fast as it goes); requests of one rate
                                         step together, as those of a batch do
    {"fail": "text"}                     an error after the steps, if any
    {"die_at": n}                        the process kills itself when token n is due (before it is published)
    {"prefill_ms": 0}                    before the first token

Exactly these steps are emitted, and the request ends early on abort or `max_new_tokens`. What a line emits is a
function of the line and the position alone, so that any worker continues what another began.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from ..shared.chunks import Finish, FinishType, TokenLogprob
from ..shared.errors import ConfigError, InvalidRequest, NotFound
from ..shared.messages import GenerateJob
from ..shared.model_card import ModelCard
from .interface import Beside, StepOutput
from .settings import WorkerSettings

LOAD_TEXT = " The water runs down the headrace to the wheel, and the wheel turns the stone that grinds the grain."


class Script(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str | None = None
    steps: list[list[int]] = Field(default_factory=list)
    finish: FinishType = "stop"
    step_ms: float = Field(0, ge=0)
    prefill_ms: float = Field(0, ge=0)
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    tokens: int | None = Field(None, ge=0)
    tokens_per_s: float = Field(0, ge=0)
    fail: str | None = None
    die_at: int | None = Field(None, ge=0)


def read_scripts(path: str) -> list[Script]:
    """Raises ConfigError, naming the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"--scripted (HEADRACE_SCRIPTED): cannot read {path!r}: {e.strerror}") from e
    scripts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                scripts.append(Script.model_validate(orjson.loads(line)))
            except (ValidationError, orjson.JSONDecodeError) as e:
                raise ConfigError(f"--scripted (HEADRACE_SCRIPTED): {path} line {number}: {_one_line(e)}") from e
    if not scripts:
        raise ConfigError(f"--scripted {path} has no line")
    return scripts


def _one_line(error: ValidationError | orjson.JSONDecodeError) -> str:
    """The first thing that is wrong, in one line: the last line of a process is what its supervisor reports."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the line"
    return f"{place}: {first['msg']}, got {repr(first['input'])[:80]}"


@dataclass(slots=True)
class Replay:
    """One request on its way through its script."""

    job: GenerateJob
    script: Script
    steps: Sequence[Sequence[int]]
    due_at: float  # monotonic seconds at which the next step is due
    position: int  # tokens emitted, by us or a worker before us
    first: bool = True


class ScriptedEngine:
    """An `Engine` that replays."""

    def __init__(self, settings: WorkerSettings, card: ModelCard, tokenizer: bytes) -> None:
        self.card = card
        self._scripts = read_scripts(settings.scripted)
        self._tokenizer = Tokenizer.from_str(tokenizer.decode())
        self._load_ids = self._tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
        self._max_running = settings.max_running or 256
        self._replays: dict[str, Replay] = {}

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        """Choose the script. Never refuses: a prompt that no line fits fails as a request."""
        prompt = self._tokenizer.decode(list(job.input_ids), skip_special_tokens=False)
        script = next((s for s in self._scripts if s.when is None or s.when in prompt), None)
        if script is None:
            script = Script(fail="no line of the script file fits this prompt")
        due_at = time.monotonic() + (0.0 if produced else script.prefill_ms / 1000)
        if script.tokens_per_s:
            due_at = math.ceil(due_at * script.tokens_per_s) / script.tokens_per_s
        self._replays[job.rid] = Replay(job, script, self._steps(script), due_at, len(produced))

    def _steps(self, script: Script) -> Sequence[Sequence[int]]:
        if script.tokens is None:
            return script.steps
        return [[self._load_ids[i % len(self._load_ids)]] for i in range(script.tokens)]

    def abort(self, rid: str) -> None:
        self._replays.pop(rid, None)

    def has_work(self) -> bool:
        return bool(self._replays)

    def free_slots(self) -> int:
        return self._max_running - len(self._replays)

    def running(self) -> Sequence[str]:
        return list(self._replays)

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        raise InvalidRequest("a scripted worker has no weights", param="model_path")

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        raise InvalidRequest("a scripted worker takes no adapter", param="lora_path")

    def drop_lora(self, name: str) -> None:
        raise NotFound("a scripted worker takes no adapter", param="lora_name")

    def loras(self) -> Mapping[str, str]:
        return {}

    def stats(self) -> Mapping[str, float]:
        return {}

    def start_profile(self, steps: int) -> str:
        raise InvalidRequest("a scripted worker computes nothing to trace")

    def stop_profile(self) -> str:
        raise InvalidRequest("a scripted worker computes nothing to trace")

    def retract(self) -> None:
        """A replay has no K/V; it goes on where it stands."""

    def flush_cache(self) -> int:
        return 0  # it keeps none

    def check_integrity(self) -> None:
        assert not self._replays, f"{len(self._replays)} replays are held while the worker rests"

    def close(self) -> None:
        self._replays.clear()

    def step(self) -> list[StepOutput]:
        """Emit every step that is due; when none is, wait for the next one, 20 ms at most."""
        now = time.monotonic()
        soonest = min(replay.due_at for replay in self._replays.values())
        if soonest > now:
            time.sleep(min(soonest - now, 0.02))
            now = time.monotonic()
        outputs = [self._emit(r, now) for r in list(self._replays.values()) if r.due_at <= now]
        for output in outputs:
            if output.finish:
                del self._replays[output.rid]
        return outputs

    def _emit(self, replay: Replay, now: float) -> StepOutput:
        job, script = replay.job, replay.script
        limit = job.sampling.max_new_tokens
        ids = list(self._due_ids(replay, now))
        if limit is not None:
            ids = ids[: max(0, limit - replay.position)]
        if script.die_at is not None and replay.position <= script.die_at <= replay.position + len(ids):
            os.kill(os.getpid(), signal.SIGKILL)
        start, replay.position = replay.position, replay.position + len(ids)
        output = StepOutput(
            job.rid,
            tuple(ids),
            self._logprobs(job, script, start, ids),
            self._finish(replay, limit),
            0 if replay.first else None,
        )
        replay.first = False
        return output

    def _due_ids(self, replay: Replay, now: float) -> Iterator[int]:
        """The rest of the step in which the position stands; with a rate, all the steps that are due by now."""
        script, rate = replay.script, replay.script.tokens_per_s
        pause = 1 / rate if rate else script.step_ms / 1000
        for step, end in zip(replay.steps, accumulate(map(len, replay.steps)), strict=True):
            if end <= replay.position:
                continue
            yield from step[len(step) - (end - replay.position) :] if end - replay.position < len(step) else step
            replay.due_at += pause
            if not rate or replay.due_at > now:
                return

    @staticmethod
    def _logprobs(job: GenerateJob, script: Script, start: int, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        if not job.return_logprob:
            return None
        given: list[Any] = list(script.logprobs or [])[start : start + len(ids)]
        given += [(0.0, [])] * (len(ids) - len(given))
        return tuple(TokenLogprob(lp, tuple((i, p) for i, p in top[: job.top_logprobs_num])) for lp, top in given)

    @staticmethod
    def _finish(replay: Replay, limit: int | None) -> Finish | None:
        if limit is not None and replay.position >= limit:
            return Finish("length")
        if replay.position < sum(map(len, replay.steps)):
            return None
        if replay.script.fail is not None:
            return Finish("error", message=replay.script.fail)
        return Finish("length" if replay.script.tokens is not None else replay.script.finish)

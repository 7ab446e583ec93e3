"""The engine of embedding models and classifiers: many texts a step, each answered by one vector."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...shared.chunks import Finish
from ...shared.codec import encode_vector
from ...shared.errors import ContextLengthExceeded, EngineError, InvalidRequest, NotFound
from ...shared.messages import LANES, GenerateJob
from ..card import load_card, resolve_model
from ..interface import Beside, StepOutput
from ..meter import Meter
from ..settings import WorkerSettings
from .encoder_model import load_encoder
from .loader import resolve_device, resolve_dtype
from .profiler import Profiler

log = logging.getLogger(__name__)

_FAILED = Finish("error", message="the model failed on this request", status=500)
_STEP_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)
_WASTE = 1.25  # how much longer than the step's first text another one may be, or shorter: padding is computed too


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits for its step."""

    job: GenerateJob
    arrival: int

    @property
    def order(self) -> tuple[int, int]:
        """By lane, then by age."""
        return LANES.index(self.job.lane), self.arrival

    @property
    def length(self) -> int:
        return len(self.job.input_ids)


class EncoderEngine:
    """Batches texts of similar length. Answers to `worker.interface.Engine`.

    Raises:
        ModelRefused, ConfigError: with the key and the value, and what to do.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        card, _ = load_card(settings)
        device = resolve_device(settings)
        # Encoders are small, and half precision shows in the third digit of a similarity: on a CPU only when asked for.
        exact = settings.dtype == "auto" and device.type == "cpu"
        dtype = torch.float32 if exact else resolve_dtype(settings, device)
        self._model = load_encoder(resolve_model(settings)[1], settings, card.task, dtype=dtype, device=device)
        labels = card.labels if len(card.labels) == self._model.width else ()
        self.card = dataclasses.replace(
            card,
            dtype=str(dtype).removeprefix("torch."),
            dimensions=self._model.width if card.task == "embed" else 0,
            labels=() if card.task == "embed" else labels,
        )
        self._max_texts = settings.max_running or (32 if device.type == "cpu" else 256)
        self._max_tokens = settings.max_batch_tokens or (2048 if device.type == "cpu" else 32768)
        self._alone = settings.deterministic
        self._waiting: dict[str, Waiting] = {}
        self._arrivals = 0
        self._meter = Meter("forward")
        self._steps = self._tokens = 0  # since the start
        self._profiler = Profiler(settings.profile_dir, card.name)

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        if job.rid in self._waiting:
            raise EngineError(f"request {job.rid} is running already")
        self._check(job)
        self._arrivals += 1
        self._waiting[job.rid] = Waiting(job, self._arrivals)

    def abort(self, rid: str) -> None:
        self._waiting.pop(rid, None)

    def step(self) -> list[StepOutput]:
        texts = self._choose()
        for text in texts:
            del self._waiting[text.job.rid]
        self._steps += bool(texts)
        self._tokens += sum(text.length for text in texts)
        outputs = self._meter.timed("forward", self._encode, texts)
        self._profiler.step()
        return outputs

    def has_work(self) -> bool:
        return bool(self._waiting)

    def free_slots(self) -> int:
        # Two steps' worth: the next one is there when a step ends, and the rest is left to other workers.
        return max(2 * self._max_texts - len(self._waiting), 0)

    def running(self) -> Sequence[str]:
        return list(self._waiting)

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        raise InvalidRequest(f"'{self.card.name}' is no generator: its weights are not updated while it serves")

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        raise InvalidRequest(f"'{self.card.name}' is no generator: it takes no adapters", param="lora_path")

    def drop_lora(self, name: str) -> None:
        raise NotFound(f"'{self.card.name}' is no generator: it takes no adapters", param="lora_name")

    def loras(self) -> Mapping[str, str]:
        return {}

    def stats(self) -> Mapping[str, float]:
        return {
            "steps": self._steps,
            "prefill_tokens": self._tokens,
            "sequences_waiting": len(self._waiting),
            "forward_seconds": self._meter.seconds["forward"],
        }

    def start_profile(self, steps: int) -> str:
        return self._profiler.start(steps)

    def stop_profile(self) -> str:
        return self._profiler.stop()

    def retract(self) -> None:
        """A text has no K/V between steps."""

    def flush_cache(self) -> int:
        return 0  # it keeps none

    def check_integrity(self) -> None:
        assert not self._waiting, f"{len(self._waiting)} texts wait while the worker rests"

    def close(self) -> None:
        self._waiting.clear()
        del self._model

    def _check(self, job: GenerateJob) -> None:
        """Raises InvalidRequest where the job cannot run here."""
        if job.task != self.card.task:
            raise InvalidRequest(f"'{self.card.name}' is served to {self.card.task}, not to {job.task}", param="model")
        if not job.input_ids:
            raise InvalidRequest("the text is empty", param="text")
        if len(job.input_ids) > self.card.context_length:
            message = f"the text has {len(job.input_ids)} tokens; this model reads {self.card.context_length}"
            raise ContextLengthExceeded(message, param="text")
        low, high = min(job.input_ids), max(job.input_ids)
        if low < 0 or high >= self.card.vocab_size:
            wrong = low if low < 0 else high
            message = f"token id {wrong} is not in the vocabulary of {self.card.vocab_size}"
            raise InvalidRequest(message, param="input_ids")

    def _choose(self) -> list[Waiting]:
        """The first text by lane and age, and those of about its length that fit beside it."""
        ordered = sorted(self._waiting.values(), key=lambda text: text.order)
        first = ordered[0].length
        chosen: list[Waiting] = []
        longest = 0
        for text in ordered[:1] if self._alone else ordered:
            if not first / _WASTE <= text.length <= first * _WASTE:
                continue
            padded = max(longest, text.length) * (len(chosen) + 1)
            if chosen and (padded > self._max_tokens or len(chosen) == self._max_texts):
                break
            chosen.append(text)
            longest = max(longest, text.length)
        return chosen

    def _encode(self, texts: Sequence[Waiting]) -> list[StepOutput]:
        """Compute texts. Where that fails they are tried again in halves, so that only the guilty ones pay."""
        if not texts:
            return []
        try:
            rows = self._model.run([text.job.input_ids for text in texts])
        except _STEP_ERRORS:
            if len(texts) == 1:
                log.exception("request %s failed", texts[0].job.rid)
                return [StepOutput(texts[0].job.rid, finish=_FAILED)]
            log.warning("a step of %d texts failed; trying halves", len(texts), exc_info=True)
            middle = len(texts) // 2
            return self._encode(texts[:middle]) + self._encode(texts[middle:])
        return [StepOutput(text.job.rid, finish=_finish(row)) for text, row in zip(texts, rows, strict=True)]


def _finish(row: torch.Tensor) -> Finish:
    if not bool(row.isfinite().all()):
        return _FAILED
    return Finish("stop", data=encode_vector(row.numpy()))

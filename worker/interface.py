"""What the worker's loop asks of an engine. The transformers engine and the scripted one both answer to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..shared.chunks import Finish, PromptLogprobs, TokenLogprob
from ..shared.messages import GenerateJob
from ..shared.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step made for one sequence; empty `token_ids` and no `finish` mean a prefill chunk went by."""

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    cached_tokens: int | None = None  # with the first output of a sequence
    prompt: PromptLogprobs | None = None  # likewise, where the job asks for them


class Beside(Protocol):
    """What work on another thread asks of the loop that it runs beside."""

    def rest(self) -> None:
        """Return once no step runs; none will before the work is over. Raises EngineError where it was given up."""
        ...

    def check(self) -> None:
        """Raises EngineError where the work was given up: nobody waits for it any more."""
        ...


class Engine(Protocol):
    """Generates for many sequences at once, a step at a time, on the caller's thread.

    `add`, `abort` and `step` are called by one thread. A sequence that has sent a `finish` is forgotten.
    """

    card: ModelCard

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        """Take a job. `produced` are output ids published before, by a worker that is gone: they are prefilled as
        output (penalties, max_new_tokens and sampling position go on from them).

        Raises:
            InvalidRequest: the job can never run here (its context does not fit, an option is unknown).
        """
        ...

    def abort(self, rid: str) -> None:
        """Forget a sequence at once; unknown ids are ignored."""
        ...

    def step(self) -> list[StepOutput]:
        """Run one step and say what it made. One that failed for a sequence answers with `Finish("error")`."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def free_slots(self) -> int:
        """How many more sequences `add` takes now without making others wait long."""
        ...

    def running(self) -> Sequence[str]:
        """The rids held, in any order."""
        ...

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        """Read other weights and check them. Called on another thread, also while a step runs.

        Returns:
            What puts them in the place of the old ones, under the version it is given; called between two steps. It
            raises EngineError, and the old ones serve on, where the files have changed since.

        Raises:
            InvalidRequest: they are not those of this model, or cannot be read; nothing has changed.
            Conflict: others are still being read.
        """
        ...

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        """Read an adapter and check it. Called on another thread, also while a step runs.

        Returns:
            What serves it under `name` from then on, and says its content id; called between two steps.

        Raises:
            InvalidRequest: it is not this model's, or cannot be read.
            Conflict: no more may be loaded.
            Unavailable: memory does not suffice for it.
        """
        ...

    def drop_lora(self, name: str) -> None:
        """Serve an adapter no more; what runs with it goes on. Raises NotFound."""
        ...

    def loras(self) -> Mapping[str, str]:
        """The content id of each loaded adapter by name: `add` runs a job with the one that its `model` names."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Sums since the start, and how full it is now, as `/metrics` shows them; cheap."""
        ...

    def start_profile(self, steps: int) -> str:
        """Trace the next steps into a file. Returns its path.

        Raises:
            InvalidRequest, Conflict: there is no folder for it; another trace is being made.
        """
        ...

    def stop_profile(self) -> str:
        """End the trace that is being made, now. Returns its path. Raises Conflict where there is none."""
        ...

    def retract(self) -> None:
        """Take the K/V of every sequence away; each computes it again when it goes on, and keeps its tokens."""
        ...

    def flush_cache(self) -> int:
        """Forget the K/V that is kept for prompts to come. Returns how many tokens it was."""
        ...

    def check_integrity(self) -> None:
        """Assert that no block or slot is lost. Called when idle."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...

"""Changes of a pool's workers, as the control routes ask for them: all obey, or the caller reads who did not."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from ..shared.control import Answers, Kind
from ..shared.errors import ModelNotFound, RequestError
from ..shared.model_card import ModelCard
from ..shared.registry import ProcessInfo
from .backend import Backend
from .protocol.control import ControlBody


class WorkerRefused(RequestError):
    """A worker cannot do what it was told: its own status, and its own words."""

    default_code = "worker_refused"

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.type = "invalid_request_error" if status < 500 else "server_error"


class NoAnswer(RequestError):
    """504: a worker did not answer in time, or ended. The others have obeyed."""

    status = 504
    type = "server_error"
    default_code = "worker_timeout"


class PoolControl:
    """Tells the workers of a model.

    Args:
        wait_s: how long a worker may take for what it does between two steps.
        load_wait_s: how long it may take to read files.
    """

    def __init__(self, backend: Backend, *, wait_s: float, load_wait_s: float) -> None:
        self._backend = backend
        self._wait_s = wait_s
        self._load_wait_s = load_wait_s

    async def card(self, model: str | None) -> ModelCard:
        """The card of the base model that `model` names, or of the only one.

        Raises:
            ModelNotFound: there is none, or there are several.
        """
        cards = await self._backend.models.all()
        pool = (await self._backend.models.get(model)).pool if model is not None else None
        bases = [card for card in cards.values() if not card.lora and (pool is None or card.pool == pool)]
        if len({card.pool for card in bases}) != 1:
            raise ModelNotFound(f"Name a model: {len(bases)} are registered.", param="model")
        return min(bases, key=lambda card: card.created)

    async def tell(self, model: str | None, kind: Kind, args: Mapping[str, Any]) -> ControlBody:
        """Have every worker of the model's pool do one thing.

        Raises:
            Unavailable: it has none.
            WorkerRefused, NoAnswer: naming the workers; the others have obeyed.
        """
        card = await self.card(model)
        answers = await self._backend.control.broadcast(card.pool, kind, args, self._wait_s)
        check(answers, self._wait_s)
        return body(answers)

    async def unload_lora(self, name: str) -> ControlBody:
        """Have every worker of an adapter's pool forget it, and take its name off the list of models.

        Raises:
            ModelNotFound: no adapter has that name.
            Unavailable, WorkerRefused, NoAnswer.
        """
        card = (await self._backend.models.all()).get(name)
        if card is None or not card.lora:
            raise ModelNotFound(f"There is no adapter '{name}'.", param="lora_name")
        answers = await self._backend.control.broadcast(card.pool, "unload_lora", {"name": name}, self._wait_s)
        self._backend.models.expire()
        check(answers, self._wait_s)
        return body(answers)

    async def change(self, card: ModelCard, read: Kind, what: Mapping[str, Any], how: Mapping[str, Any]) -> ControlBody:
        """Have every worker of a pool read something; when all have it, have them all use it.

        Args:
            read: the command that reads `what`.
            how: it is put to use.

        Raises:
            Conflict: another change of this pool is under way.
            Unavailable: the pool has no worker.
            WorkerRefused, NoAnswer: naming the workers. Nothing has changed, unless the error says that some obeyed.
        """
        control, pool, token = self._backend.control, card.pool, uuid.uuid4().hex
        async with control.exclusive(pool, self._load_wait_s + 3 * self._wait_s):
            args = {"token": token, "limit_s": self._load_wait_s, **what}
            use = {**args, "read": read, **how}  # with all that a worker needs which came while the others read
            have_read = await control.broadcast(pool, read, args, self._load_wait_s + self._wait_s)
            try:
                check(have_read, self._load_wait_s, changed=False)
            except RequestError:
                await control.broadcast(pool, "discard", {"token": token}, self._wait_s)
                raise
            answers = await control.broadcast(pool, "commit", use, self._wait_s)
            self._backend.models.expire()
            check(answers, self._wait_s)
            return body(answers)


def check(answers: Answers, wait_s: float, *, changed: bool = True) -> None:
    """Raises WorkerRefused or NoAnswer where a worker did not obey.

    Args:
        changed: whether those that obeyed have changed something.
    """
    by_id = {worker.id: worker for worker in answers.workers}
    refused = [outcome for outcome in answers.outcomes.values() if not outcome.ok]
    if refused:
        # One folder on one disk is wrong for all workers in the same words.
        words = {outcome.message: _name(by_id[outcome.process]) for outcome in refused}
        all_alike = len(words) == 1 and len(refused) == len(answers.workers)
        message = refused[0].message if all_alike else "; ".join(f"{who}: {what}" for what, who in words.items())
        raise WorkerRefused(_sentence(message), max(outcome.status for outcome in refused), refused[0].param)
    parts = []
    if answers.silent:
        later = ", which obeys when it comes to it" if changed else ""
        parts.append(f"No answer within {wait_s:g} s from {_names(answers.silent)}{later}.")
    if answers.gone:
        parts.append(f"Ended before an answer: {_names(answers.gone)}.")
    if parts:
        obeyed = f"{len(answers.outcomes)} of {len(answers.workers)} workers obeyed." if changed else "Nothing changed."
        raise NoAnswer(" ".join([*parts, obeyed]))


def body(answers: Answers) -> ControlBody:
    """What the workers did, for the client."""
    by_id = {worker.id: worker for worker in answers.workers}
    return {
        "success": True,
        "workers": [
            {"id": worker.id, "host": worker.host, "pid": worker.pid, "detail": dict(outcome.detail)}
            for outcome in answers.outcomes.values()
            if (worker := by_id.get(outcome.process)) is not None
        ],
    }


def _name(process: ProcessInfo) -> str:
    return f"worker {process.host}:{process.pid}"


def _names(processes: Iterable[ProcessInfo]) -> str:
    return ", ".join(map(_name, processes))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")

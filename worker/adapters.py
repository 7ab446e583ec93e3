"""The adapters of a pool, as one worker serves them: under cards of their own, which every api reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ..shared.errors import ConfigError, Conflict, NotFound, RequestError
from ..shared.messages import GenerateJob
from ..shared.model_card import ModelCard
from .interface import Engine

log = logging.getLogger(__name__)


class Models(Protocol):
    """`shared.registry.ServedModels`."""

    def say(self, **extra: Any) -> None: ...

    def serve(self, card: ModelCard) -> None: ...

    def retire(self, name: str) -> None: ...

    def card(self, name: str) -> ModelCard | None: ...

    def adapters(self, pool: str) -> list[ModelCard]: ...


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read. `use` lets the engine serve it and says its content id; `publish` tells the others of
    it, by that id. Both are called between two steps."""

    use: Callable[[], str]
    publish: Callable[[str], None]

    def serve(self) -> None:
        self.publish(self.use())


class PoolAdapters:
    """Puts adapters into the engine and their cards into the registry."""

    def __init__(self, engine: Engine, models: Models) -> None:
        self._engine = engine
        self._models = models

    def load(self, wanted: Mapping[str, str]) -> None:
        """Serve the adapters of the settings (name → folder), and those of the pool as far as they are to be had here.

        Raises:
            ConfigError: one of the settings cannot be loaded.
        """
        for name, folder in wanted.items():
            try:
                self.read(name, folder).serve()
            except RequestError as e:
                raise ConfigError(f"--lora {name}={folder} (HEADRACE_LORA): {e.message}") from e
        for card in self._models.adapters(self._engine.card.pool):
            try:
                if card.name not in self._engine.loras():
                    self.read(card.name, card.lora).serve()
            except RequestError as e:
                log.warning("adapter %s: %s; it is tried again when a request asks for it", card.name, e.message)

    def admit(self, job: GenerateJob) -> None:
        """See that the engine has the adapter that a job names, if it names one.

        Raises:
            RequestError: it is gone, or cannot be loaded here.
        """
        base = self._engine.card
        if job.model == base.name or job.model in self._engine.loras():
            return
        card = self._models.card(job.model)
        if card is None or card.pool != base.pool:
            raise NotFound(f"The model '{job.model}' was removed while the request waited.", param="model")
        if card.lora:
            self.read(card.name, card.lora).serve()

    def read(self, name: str, folder: str) -> ReadAdapter:
        """Read an adapter and check it; called on any thread.

        Raises:
            InvalidRequest, Conflict: it cannot be served.
        """
        registered = self._models.card(name)
        if name == self._engine.card.name or (registered is not None and not registered.lora):
            raise Conflict(f"'{name}' is the name of a model that is no adapter", param="lora_name")
        if registered is not None and registered.pool != self._engine.card.pool:
            raise Conflict(f"'{name}' is the name of an adapter of '{registered.pool}'", param="lora_name")
        return ReadAdapter(self._engine.read_lora(name, folder), partial(self._publish, name, folder))

    def drop(self, name: str) -> None:
        """Compute with an adapter no more. What runs with it goes on; what waits for it will be refused."""
        if name in self._engine.loras():  # else it could not be loaded here
            self._engine.drop_lora(name)

    def retire(self, name: str) -> None:
        """Take the card of an adapter that was dropped off the list."""
        self._models.retire(name)
        self._models.say(loras=sorted(self._engine.loras()))

    def _publish(self, name: str, folder: str, version: str) -> None:
        card = replace(self._engine.card, name=name, lora=folder, weight_version=version, created=int(time.time()))
        self._models.serve(card)
        self._models.say(loras=sorted(self._engine.loras()))
        log.info("serving adapter %s (%s) from %s", name, version, folder)

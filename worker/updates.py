"""Weights and adapters read from disk while a worker serves: on a thread, then put to use between two steps.

    read_weights, read_lora ─► Reading ─► Staged ─► commit: used; discard: dropped

Once every worker of the pool has staged it, all `commit` to it. A worker that came in between reads it when it is told
to commit, or would go on alone with what was before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..shared.control import Command, Inbox, PauseMode
from ..shared.errors import ConfigError, EngineError, InvalidRequest, RequestError
from .adapters import Models, PoolAdapters, ReadAdapter
from .interface import Beside, Engine
from .reading import AtStart, Reading

log = logging.getLogger(__name__)

# What went wrong here and not with the command: said, logged, and survived.
OURS = (EngineError, OSError, RuntimeError)

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Staged:
    """What was read and is not yet used: `use` puts it to use, as the command `commit` says."""

    token: str
    use: Callable[[Args], Args]


class Updates:
    """What one worker reads, one thing at a time.

    Args:
        interrupt: does with the sequences that run as a mode says, for a reason.
        afterwards: takes what is written to Redis once the engine has changed.
    """

    def __init__(
        self,
        engine: Engine,
        models: Models,
        adapters: PoolAdapters,
        inbox: Inbox,
        *,
        interrupt: Callable[[PauseMode, str], None],
        afterwards: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine = engine
        self._models = models
        self._adapters = adapters
        self._inbox = inbox
        self._interrupt = interrupt
        self._afterwards = afterwards
        self._reading: tuple[Command, Reading[Staged]] | None = None
        self._staged: Staged | None = None
        self._readers: Mapping[str, Callable[[Args, Beside], Staged]] = {
            "read_weights": self._read_weights,
            "read_lora": self._read_lora,
        }

    @property
    def busy(self) -> bool:
        """Whether something is being read."""
        return self._reading is not None

    @property
    def standing_still(self) -> bool:
        """Whether no step may run: what is read asks for it, or the others serve weights that are only being read
        here."""
        if self._reading is None:
            return False
        command, reading = self._reading
        return reading.wants_rest or (command.kind == "commit" and _reads(command) == "read_weights")

    def join(self, folder: str, version: str) -> None:
        """Serve the weights that the others do, before anything runs.

        Raises:
            ConfigError: they are not to be had here.
        """
        log.info("the pool serves version %r of the weights, from %s", version, folder)
        try:
            self._engine.read_weights(folder, AtStart())(version)
        except InvalidRequest as e:
            raise self._left_behind(folder, version, e) from e

    def begin(self, command: Command) -> bool:
        """Begin to read what a command needs; False where it needs nothing."""
        args = command.args
        late = command.kind == "commit" and (self._staged is None or self._staged.token != args["token"])
        if command.kind not in self._readers and not late:
            return False
        self._reading = command, Reading(partial(self._readers[_reads(command)], args), args["limit_s"])
        return True

    def ended(self) -> tuple[Command, Callable[[], Args]] | None:
        """The command whose reading is over, and what then is to be done: called between two steps."""
        if self._reading is None:
            return None
        command, reading = self._reading
        if reading.wants_rest:
            reading.grant_rest()  # no step runs now, and none will while we stand still
        if not reading.done():
            return None
        self._reading = None
        return command, partial(self._stage, command, reading)

    def commit(self, args: Args) -> Args:
        staged, self._staged = self._staged, None
        assert staged is not None, "what is committed to is staged, now if it was not before"
        return staged.use(args)

    def discard(self, args: Args) -> Args:
        if self._staged is not None and self._staged.token == args["token"]:
            self._staged = None
        return {}

    def unload_lora(self, args: Args) -> Args:
        self._adapters.drop(args["name"])
        self._afterwards(partial(self._adapters.retire, args["name"]))
        return {}

    def _stage(self, command: Command, reading: Reading[Staged]) -> Args:
        self._staged = self._result(command, reading)
        return self.commit(command.args) if command.kind == "commit" else {}

    def _result(self, command: Command, reading: Reading[Staged]) -> Staged:
        """What was read. Raises ConfigError where the others serve it by now, and it is not to be had here."""
        try:
            return reading.result()
        except (RequestError, *OURS) as e:
            if command.kind == "commit" and _reads(command) == "read_weights":
                raise self._left_behind(command.args["folder"], command.args["version"], e) from e
            raise

    def _left_behind(self, folder: str, version: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"the workers of {self._engine.card.pool} were told to serve {folder} as version {version!r}, and this one "
            f"cannot: {error}. Put the folder there, or update again"
        )

    def _read_weights(self, args: Args, beside: Beside) -> Staged:
        use = self._engine.read_weights(args["folder"], beside)
        return Staged(args["token"], lambda how: self._use_weights(use, args["folder"], how))

    def _use_weights(self, use: Callable[[str], None], folder: str, how: Args) -> Args:
        version, running = how["version"], len(self._engine.running())
        self._interrupt(how["mode"], "The model's weights were updated.")
        use(version)
        self._engine.flush_cache()
        self._afterwards(partial(self._models.serve, self._engine.card))
        self._afterwards(partial(self._models.say, weight_version=version))
        self._afterwards(partial(self._inbox.note, weights=folder, weight_version=version))
        log.info("serving version %r of the weights, from %s", version, folder)
        return {"weight_version": version, "running": running}

    def _read_lora(self, args: Args, _: Beside) -> Staged:
        name = args["name"]
        read = self._adapters.read(name, args["folder"])
        return Staged(args["token"], lambda _: self._use_lora(name, read))

    def _use_lora(self, name: str, read: ReadAdapter) -> Args:
        version = read.use()
        self._afterwards(partial(read.publish, version))
        return {"lora": name, "weight_version": version}


def _reads(command: Command) -> str:
    """The kind of reading that a command is, or that it puts to use."""
    return str(command.args["read"]) if command.kind == "commit" else command.kind

"""What a worker does when it is told to, between two steps: the commands of `shared.control`.

A command that cannot be obeyed is answered with the reason, changes nothing, and the loop goes on. What has to be
read from disk is read first, on a thread (`read_*`); once every worker of the pool has it, all `commit` to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..shared.control import Command, Inbox, Outcome, PauseMode
from ..shared.errors import ConfigError, EngineError, InvalidRequest, RequestError
from ..shared.messages import Finish
from .adapters import Models, PoolAdapters
from .interface import Beside, Engine, StepOutput
from .reading import AtStart, Reading

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often a worker looks for commands that it was not told of by `look`
READING_POLL_MS = 10

# What went wrong here and not with the command: said, logged, and survived.
_OURS = (EngineError, OSError, RuntimeError)

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Staged:
    """What was read and is not yet used: `use` puts it to use, as the command `commit` says."""

    token: str
    use: Callable[[Args], Args]


class Controller:
    """Obeys the commands of one pool, in order. But for reading files, everything runs on the loop's thread."""

    def __init__(self, engine: Engine, inbox: Inbox, process: str, models: Models, adapters: PoolAdapters) -> None:
        self._engine = engine
        self._inbox = inbox
        self._process = process
        self._models = models
        self._adapters = adapters
        self._next_look = float("-inf")
        self._commands: deque[Command] = deque()
        self._reading: tuple[Command, Reading[Staged]] | None = None
        self._staged: Staged | None = None
        self._unsent: list[tuple[Command, Outcome]] = []  # outcomes that an outage kept from the api
        self._ended: list[StepOutput] = []
        self._paused: PauseMode | None = None
        self._handlers: Mapping[str, Callable[[Args], Args]] = {
            "flush_cache": self._flush_cache,
            "pause": self._pause,
            "continue": self._continue,
            "commit": self._commit,
            "discard": self._discard,
            "unload_lora": self._unload_lora,
            "start_profile": lambda args: {"trace": engine.start_profile(args["steps"]), "steps": args["steps"]},
            "stop_profile": lambda _: {"trace": engine.stop_profile()},
        }
        self._readers: Mapping[str, Callable[[Args, Beside], Staged]] = {
            "read_weights": self._read_weights,
            "read_lora": self._read_lora,
        }

    @property
    def standing_still(self) -> bool:
        """Whether no step may run: the pool is paused, what is read asks for it, or the others serve weights that are
        only being read here."""
        if self._reading is None:
            return self._paused is not None
        command, reading = self._reading
        late = command.kind == "commit" and _reads(command) == "read_weights"
        return self._paused is not None or late or reading.wants_rest

    def join(self) -> None:
        """Do as the pool was told before this worker came.

        Raises:
            ConfigError: the weights that the others serve are not to be had here.
        """
        state = self._inbox.state()
        self._paused = state.paused
        if state.weights is not None:
            log.info("the pool serves version %r of the weights, from %s", state.weight_version, state.weights)
            try:
                self._engine.read_weights(state.weights, AtStart())(state.weight_version)
            except InvalidRequest as e:
                raise self._left_behind(state.weights, state.weight_version, e) from e
        self._models.say(paused=state.paused is not None, weight_version=self._engine.card.weight_version)

    def obey(self) -> list[StepOutput]:
        """Obey what has come. Returns the ends of the sequences that it cost.

        Raises:
            ConfigError: as `join`.
        """
        self._finish_reading()
        if self._due():
            self._commands.extend(self._inbox.read())
            self._inbox.keep_state()
        while self._commands and self._reading is None:
            self._begin(self._commands.popleft())
        while self._unsent:
            self._inbox.reply(*self._unsent[0])
            self._unsent.pop(0)
        ended, self._ended = self._ended, []
        return ended

    def leave(self) -> None:
        """This worker has left the list."""
        self._inbox.leave()

    def wait_ms(self, longest: int) -> int:
        """How long the loop may wait for `watched` before it must call `obey` again."""
        return READING_POLL_MS if self._reading is not None else longest

    def watched(self) -> dict[str, bytes]:
        """The stream that an idle worker waits on, and from where."""
        return {self._inbox.stream: self._inbox.position}

    def look(self) -> None:
        """Something has come: the next `obey` reads it."""
        self._next_look = float("-inf")

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + POLL_S
        return True

    def _begin(self, command: Command) -> None:
        args = command.args
        # We may have come while the others read what they now put to use: then we read it now, or would go on alone
        # with what was before.
        late = command.kind == "commit" and (self._staged is None or self._staged.token != args["token"])
        if command.kind in self._readers or late:
            read = self._readers[_reads(command)]
            self._reading = command, Reading(partial(read, args), args["limit_s"])
        else:
            self._answer(command, lambda: self._handler(command)(command.args))

    def _handler(self, command: Command) -> Callable[[Args], Args]:
        if command.kind not in self._handlers:
            raise InvalidRequest(f"this worker's release does not know the command '{command.kind}'")
        return self._handlers[command.kind]

    def _finish_reading(self) -> None:
        if self._reading is not None and self._reading[1].wants_rest:
            self._reading[1].grant_rest()  # we are between two steps, and stand still from now on
        if self._reading is not None and self._reading[1].done():
            (command, reading), self._reading = self._reading, None

            def stage() -> Args:
                self._staged = self._result(command, reading)
                return self._commit(command.args) if command.kind == "commit" else {}

            self._answer(command, stage)

    def _result(self, command: Command, reading: Reading[Staged]) -> Staged:
        """What was read. Raises ConfigError where the others serve it by now, and it is not to be had here."""
        try:
            return reading.result()
        except (RequestError, *_OURS) as e:
            if command.kind == "commit" and _reads(command) == "read_weights":
                raise self._left_behind(command.args["folder"], command.args["version"], e) from e
            raise

    def _left_behind(self, folder: str, version: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"the workers of {self._engine.card.pool} were told to serve {folder} as version {version!r}, and this one "
            f"cannot: {error}. Put the folder there, or update again"
        )

    def _answer(self, command: Command, act: Callable[[], Args]) -> None:
        """Do it, and keep what became of it for the api."""
        me = self._process
        try:
            outcome = Outcome(me, detail=act())
        except RequestError as e:
            log.warning("%s refused: %s", command.kind, e.message)
            outcome = Outcome(me, e.status, e.message, e.param)
        except _OURS:
            log.exception("%s failed", command.kind)
            outcome = Outcome(me, 500, f"{command.kind} failed in the worker; its log says why")
        self._unsent.append((command, outcome))

    def _read_weights(self, args: Args, beside: Beside) -> Staged:
        use = self._engine.read_weights(args["folder"], beside)
        return Staged(args["token"], lambda how: self._use_weights(use, args["folder"], how))

    def _use_weights(self, use: Callable[[str], None], folder: str, how: Args) -> Args:
        running = len(self._engine.running())
        self._interrupt(how["mode"], "The model's weights were updated.")
        use(how["version"])
        self._engine.flush_cache()
        self._models.serve(self._engine.card)
        self._models.say(weight_version=how["version"])
        self._inbox.note(weights=folder, weight_version=how["version"])
        log.info("serving version %r of the weights, from %s", how["version"], folder)
        return {"weight_version": how["version"], "running": running}

    def _read_lora(self, args: Args, _: Beside) -> Staged:
        name = args["name"]
        serve = self._adapters.read(name, args["folder"])
        return Staged(args["token"], lambda _: {"lora": name, "weight_version": serve()})

    def _unload_lora(self, args: Args) -> Args:
        self._adapters.unload(args["name"])
        return {}

    def _commit(self, args: Args) -> Args:
        staged, self._staged = self._staged, None
        assert staged is not None, "what is committed to is staged, now if it was not before"
        return staged.use(args)

    def _discard(self, args: Args) -> Args:
        if self._staged is not None and self._staged.token == args["token"]:
            self._staged = None
        return {}

    def _flush_cache(self, _: Args) -> Args:
        return {"flushed_tokens": self._engine.flush_cache()}

    def _pause(self, args: Args) -> Args:
        running = len(self._engine.running())
        self._interrupt(args["mode"], "Generation was paused.")
        self._set_paused(args["mode"])
        self._inbox.note(paused=args["mode"])
        return {"running": running}

    def _continue(self, _: Args) -> Args:
        self._set_paused(None)
        self._inbox.note(paused="")
        return {"running": len(self._engine.running())}

    def _set_paused(self, mode: PauseMode | None) -> None:
        self._paused = mode
        self._models.say(paused=mode is not None)

    def _interrupt(self, mode: PauseMode, reason: str) -> None:
        """What becomes of the sequences that run: ended, made to compute their K/V again, or left as they are."""
        if mode == "retract":
            self._engine.retract()
        if mode == "abort":
            for rid in list(self._engine.running()):
                self._engine.abort(rid)
                self._ended.append(StepOutput(rid, finish=Finish("abort", message=reason)))


def _reads(command: Command) -> str:
    """The kind of reading that a command is, or that it puts to use."""
    return str(command.args["read"]) if command.kind == "commit" else command.kind

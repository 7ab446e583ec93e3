"""What a worker does when it is told to, between two steps: the commands of `shared.control`.

A command that cannot be obeyed is answered with the reason, changes nothing, and the loop goes on. What was done is
written to Redis afterwards, and answered after that; where Redis does not answer, both wait until it does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from ..shared.chunks import Finish
from ..shared.control import Command, Inbox, Outcome, PauseMode
from ..shared.errors import InvalidRequest, RequestError
from ..shared.failpoints import failpoint
from .adapters import Models, PoolAdapters
from .interface import Engine, StepOutput
from .updates import OURS, Args, Updates

log = logging.getLogger(__name__)

POLL_S = 0.05  # how often a busy worker looks for commands; an idle one is woken by them
READING_POLL_MS = 10


class Controller:
    """Obeys the commands of one pool, in order. But for reading files, everything runs on the loop's thread."""

    def __init__(self, engine: Engine, inbox: Inbox, process: str, models: Models, adapters: PoolAdapters) -> None:
        self._engine = engine
        self._inbox = inbox
        self._process = process
        self._models = models
        self._next_look = float("-inf")
        self._commands: deque[Command] = deque()
        # What an outage may keep from Redis: what the others must know of what was done, and then the answers.
        self._unwritten: deque[Callable[[], None]] = deque()
        self._ended: list[StepOutput] = []
        self._paused: PauseMode | None = None
        self._updates = Updates(
            engine, models, adapters, inbox, interrupt=self._interrupt, afterwards=self._unwritten.append
        )
        self._handlers: Mapping[str, Callable[[Args], Args]] = {
            "flush_cache": self._flush_cache,
            "pause": self._pause,
            "continue": self._continue,
            "commit": self._updates.commit,
            "discard": self._updates.discard,
            "unload_lora": self._updates.unload_lora,
            "start_profile": lambda args: {"trace": engine.start_profile(args["steps"]), "steps": args["steps"]},
            "stop_profile": lambda _: {"trace": engine.stop_profile()},
        }

    @property
    def standing_still(self) -> bool:
        """Whether no step may run."""
        return self._paused is not None or self._updates.standing_still

    def join(self) -> None:
        """Do as the pool was told before this worker came.

        Raises:
            ConfigError: the weights that the others serve are not to be had here.
        """
        state = self._inbox.state()
        self._paused = state.paused
        if state.weights is not None:
            self._updates.join(state.weights, state.weight_version)
        self._models.say(paused=state.paused is not None, weight_version=self._engine.card.weight_version)

    def obey(self) -> list[StepOutput]:
        """Obey what has come. Returns the ends of the sequences that it cost.

        Raises:
            ConfigError: as `join`.
        """
        if (ended := self._updates.ended()) is not None:
            self._answer(*ended)
        if self._due():
            self._commands.extend(self._inbox.read())
            failpoint("worker.obey")
            self._inbox.keep_state()
        while self._commands and not self._updates.busy:
            self._begin(self._commands.popleft())
        while self._unwritten:
            failpoint("worker.answer")
            self._unwritten[0]()
            self._unwritten.popleft()
        lost, self._ended = self._ended, []
        return lost

    def leave(self) -> None:
        """This worker has left the list."""
        self._inbox.leave()

    def wait_ms(self, longest: int) -> int:
        """How long the loop may wait for `watched` before it must call `obey` again."""
        return READING_POLL_MS if self._updates.busy else longest

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
        if not self._updates.begin(command):
            self._answer(command, lambda: self._handler(command)(command.args))

    def _handler(self, command: Command) -> Callable[[Args], Args]:
        if command.kind not in self._handlers:
            raise InvalidRequest(f"this worker's release does not know the command '{command.kind}'")
        return self._handlers[command.kind]

    def _answer(self, command: Command, act: Callable[[], Args]) -> None:
        """Do it, and keep what became of it for the api."""
        me = self._process
        try:
            outcome = Outcome(me, detail=act())
        except RequestError as e:
            log.warning("%s refused: %s", command.kind, e.message)
            outcome = Outcome(me, e.status, e.message, e.param)
        except OURS:
            log.exception("%s failed", command.kind)
            outcome = Outcome(me, 500, f"{command.kind} failed in the worker; its log says why")
        self._unwritten.append(lambda: self._inbox.reply(command, outcome))

    def _flush_cache(self, _: Args) -> Args:
        return {"flushed_tokens": self._engine.flush_cache()}

    def _pause(self, args: Args) -> Args:
        running = len(self._engine.running())
        self._interrupt(args["mode"], "Generation was paused.")
        self._set_paused(args["mode"])
        return {"running": running}

    def _continue(self, _: Args) -> Args:
        self._set_paused(None)
        return {"running": len(self._engine.running())}

    def _set_paused(self, mode: PauseMode | None) -> None:
        self._paused = mode
        self._unwritten.append(lambda: self._models.say(paused=mode is not None))
        self._unwritten.append(lambda: self._inbox.note(paused=mode or ""))

    def _interrupt(self, mode: PauseMode, reason: str) -> None:
        """What becomes of the sequences that run: ended, made to compute their K/V again, or left as they are."""
        if mode == "retract":
            self._engine.retract()
        if mode == "abort":
            for rid in list(self._engine.running()):
                self._engine.abort(rid)
                self._ended.append(StepOutput(rid, finish=Finish("abort", message=reason)))

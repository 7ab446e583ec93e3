"""What a worker does when it is told to, between two steps: the commands of `shared.control`.

A command that cannot be obeyed is answered with the reason, changes nothing, and the loop goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..shared.control import Command, Inbox, Outcome, PauseMode
from ..shared.errors import EngineError, InvalidRequest, RequestError
from ..shared.messages import Finish
from ..shared.registry import Membership
from .interface import Engine, StepOutput

log = logging.getLogger(__name__)

POLL_S = 0.05  # how often a busy worker looks for commands; an idle one is woken by them

# What went wrong here and not with the command: said, logged, and survived.
_OURS = (EngineError, OSError, RuntimeError)


class Controller:
    """Obeys the commands of one pool, in order. Everything runs on the loop's thread."""

    def __init__(self, engine: Engine, inbox: Inbox, member: Membership) -> None:
        self._engine = engine
        self._inbox = inbox
        self._member = member
        self._next_look = float("-inf")
        self._commands: deque[Command] = deque()
        self._unsent: list[tuple[Command, Outcome]] = []  # outcomes that an outage kept from the api
        self._ended: list[StepOutput] = []
        self.paused: PauseMode | None = None
        self._handlers: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "flush_cache": self._flush_cache,
            "pause": self._pause,
            "continue": self._continue,
        }

    def join(self) -> None:
        """Do as the pool was told before this worker came."""
        state = self._inbox.state()
        self._set_paused(state.paused)

    def obey(self) -> list[StepOutput]:
        """Obey what has come. Returns the ends of the sequences that it cost."""
        if self._due():
            self._commands.extend(self._inbox.read())
            self._inbox.keep_state()
        while self._commands:
            command = self._commands.popleft()
            self._unsent.append((command, self._outcome(command)))
        self._send()
        ended, self._ended = self._ended, []
        return ended

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

    def _outcome(self, command: Command) -> Outcome:
        me = self._member.info.id
        try:
            handler = self._handlers.get(command.kind)
            if handler is None:
                raise InvalidRequest(f"this worker's release does not know the command '{command.kind}'")
            return Outcome(me, detail=handler(command.args))
        except RequestError as e:
            log.warning("%s refused: %s", command.kind, e.message)
            return Outcome(me, e.status, e.message, e.param)
        except _OURS:
            log.exception("%s failed", command.kind)
            return Outcome(me, 500, f"{command.kind} failed in the worker; its log says why")

    def _send(self) -> None:
        while self._unsent:
            self._inbox.reply(*self._unsent[0])
            self._unsent.pop(0)

    def _flush_cache(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"flushed_tokens": self._engine.flush_cache()}

    def _pause(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        mode: PauseMode = args["mode"]
        running = len(self._engine.running())
        self._interrupt(mode)
        self._set_paused(mode)
        self._inbox.note(paused=mode)
        return {"running": running}

    def _continue(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self._set_paused(None)
        self._inbox.note(paused="")
        return {"running": len(self._engine.running())}

    def _set_paused(self, mode: PauseMode | None) -> None:
        self.paused = mode
        self._member.update(paused=mode is not None)

    def _interrupt(self, mode: PauseMode) -> None:
        """What becomes of the sequences that run: ended, made to compute their K/V again, or left as they are."""
        if mode == "retract":
            self._engine.retract()
        if mode == "abort":
            for rid in list(self._engine.running()):
                self._engine.abort(rid)
                self._ended.append(StepOutput(rid, finish=Finish("abort", message="Generation was paused.")))

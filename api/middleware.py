"""The border of every request: its id, its key, the size of its body, and what nothing else has caught."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..shared.errors import RequestError, TooLarge
from ..shared.logs import http_id
from .auth import Keys
from .errors import as_request_error, error_response

log = logging.getLogger(__name__)

_HARMLESS = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")


class Border:
    """The outermost layer, in plain ASGI: streams pass it untouched.

    Puts `request_id` and `tenant` into the scope's state; answers X-Request-Id.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body_bytes: int,
        unlimited: tuple[str, ...] = (),
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._draining = draining  # then each answer is the last of its connection
        self._keys = keys
        self._max_body = max_body_bytes
        self._unlimited = unlimited  # paths whose routes bound their bodies themselves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _HARMLESS.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        token = http_id.set(name)  # a client's own where it sent a harmless one
        try:
            await self._guarded(scope, receive, _Replies(send, name, self._draining), headers, name)
        finally:
            http_id.reset(token)

    async def _guarded(self, scope: Scope, receive: Receive, replies: _Replies, headers: Headers, name: str) -> None:
        try:
            tenant = self._keys.tenant(headers.get("authorization"), scope["path"])
            scope.setdefault("state", {}).update(request_id=name, tenant=tenant)
            await self._app(scope, self._bounded(scope["path"], receive, headers), replies)
        except Exception as e:
            if replies.started:
                # Too late for a status: the connection is closed, which the client sees as a broken answer.
                log.exception("an answer broke off")
                raise
            await error_response(as_request_error(e))(scope, receive, replies)

    def _bounded(self, path: str, receive: Receive, headers: Headers) -> Receive:
        if path.startswith(self._unlimited):
            return receive
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        got = 0

        async def bounded() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._max_body:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> RequestError:
        return TooLarge(f"The body is larger than {self._max_body >> 20} MB.")


class _Replies:
    """`send` that adds X-Request-Id and knows whether the answer has begun."""

    def __init__(self, send: Send, name: str, draining: Callable[[], bool]) -> None:
        self._send = send
        self._draining = draining
        self._name = name
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._name
            if self._draining():
                headers["connection"] = "close"
        await self._send(message)

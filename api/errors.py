"""Every error as OpenAI's `{"error": {message, type, param, code}}`, the framework's own included."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..shared.clients import TRANSIENT, as_overloaded
from ..shared.errors import (
    HeadraceError,
    InvalidRequest,
    Overloaded,
    RequestError,
    StoreUnavailable,
    Unavailable,
)

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed its connection: nobody reads an answer."""


class SlowReader(Exception):
    """The client took nothing for too long: its connection is closed, and its stream stays for it to go on with."""


STORE_ERRORS = (StoreUnavailable, *TRANSIENT)


def as_request_error(error: BaseException) -> RequestError:
    """What a client reads of any error. What is ours is logged here, once, and told without details."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, STORE_ERRORS):
        log.warning("the store does not answer: %s", error)
        return Unavailable("The queue does not answer; try again later.")
    if (overloaded := as_overloaded(error)) is not None:
        return overloaded
    log.error("unexpected error", exc_info=error)
    return InternalError("The server had an error while it handled the request.")


class InternalError(RequestError):
    """500: ours."""

    status = 500
    type = "server_error"
    default_code = "internal_error"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, Unavailable):
        headers["retry-after"] = "1"
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


async def _headrace_error(_: Request, error: Exception) -> Response:
    return error_response(as_request_error(error))


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the access log; nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"Unknown route: {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    else:
        message = str(error.detail)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return json_response(body, error.status_code, error.headers)


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(InvalidRequest(f"Invalid value for '{param}': {first['msg']}", param=param))


def install(app: FastAPI) -> None:
    """Give `app` the handlers. What none of them takes is caught by `middleware.Border`."""
    app.add_exception_handler(HeadraceError, _headrace_error)
    for kind in TRANSIENT:
        app.add_exception_handler(kind, _headrace_error)
    for gone in (ClientGone, ClientDisconnect):  # while it waited; while its body was read
        app.add_exception_handler(gone, _gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)

"""What the routes read of a request."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from fastapi import Request

from ...shared.errors import InvalidRequest
from ..bodies import decode
from ..fields import kind
from ..inputs import Caller
from ..services import Services
from ..settings import ApiSettings


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def settings_of(request: Request) -> ApiSettings:
    settings: ApiSettings = request.app.state.settings
    return settings


def caller_of(request: Request) -> Caller:
    """Who asks: the border has found it out."""
    return Caller(
        tenant=request.state.tenant,
        request_id=request.state.request_id,
        deadline_s=settings_of(request).request_deadline_s,
    )


def name_of(request: Request, body: bytes) -> str | None:
    """What the client calls this piece of work, so that sending it twice makes one request: its Idempotency-Key, which
    counts for its tenant, the route and the body it came with; None where it has no name."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    parts = (request.state.tenant, request.url.path, key)
    return hashlib.sha256("\0".join(parts).encode() + b"\0" + body).hexdigest()


async def read_json(request: Request) -> Any:
    """The body, decoded.

    Raises:
        InvalidRequest: it is no JSON.
        TooLarge: it has more values than a request may have.
    """
    return await decode(await request.body())


async def read_object(request: Request) -> dict[str, Any]:
    """The body, which is a JSON object.

    Raises:
        InvalidRequest: it is something else.
        TooLarge: it has more values than a request may have.
    """
    body = await read_json(request)
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {kind(body)}.", code="invalid_body")
    return body


def grace_of(request: Request) -> float:
    """Seconds that a stream goes on without its client: the setting, or what X-Resume-Grace asks for.

    Raises:
        InvalidRequest: the header is no number of seconds.
    """
    settings = settings_of(request)
    asked = request.headers.get("x-resume-grace")
    if asked is None:
        return settings.resume_grace_s
    try:
        grace_s = float(asked)
    except ValueError:
        grace_s = math.nan
    if not 0 <= grace_s < math.inf:
        raise InvalidRequest(f"X-Resume-Grace must be a number of seconds, got {asked[:40]!r}.")
    return min(grace_s, settings.max_resume_grace_s)

"""How the deployment is: `/health`, `/health_generate`, `/metrics`, `/server_info`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from ...shared.errors import HeadraceError, Unavailable
from ..backend import Backend
from ..errors import STORE_ERRORS, json_response
from ..inputs import Caller
from ..metrics import CONTENT_TYPE
from .requests import caller_of, services_of

router = APIRouter()

PROBE_S = 20.0  # how long a probe's one token may take


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when a request would succeed: Redis answers, a worker and a detokenizer are ready, and we do not drain.

    `state` is `ready`; otherwise `draining` (this replica), or what those are that should be ready: `starting`,
    `stuck`, `draining`, and `down` where there are none.
    """
    state, reason = await _state(request)
    if reason is None:
        return json_response({"status": "ok", "state": state})
    return json_response({"status": "unavailable", "state": state, "reason": reason}, 503)


async def _state(request: Request) -> tuple[str, str | None]:
    """The state, and the reason where it is not `ready`."""
    if request.app.state.draining():
        return "draining", "this replica was told to stop"
    try:
        processes = await services_of(request).backend.processes.alive()
    except STORE_ERRORS:
        return "down", "Redis does not answer"
    found = {role: {p.state for p in processes if p.role == role} for role in ("worker", "detok")}
    missing = [role for role, states in found.items() if "ready" not in states]
    if not missing:
        return "ready", None
    states = set.union(*(found[role] for role in missing))
    state = next((state for state in ("stuck", "starting", "draining") if state in states), "down")
    return state, f"no {' and no '.join(missing)} is ready"


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when one token came through the whole path, of `?model=` or of any model that has a worker."""
    services = services_of(request)
    model = request.query_params.get("model") or await _served_model(services.backend)
    body = {"model": model, "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    caller: Caller = replace(caller_of(request), lane="rt", deadline_s=PROBE_S)
    try:
        async with asyncio.timeout(PROBE_S):
            await services.inference.answer("/generate", body, caller)
    except TimeoutError as e:
        raise Unavailable(f"No token of '{model}' came within {PROBE_S:.0f} s.") from e
    except HeadraceError as e:
        raise Unavailable(f"'{model}' does not generate: {e}") from e
    return json_response({"status": "ok", "model": model})


async def _served_model(backend: Backend) -> str:
    ready = {p.model for p in await backend.processes.alive() if p.role == "worker" and p.state == "ready"}
    for card in (await backend.models.all()).values():
        if card.task == "generate" and (card.name in ready or card.pool in ready):
            return card.name
    raise Unavailable("No worker is ready.")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """What this replica counts, how the queue stands, and what every role says of itself, for Prometheus."""
    services = services_of(request)
    backend = services.backend
    try:
        processes = await backend.processes.alive()
        pools = sorted({card.pool for card in (await backend.models.all()).values()})
        overview = await backend.queue.overview(pools)
    except STORE_ERRORS:
        processes, overview = [], None  # what this replica counts is there all the same
    return Response(services.metrics.page(processes, overview), media_type=CONTENT_TYPE)


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Every live process of the deployment, and its models."""
    backend = services_of(request).backend
    processes = [asdict(process) for process in await backend.processes.alive()]
    models = [
        {"name": card.name, "pool": card.pool, "architecture": card.architecture, "dtype": card.dtype,
         "context_length": card.context_length, "weight_version": card.weight_version}
        for card in (await backend.models.all()).values()
    ]  # fmt: skip
    return json_response({"version": version("headrace"), "processes": processes, "models": models})

"""Telling workers what to do while they serve. With an admin key set, it opens these routes and nothing else does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from ...shared.errors import InvalidRequest, ProtocolError
from ...shared.ids import choices, shard_in
from ..errors import json_response
from ..openapi import json_body
from ..plan import ID_PREFIX, Plan
from ..protocol.control import (
    AbortRequest,
    LoadLoraRequest,
    PauseRequest,
    PoolRequest,
    ProfileRequest,
    UnloadLoraRequest,
    UpdateWeightsRequest,
)
from ..services import Services
from ..validation import parse
from .requests import read_json, services_of, settings_of

router = APIRouter()


@router.post("/flush_cache", openapi_extra=json_body(PoolRequest))
async def flush_cache(request: Request) -> Response:
    """Have the workers of a model forget the prompts they have computed."""
    asked = parse(PoolRequest, await _body(request))
    return json_response(await services_of(request).control.tell(asked.model, "flush_cache", {}))


@router.post("/pause_generation", openapi_extra=json_body(PauseRequest))
async def pause_generation(request: Request) -> Response:
    """Have the workers of a model stop between two steps; requests wait in the queue until they go on."""
    asked = parse(PauseRequest, await _body(request))
    return json_response(await services_of(request).control.tell(asked.model, "pause", {"mode": asked.mode}))


@router.post("/continue_generation", openapi_extra=json_body(PoolRequest))
async def continue_generation(request: Request) -> Response:
    """Have them go on."""
    asked = parse(PoolRequest, await _body(request))
    return json_response(await services_of(request).control.tell(asked.model, "continue", {}))


@router.post("/update_weights_from_disk", openapi_extra=json_body(UpdateWeightsRequest))
async def update_weights_from_disk(request: Request) -> Response:
    """Have all workers of a model read other weights for it, then use them; if one cannot, none does."""
    asked, control = parse(UpdateWeightsRequest, await _body(request)), services_of(request).control
    version = asked.weight_version or Path(asked.model_path).name
    how = {"mode": asked.mode, "version": version}
    card = await control.card(asked.model)
    return json_response(await control.change(card, "read_weights", {"folder": asked.model_path}, how))


@router.post("/load_lora_adapter", openapi_extra=json_body(LoadLoraRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Serve an adapter of a model under a name of its own, on all its workers or on none."""
    asked, control = parse(LoadLoraRequest, await _body(request)), services_of(request).control
    what = {"name": asked.lora_name, "folder": asked.lora_path}
    return json_response(await control.change(await control.card(asked.model), "read_lora", what, {}))


@router.post("/unload_lora_adapter", openapi_extra=json_body(UnloadLoraRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Serve an adapter no more; what runs with it goes on."""
    asked = parse(UnloadLoraRequest, await _body(request))
    return json_response(await services_of(request).control.unload_lora(asked.lora_name))


@router.post("/start_profile", openapi_extra=json_body(ProfileRequest))
async def start_profile(request: Request) -> Response:
    """Have each worker of a model trace its next steps into a file of its own, under its --profile-dir."""
    asked = parse(ProfileRequest, await _body(request))
    return json_response(
        await services_of(request).control.tell(asked.model, "start_profile", {"steps": asked.num_steps})
    )


@router.post("/stop_profile", openapi_extra=json_body(PoolRequest))
async def stop_profile(request: Request) -> Response:
    """Have them end the trace before its steps are over."""
    asked = parse(PoolRequest, await _body(request))
    return json_response(await services_of(request).control.tell(asked.model, "stop_profile", {}))


@router.post("/abort_request", openapi_extra=json_body(AbortRequest))
async def abort_request(request: Request) -> Response:
    """End requests, waiting or running. Their clients read what was made so far, and that they were aborted."""
    asked, services = parse(AbortRequest, await _body(request)), services_of(request)
    if (asked.rid is None) is not asked.abort_all:
        raise InvalidRequest("Give 'rid', or 'abort_all': true; one of them.", param="rid")
    rids = await _unfinished(services, asked.model) if asked.abort_all else []
    for name in asked.rid or ():
        rids += await _rids(services, name, settings_of(request).max_n)
    aborted = await services.backend.queue.cancel(rids, "The request was aborted.") if rids else 0
    return json_response({"success": True, "aborted": aborted})


@router.get("/model_info")
async def model_info(request: Request) -> Response:
    """The card of a model (`?model=`, or the only one), and the workers that serve it."""
    services = services_of(request)
    name = request.query_params.get("model")
    card = await services.backend.models.get(name) if name else await services.control.card(None)
    workers = [asdict(worker) for worker in await services.backend.control.workers(card.pool)]
    shown = {k: v for k, v in asdict(card).items() if k not in ("chat_template", "tokenizer", "lora")}
    return json_response({**shown, "workers": workers})


async def _unfinished(services: Services, model: str | None) -> list[str]:
    pool = (await services.control.card(model)).pool if model is not None else None
    return await services.backend.queue.unfinished(pool)


async def _rids(services: Services, name: str, max_n: int) -> list[str]:
    """The choices that an id stands for: an answer's id for all of them, a choice's for itself."""
    own = next((name[len(p) :] for p in ID_PREFIX.values() if p and name.startswith(p)), name)
    try:
        shard_in(own)
        if "." in own:
            return [own]
        plan = await services.backend.queue.plan(own)
    except ProtocolError as e:
        raise InvalidRequest(f"{name[:80]!r} is no id of a request.", param="rid") from e
    return list(Plan.decode(plan).rids if plan is not None else choices(own, max_n))


async def _body(request: Request) -> Any:
    """The body; none at all stands for the defaults."""
    return await read_json(request) if await request.body() else {}

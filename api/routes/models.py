"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ..errors import json_response
from ..protocol.models import model_body
from .requests import services_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every registered model."""
    cards = await services_of(request).backend.models.all()
    body: dict[str, Any] = {"object": "list", "data": [model_body(card) for card in cards.values()]}
    return json_response(body)


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> Response:
    """One model. Names may hold slashes."""
    return json_response(model_body(await services_of(request).backend.models.get(name)))

"""The application: routes, and the border around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI
from pydantic import BaseModel

from . import errors
from .auth import Keys
from .batches.routes import router as batches
from .batches.stores import Stores
from .files.routes import router as files
from .middleware import Border
from .openapi import document
from .protocol.chat import ChatCompletionRequest
from .protocol.completions import CompletionRequest
from .protocol.control import (
    AbortRequest,
    LoadLoraRequest,
    PauseRequest,
    PoolRequest,
    ProfileRequest,
    UnloadLoraRequest,
    UpdateWeightsRequest,
)
from .protocol.embeddings import EmbeddingRequest, EncodeRequest
from .protocol.native import GenerateRequest
from .routes import control, generation, health, models
from .services import Services
from .settings import ApiSettings

# Uploads are bounded by the file store, part by part.
UNLIMITED_PATHS = ("/v1/files", "/v1/uploads")

# Every body that a route parses by itself, for the document.
BODIES: list[type[BaseModel]] = [
    *(ChatCompletionRequest, CompletionRequest, GenerateRequest, EmbeddingRequest, EncodeRequest),
    *(PoolRequest, PauseRequest, AbortRequest, UpdateWeightsRequest, LoadLoraRequest, UnloadLoraRequest),
    ProfileRequest,
]


def create_app(
    settings: ApiSettings,
    services: Services,
    stores: Stores | None = None,
    draining: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The api over what the caller opened and will close. Without `stores` there are no files and no batches.

    Args:
        draining: whether this replica was told to stop.
    """
    app = FastAPI(title="headrace", version=version("headrace"))
    app.state.settings, app.state.services, app.state.draining = settings, services, draining
    app.add_middleware(
        Border,
        keys=Keys(settings.api_key, settings.admin_key),
        max_body_bytes=settings.max_body_mb << 20,
        unlimited=UNLIMITED_PATHS,
        draining=draining,
    )
    errors.install(app)
    for group in (generation, models, control, health):
        app.include_router(group.router)
    if stores is not None:
        app.state.files, app.state.batches, app.state.rq = stores.files, stores.batches, stores.rq
        app.include_router(files)
        app.include_router(batches)
    app.openapi = partial(document, app, BODIES)  # type: ignore[method-assign]
    return app

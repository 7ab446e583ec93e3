"""The application: routes, the border around them, and what lives as long as the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI

from . import errors
from .auth import Keys
from .batches.routes import router as batches
from .batches.stores import Stores
from .files.routes import router as files
from .middleware import Border
from .openapi import document
from .protocol.chat import ChatCompletionRequest
from .protocol.completions import CompletionRequest
from .protocol.native import GenerateRequest
from .routes import generation, health, models
from .services import Services
from .settings import ApiSettings

# Uploads are bounded by the file store, part by part.
UNLIMITED_PATHS = ("/v1/files", "/v1/uploads")


def create_app(
    settings: ApiSettings,
    services: Callable[[], AbstractAsyncContextManager[Services]],
    stores: Callable[[], AbstractAsyncContextManager[Stores]] | None = None,
) -> FastAPI:
    """The api over services and stores that are opened with the application and closed after its last request.

    Without `stores` there are no files and no batches.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.services = await stack.enter_async_context(services())
            if stores is not None:
                opened = await stack.enter_async_context(stores())
                app.state.files, app.state.batches, app.state.rq = opened.files, opened.batches, opened.rq
            yield

    app = FastAPI(title="headrace", version=version("headrace"), lifespan=lifespan)
    app.state.settings = settings
    app.add_middleware(
        Border,
        keys=Keys(settings.api_key, settings.admin_key),
        max_body_bytes=settings.max_body_mb << 20,
        unlimited=UNLIMITED_PATHS,
    )
    errors.install(app)
    for group in (generation, models, health):
        app.include_router(group.router)
    if stores is not None:
        app.include_router(files)
        app.include_router(batches)
    app.openapi = partial(document, app, [ChatCompletionRequest, CompletionRequest, GenerateRequest])  # type: ignore[method-assign]
    return app

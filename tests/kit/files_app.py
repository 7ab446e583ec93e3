"""The file and batch routes alone, over real stores: what these parts need of an application, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from headrace.api.batches.routes import router as batches
from headrace.api.batches.settings import BatchSettings
from headrace.api.batches.stores import open_stores
from headrace.api.files.routes import router as files
from headrace.shared.errors import RequestError


def files_app(settings: BatchSettings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_stores(settings) as stores:
            app.state.files, app.state.batches, app.state.rq = stores.files, stores.batches, stores.rq
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(files)
    app.include_router(batches)
    app.add_exception_handler(RequestError, _as_openai)
    return app


async def _as_openai(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)

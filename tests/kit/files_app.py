"""The file and batch routes alone, over real stores: what these parts need of an application, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from headrace.api.files.routes import router as files
from headrace.api.files.store import FileStore
from headrace.api.files.upload import UploadLimits
from headrace.shared.clients import connect_async
from headrace.shared.errors import RequestError


def files_app(redis_url: str, data_dir: str, limits: UploadLimits | None = None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        redis = connect_async(redis_url)
        app.state.files = await FileStore.open(data_dir, redis, limits)
        yield
        await redis.aclose()

    app = FastAPI(lifespan=lifespan)
    app.include_router(files)
    app.add_exception_handler(RequestError, _as_openai)
    return app


async def _as_openai(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)

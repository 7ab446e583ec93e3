"""What the routes and the driver stand on, opened together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...shared.clients import Client, connect, connect_async
from ..files.incoming import UploadLimits
from ..files.settings import FileSettings
from ..files.store import FileStore
from .store import BatchStore


@dataclass(frozen=True, slots=True)
class Stores:
    """Belongs on `app.state` as `files`, `batches` and `rq`."""

    files: FileStore
    batches: BatchStore
    rq: Client


@asynccontextmanager
async def open_stores(settings: FileSettings) -> AsyncIterator[Stores]:
    """Open the file store and the batches on the control Redis.

    Raises:
        ConfigError: the data folder cannot be written, or is not the one of this deployment.
    """
    url = settings.control_url
    control = connect_async(url, "headrace-control")
    limits = UploadLimits(settings.max_file_mb << 20, settings.max_batch_file_mb << 20)
    try:
        files = await FileStore.open(settings.data_dir, control, limits, settings.durability)
        with connect(url, "headrace-rq") as rq:
            yield Stores(files, BatchStore(control, files), rq)
    finally:
        await control.aclose()

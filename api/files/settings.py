"""Where files lie and how large they may be: settings that the api and the batch driver share."""

from __future__ import annotations

from pydantic import Field

from ...shared.settings import StoreSettings
from .durable import Durability


class FileSettings(StoreSettings):
    """Folder and limits of the file store; every host of a deployment mounts the same folder."""

    data_dir: str = Field(
        "~/.local/share/headrace", description="folder of files and batch results, shared by all hosts"
    )
    durability: Durability = Field(
        "strict", description="relaxed starts on a Redis that cannot say when files and batches are on its disk"
    )
    max_file_mb: int = Field(512, ge=1, description="largest upload, in MB")
    max_batch_file_mb: int = Field(200, ge=1, description="largest upload of purpose batch, in MB")

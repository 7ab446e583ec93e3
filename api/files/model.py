"""The file object of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.typing import FieldT as Field

UPLOAD_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
BATCH_OUTPUT = "batch_output"  # what a batch publishes; never uploaded

BATCH_LIFETIME_S = 30 * 86400  # of files with purpose batch, unless told otherwise


@dataclass(frozen=True, slots=True)
class FileObject:
    """One stored file. Times are Unix seconds by Redis's clock; `expires_at` None means never."""

    id: str
    size: int  # bytes
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON that clients see. `status` is deprecated, yet the SDK waits for `processed`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    def to_hash(self) -> dict[Field, str]:
        """The fields of its Redis hash."""
        fields: dict[Field, str] = {
            "bytes": str(self.size),
            "created_at": str(self.created_at),
            "filename": self.filename,
            "purpose": self.purpose,
        }
        return fields if self.expires_at is None else fields | {"expires_at": str(self.expires_at)}

    @classmethod
    def from_hash(cls, file_id: str, fields: Mapping[bytes, bytes]) -> FileObject:
        expires_at = fields.get(b"expires_at")
        return cls(
            id=file_id,
            size=int(fields[b"bytes"]),
            created_at=int(fields[b"created_at"]),
            filename=fields[b"filename"].decode(),
            purpose=fields[b"purpose"].decode(),
            expires_at=None if expires_at is None else int(expires_at),
        )

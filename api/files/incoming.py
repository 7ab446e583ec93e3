"""Files on their way into the store: bytes go to disk as they come, in bounded memory.

A form's parts come in any order, so the purpose may be known only at the end: what depends on it (UTF-8, the batch
limit) is noted on the way and judged by `check`.
"""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ...shared.errors import InvalidRequest, TooLarge


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Largest file, in bytes, and largest one of purpose batch."""

    file_bytes: int = 512 << 20
    batch_file_bytes: int = 200 << 20


class IncomingFile:
    """Bytes on their way into the store; what is not moved away when the context ends is removed."""

    def __init__(self, path: Path, limits: UploadLimits) -> None:
        self.path = path
        self.size = 0
        self.utf8 = True
        self.blank = True  # nothing but white space and a byte order mark so far
        self._limits = limits
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes) -> None:
        """Append. Blocks on the disk. Raises TooLarge at the limit of any file."""
        self.size += len(data)
        if self.size > self._limits.file_bytes:
            raise _too_large(self._limits.file_bytes)
        if self.blank:
            self.blank = not data.removeprefix(codecs.BOM_UTF8).strip()
        if self.utf8:
            self._decode(data)
        self._file.write(data)

    def check(self, purpose: str, filename: str) -> None:
        """What a file must be for its purpose. Raises InvalidRequest or TooLarge."""
        if self.size == 0:
            raise InvalidRequest("The file is empty.", param="file")
        if purpose != "batch":
            return
        if not filename.endswith(".jsonl"):
            raise InvalidRequest("Invalid file format for Batch API. Must be .jsonl", param="file")
        if self.size > self._limits.batch_file_bytes:
            raise _too_large(self._limits.batch_file_bytes)
        self._decode(b"", final=True)
        if not self.utf8:
            raise InvalidRequest("Invalid file for Batch API. Must be utf-8 encoded", param="file")
        if self.blank:
            raise InvalidRequest("The file is empty.", param="file")

    def move_to(self, path: Path) -> None:
        """Flush to the disk and take the final name. Blocks."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _decode(self, data: bytes, final: bool = False) -> None:
        try:
            self._decoder.decode(data, final)
        except UnicodeDecodeError:
            self.utf8 = False


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The file is larger than the limit of {limit >> 20} MB.", param="file")

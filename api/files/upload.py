"""Reading an upload in bounded memory: the bytes of a multipart body go to disk as they come.

The parts come in any order, so the purpose may be known only at the end: what depends on it (UTF-8, the batch limit)
is noted on the way and judged by `check`.
"""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...shared.errors import InvalidRequest, TooLarge
from ..paging import missing_parameter

MAX_FIELD_BYTES = 1 << 20
WRITE_BYTES = 1 << 20  # gathered before one hop to a thread and the disk


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


@dataclass(slots=True)
class Form:
    """A parsed upload: its fields, and the name of the file whose bytes were written, if there was one."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None

    def require(self, name: str) -> str:
        """A field, or the error that it is missing."""
        if name not in self.fields:
            raise missing_parameter(name)
        return self.fields[name]


class FormReader:
    """Parses `multipart/form-data`: the part named `file_field` into `incoming`, the others into fields."""

    def __init__(self, content_type: str, incoming: IncomingFile, file_field: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise InvalidRequest(f"Expected a multipart/form-data body, but got '{content_type}'.")
        self.form = Form()
        self._incoming = incoming
        self._file_field = file_field
        self._done = False
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value, self._text = bytearray(), bytearray(), bytearray()
        self._field = ""
        self._to_file = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._part_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, body: AsyncIterator[bytes]) -> Form:
        """Consume the body. Raises InvalidRequest when it is not whole."""
        gathered = bytearray()
        async for chunk in body:
            gathered += chunk
            if len(gathered) >= WRITE_BYTES:
                await asyncio.to_thread(self._feed, bytes(gathered))
                gathered.clear()
        await asyncio.to_thread(self._feed, bytes(gathered))
        if not self._done:
            raise InvalidRequest("The multipart body ended early.")
        return self.form

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except MultipartParseError as e:
            raise InvalidRequest(f"The multipart body cannot be read: {e}") from e

    def _begin_part(self) -> None:
        self._headers.clear()
        self._text.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._to_file = self._field == self._file_field and b"filename" in options
        if self._to_file:
            if self.form.filename is not None:
                raise InvalidRequest(f"'{self._file_field}' was given twice.", param=self._file_field)
            name = options[b"filename"].decode("utf-8", "replace")
            self.form.filename = os.path.basename(name.replace("\\", "/")) or "file"

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._to_file:
            self._incoming.write(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise TooLarge(f"The field '{self._field}' is larger than {MAX_FIELD_BYTES} bytes.", param=self._field)

    def _end_part(self) -> None:
        if not self._to_file:
            self.form.fields[self._field] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._done = True


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The file is larger than the limit of {limit >> 20} MB.", param="file")

"""`multipart/form-data`, read as it comes: the file's bytes to disk, the other fields to memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...shared.errors import InvalidRequest, TooLarge
from ..fields import missing_parameter
from .incoming import IncomingFile

MAX_FIELDS = 64
MAX_FIELD_BYTES = 1 << 20  # of all fields together, for they are held in memory
WRITE_BYTES = 1 << 20  # gathered before one hop to a thread and the disk


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
        self._parts = self._field_bytes = 0
        self._parser = self._make_parser(options[b"boundary"])

    def _make_parser(self, boundary: bytes) -> MultipartParser:
        try:
            return MultipartParser(
                boundary,
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
        except FormParserError as e:
            raise InvalidRequest(f"The multipart boundary cannot be used: {e}") from e

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
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise TooLarge(f"The form has more than {MAX_FIELDS} fields.")
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
        self._field_bytes += end - start
        if self._field_bytes > MAX_FIELD_BYTES:
            raise TooLarge(f"The form's fields are larger than {MAX_FIELD_BYTES} bytes.", param=self._field)

    def _end_part(self) -> None:
        if not self._to_file:
            self.form.fields[self._field] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._done = True

"""Result segments: answered lines as they are kept while a batch runs, and the two files made of them at its end.

    <data>/batches/<batch>/<epoch>-<number>.seg      written by one driver, flushed, then committed by an entry in Redis

    ┌───────────── output_bytes ─────────────┬──────────── error_bytes ────────────┐
    │ lines of the output file               │ lines of the error file             │
    └────────────────────────────────────────┴─────────────────────────────────────┘

A segment without its entry was never committed: its driver died or was fenced, its lines are answered again, and
nobody reads it. The name holds the driver's epoch, so two drivers never write one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...shared.errors import ProtocolError
from .model import Counts

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LineResult:
    """The end of one line: `response` when it was answered, with whatever status, else `error` (code and message)."""

    number: int
    custom_id: str
    request_id: str = ""
    status: int = 0
    body: dict[str, Any] | None = None
    error: tuple[str, str] | None = None

    @property
    def succeeded(self) -> bool:
        return self.body is not None and 200 <= self.status < 300

    @property
    def counts(self) -> Counts:
        if not self.succeeded:
            return Counts(failed=1)
        usage = (self.body or {}).get("usage") or {}
        return Counts(
            completed=1,
            input_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
            reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
        )

    def encode(self, batch_id: str) -> bytes:
        """Its line of the output or error file."""
        response = None
        if self.body is not None:
            response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        error = None if self.error is None else {"code": self.error[0], "message": self.error[1]}
        line = {
            "id": _line_id(batch_id, self.number),
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _line_id(batch_id: str, number: int) -> str:
    return f"batch_req_{hashlib.sha256(f'{batch_id}/{number}'.encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Segment:
    """What Redis knows of a committed segment: its lines (physical numbers), its two sizes in bytes, its counts."""

    name: str
    lines: tuple[int, ...]
    output_bytes: int
    error_bytes: int
    counts: Counts

    def encode(self) -> bytes:
        return orjson.dumps({k: v for k, v in dataclasses.asdict(self).items() if k != "name"})

    @classmethod
    def decode(cls, name: str, data: bytes) -> Segment:
        raw = orjson.loads(data)
        return cls(name, tuple(raw["lines"]), raw["output_bytes"], raw["error_bytes"], Counts(**raw["counts"]))


def write_segment(folder: Path, name: str, batch_id: str, results: Sequence[LineResult]) -> Segment:
    """Write results and flush them to the disk; they count once the segment is committed. Blocks."""
    output = b"".join(r.encode(batch_id) for r in results if r.succeeded)
    errors = b"".join(r.encode(batch_id) for r in results if not r.succeeded)
    with (folder / name).open("wb") as file:
        file.write(output)
        file.write(errors)
        file.flush()
        os.fsync(file.fileno())
    counts = sum((r.counts for r in results), Counts())
    return Segment(name, tuple(r.number for r in results), len(output), len(errors), counts)


def output_parts(folder: Path, segments: Iterable[Segment]) -> Iterator[bytes]:
    """The output file, piece by piece."""
    for segment in segments:
        yield from _read(folder, segment, 0, segment.output_bytes)


def error_parts(folder: Path, segments: Iterable[Segment]) -> Iterator[bytes]:
    """The error file's answered lines, piece by piece."""
    for segment in segments:
        yield from _read(folder, segment, segment.output_bytes, segment.error_bytes)


def _read(folder: Path, segment: Segment, start: int, size: int) -> Iterator[bytes]:
    """Raises ProtocolError when the file is not as long as it was committed."""
    with (folder / segment.name).open("rb") as file:
        file.seek(start)
        while size:
            part = file.read(min(size, COPY_BYTES))
            if not part:
                raise ProtocolError(f"result segment {segment.name} of {folder.name} is {size} bytes short")
            size -= len(part)
            yield part


def damaged(folder: Path, segments: Iterable[Segment]) -> list[Segment]:
    """Committed segments whose file is not there, or not whole: the disk lost what Redis remembers."""
    return [s for s in segments if not _whole(folder / s.name, s.output_bytes + s.error_bytes)]


def _whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False

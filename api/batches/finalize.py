"""The two files of a batch that is over: what was answered, and what was not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from ..files.model import BATCH_OUTPUT, FileObject
from ..files.store import FileStore
from .model import Batch
from .results import LineResult, Segment, error_parts, output_parts
from .validate import request_lines

# Why a line has no answer, by what the batch ends as.
NOT_RUN = {
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "expired": ("batch_expired", "This request was not executed before the completion window expired."),
    "completed": ("result_lost", "The result of this request was lost from the disk; send it again."),
}


async def write_files(
    files: FileStore, batch: Batch, segments: Sequence[Segment]
) -> tuple[FileObject | None, FileObject | None]:
    """Write the output and the error file; None for one that would be empty. Nobody sees them before `publish`.

    Every line of the input stands in exactly one of them: in the segment that answered it, or, without one, in the
    error file with the reason.
    """
    folder = files.batch_folder(batch.id)
    output = await _place(files, batch, "output", output_parts(folder, segments))
    errors = await _place(
        files, batch, "error", chain(error_parts(folder, segments), _not_run(folder, batch, segments))
    )
    return output, errors


async def _place(files: FileStore, batch: Batch, kind: str, parts: Iterable[bytes]) -> FileObject | None:
    with files.incoming(limit=sys.maxsize) as incoming:

        def write() -> None:
            for part in parts:
                incoming.write(part)

        await asyncio.to_thread(write)
        if incoming.size == 0:
            return None
        return await files.place(
            incoming,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=BATCH_OUTPUT,
            lifetime_s=batch.output_lifetime_s,
        )


def _not_run(folder: Path, batch: Batch, segments: Iterable[Segment]) -> Iterator[bytes]:
    if not batch.total:
        return  # cancelled before anybody knew what the file holds
    done = {number for segment in segments for number in segment.lines}
    reason = NOT_RUN["cancelled" if batch.status == "cancelling" else batch.outcome or "completed"]
    with (folder / "input.jsonl").open("rb") as stream:
        for line in request_lines(stream, skip=done):
            yield LineResult(line.number, line.custom_id, error=reason).encode(batch.id)

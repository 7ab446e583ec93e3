"""RQ's part: a job is one slice of driving one batch, and wakes whichever driver is free.

Nothing durable depends on it. A job that is lost is enqueued again by the sweep, one that comes twice finds the batch
taken. A slice's job is named by batch and epoch, so a batch waits in RQ once, however often it is swept.
"""

from __future__ import annotations

from rq import Queue
from rq.serializers import JSONSerializer

from ...shared.clients import Client
from .model import Batch

QUEUE = "headrace-batches"
DRIVE = "headrace.api.batches.worker.drive_slice"
FAILED_S = 3600  # how long RQ remembers a slice that raised


def slice_queue(connection: Client) -> Queue:
    """The queue of slices. RQ's own time limit is off: the lease is what ends a driver's hold."""
    return Queue(QUEUE, connection=connection, serializer=JSONSerializer, default_timeout=-1)


def enqueue_slice(connection: Client, batch: Batch) -> bool:
    """Have a batch driven on; False when its next slice waits already. Blocks on Redis."""
    queue = slice_queue(connection)
    job_id = f"{batch.id}-{batch.epoch + 1}"
    if queue.get_job_position(job_id) is not None:
        return False
    queue.enqueue(DRIVE, batch.id, job_id=job_id, job_timeout=-1, result_ttl=0, failure_ttl=FAILED_S)
    return True

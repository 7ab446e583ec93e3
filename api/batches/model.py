"""The batch object of OpenAI's interface, and what our driver keeps beside it.

validating ──(a bad line)──► failed
    │
in_progress ──► finalizing ──► completed, or expired when its time was over
    │   (also from validating)
    └── POST cancel ──► cancelling ──► cancelled
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson
from redis.typing import FieldT as Field

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Outcome = Literal["completed", "expired", "cancelled"]
TERMINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
ENDPOINTS: dict[str, BatchEndpoint] = {name: name for name in get_args(BatchEndpoint)}
WINDOW_S = 86400  # completion_window "24h"


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch failed validation; `line` is the physical line, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What answered lines add up to; token counts are the answers' own usage."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return self._zip(other, operator.add)

    def __sub__(self, other: Counts) -> Counts:
        return self._zip(other, operator.sub)

    def _zip(self, other: Counts, combine: Callable[[int, int], int]) -> Counts:
        return Counts(*map(combine, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, as its Redis hash holds it. Times are Unix seconds, `lease_until` milliseconds, by Redis's clock."""

    id: str
    endpoint: BatchEndpoint
    input_file_id: str
    created_at: int
    expires_at: int
    tenant: str = "default"
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None  # of the output and error files
    status: Status = "validating"
    model: str | None = None
    total: int = 0
    counts: Counts = Counts()
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    # The driver's: what it is finalizing to, who holds it, and the last result segment that was committed.
    outcome: Outcome | None = None
    owner: str = ""
    epoch: int = 0
    lease_until: int = 0
    last_segment: str = ""
    discarded: tuple[str, ...] = ()  # segments that were committed, and lost by the disk

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def unanswered(self) -> int:
        """Lines that have neither an answer nor an error yet."""
        return self.total - self.counts.completed - self.counts.failed

    def body(self) -> dict[str, Any]:
        """The JSON that clients see."""
        c = self.counts
        errors = [dataclasses.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": c.completed, "failed": c.failed},
            "usage": {
                "input_tokens": c.input_tokens,
                "input_tokens_details": {"cached_tokens": c.cached_tokens},
                "output_tokens": c.output_tokens,
                "output_tokens_details": {"reasoning_tokens": c.reasoning_tokens},
                "total_tokens": c.input_tokens + c.output_tokens,
            },
            "metadata": self.metadata,
        }

    def to_hash(self) -> dict[Field, bytes]:
        """The fields of its Redis hash, each as JSON; one that is None has not been set, and never goes back to it."""
        return {
            f.name: orjson.dumps(value)
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) is not None
        }

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes]) -> Batch:
        known = {f.name for f in dataclasses.fields(cls)}
        raw = {name: orjson.loads(value) for key, value in fields.items() if (name := key.decode()) in known}
        raw["counts"] = Counts(**raw.get("counts", {}))
        raw["errors"] = tuple(LineError(**error) for error in raw.get("errors", ()))
        raw["discarded"] = tuple(raw.get("discarded", ()))
        return cls(**raw)

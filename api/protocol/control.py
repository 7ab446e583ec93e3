"""The control routes: what an operator may ask of the workers of a model, and the shape of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from .common import RequestModel, StrList


class PoolRequest(RequestModel):
    """Whose workers are meant. May be left out where one base model is registered."""

    model: str | None = None


class PauseRequest(PoolRequest):
    """`abort` ends what runs, `retract` has it compute its K/V again afterwards, `in_place` leaves it as it is."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortRequest(PoolRequest):
    """Requests by id (an answer's `id`, or `meta_info.id`), or all that are unfinished, of one model or of all."""

    rid: Annotated[StrList, Field(min_length=1)] | None = None
    abort_all: bool = False


class WorkerBody(TypedDict):
    """What one worker did."""

    id: str
    host: str
    pid: int
    detail: dict[str, Any]


class ControlBody(TypedDict):
    success: Literal[True]
    workers: list[WorkerBody]

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


class UpdateWeightsRequest(PoolRequest):
    """`model_path` is a folder that every worker sees. `mode` says what becomes of the requests that run, as in
    PauseRequest: those that are retracted go on with the new weights, and with K/V that is computed anew."""

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # by default the folder's name
    mode: Literal["abort", "retract", "in_place"] = "retract"


class ProfileRequest(PoolRequest):
    """How many steps of each worker are traced."""

    num_steps: int = Field(20, ge=1, le=1000)


class LoadLoraRequest(PoolRequest):
    """An adapter as PEFT saves it, in a folder that every worker of the base model `model` sees. One that has the name
    already is replaced; what runs with it goes on."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadLoraRequest(RequestModel):
    lora_name: Annotated[str, Field(min_length=1)]


class WorkerBody(TypedDict):
    """What one worker did."""

    id: str
    host: str
    pid: int
    detail: dict[str, Any]


class ControlBody(TypedDict):
    success: Literal[True]
    workers: list[WorkerBody]

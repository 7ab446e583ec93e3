"""The worker's settings. Checked at start; what is wrong is a `ConfigError` that names key and value."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ..shared.settings import Bytes, HealthSettings, StrTuple


class WorkerSettings(HealthSettings):
    """One worker process serves one model. A number of 0 means: choose by device and memory."""

    model: str = Field("", description="NAME=DIR, DIR, or a hub id: the model to serve")
    served_model_name: str = Field("", description="what clients call the model; by default NAME or the folder's name")
    task: Literal["auto", "generate", "embed", "classify"] = Field(
        "auto", description="what the model is served for; auto: what its folder says"
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto", description="of embeddings; auto: what the folder says, else mean, or last for a decoder"
    )
    normalize: Literal["auto", "yes", "no"] = Field(
        "auto", description="embeddings to length 1; auto: what the folder says, else yes"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and K/V")
    weight_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto",
        description="of the linears on a CPU that computes in float32; auto: two bytes where that loses nothing; "
        "float32: torch's own linears",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    context_length: int = Field(0, ge=0, description="tokens, prompt and output together; 0: the model's own")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: OMP_NUM_THREADS, or one per core")
    kv_memory: Bytes = Field(0, ge=0, description="memory of the K/V pool (2gb); 0: by what is free")
    block_size: int = Field(16, ge=1, description="tokens of one K/V block")
    max_running: int = Field(0, ge=0, description="sequences that generate together; 0: 32 on a CPU, 256 on a GPU")
    max_batch_tokens: int = Field(0, ge=0, description="tokens of one step; 0: 256 on a CPU, 8192 on a GPU")
    prefix_cache: Literal["tenant", "shared", "off"] = Field(
        "tenant",
        description="who finds K/V of prompts that begin alike: each tenant its own, or all (answers come sooner then, "
        "which tells one tenant what another has sent)",
    )
    attention_backend: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="auto: compiled kernels where there are; torch: its own operations; triton: its kernels on a GPU "
        "(on a CPU in its interpreter, which is for tests)",
    )
    cuda_graphs: bool = Field(True, description="repeat decoding steps on a GPU as CUDA graphs")
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="plan a step while the one before runs; auto: on a GPU, for a CPU gains nothing by it. With "
        "--speculate it is off: guesses follow from the newest token",
    )
    speculate: int = Field(
        0, ge=0, le=32, description="tokens guessed per step from what the sequence said before, and checked; 0: none"
    )
    deterministic: bool = Field(
        False, description="same bytes whatever the batch; free, and so always on, where the log at start says so"
    )
    lora: StrTuple = Field(
        (), description="NAME=DIR, a PEFT adapter of the model to serve as NAME; several may be given"
    )
    max_loras: int = Field(8, ge=0, description="adapters that may be loaded at a time")
    max_lora_rank: int = Field(64, ge=1, description="largest rank of an adapter")
    profile_dir: str = Field("", description="folder for the traces that /start_profile asks for; by default refused")
    scripted: str = Field("", description="replay this JSON-lines file instead of running a model")
    stream_interval: int = Field(1, ge=1, description="tokens per published chunk, after the first token")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get after SIGTERM")

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("should be auto, cpu, cuda or cuda:N")
        return value

    @field_validator("lora")
    @classmethod
    def _lora(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            if not all(item.partition("=")):
                raise ValueError("should be NAME=DIR, a name and the folder of a PEFT adapter")
        return value

    def adapters(self) -> dict[str, str]:
        """The folder of each adapter by name."""
        return {name: folder for name, _, folder in (item.partition("=") for item in self.lora)}

    @model_validator(mode="after")
    def _budget(self) -> WorkerSettings:
        if 0 < self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is under max_running={self.max_running}: "
                "a step must have room for one token of each running sequence"
            )
        return self

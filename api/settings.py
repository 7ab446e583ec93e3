"""Settings of `headrace api`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..shared.settings import StrTuple
from .files.settings import FileSettings


class InferenceSettings(FileSettings):
    """What decides how a body is read and answered: the same for a request online and for a line of a batch."""

    chat_template: str = Field("", description=".jinja file used instead of the models' own chat templates")
    chat_template_content_format: Literal["auto", "string", "parts"] = Field(
        "auto", description="how templates get message content: as a string, as a list of parts, or as they read it"
    )
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize long prompts")
    max_tokenizers: int = Field(8, ge=1, description="tokenizers kept loaded")

    max_n: int = Field(128, ge=1, description="choices of one request: n times its prompts")
    max_texts: int = Field(2048, ge=1, description="texts of one request to embed or classify")
    max_stop: int = Field(16, ge=0, description="stop strings of one request")
    max_stop_chars: int = Field(1000, ge=1, description="characters of one stop string")
    max_logprobs: int = Field(20, ge=0, description="most likely tokens shown beside each token")

    keep_s: float = Field(600.0, gt=0, description="seconds a finished stream's text is kept for clients to resume")
    reader_lease_s: float = Field(20.0, gt=0, description="seconds until a dead replica's requests are cancelled")
    max_waiting: int = Field(10_000, ge=1, description="choices that may wait in one lane of a model; beyond it is 429")
    max_waiting_tenant: int = Field(10_000, ge=1, description="the same for one tenant (the name of its api key)")
    control_wait_s: float = Field(30.0, gt=0, description="seconds that workers get to obey a control route")
    load_wait_s: float = Field(600.0, gt=0, description="seconds that workers get to read new weights or an adapter")


class ApiSettings(InferenceSettings):
    """One API replica. It takes no model: it serves whatever the registry lists."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    fd: int = Field(-1, description="file descriptor of a listening socket to take over, instead of host and port")
    name: str = Field("", description="this replica's name in the process registry; by default host and pid")

    api_key: StrTuple = Field((), description="key that clients must send, KEY or TENANT:KEY; several may be given")
    admin_key: str = Field("", description="key of the control routes; by default any api key opens them")

    max_body_mb: int = Field(32, ge=1, description="largest JSON body, in MB")
    request_deadline_s: float = Field(3600.0, gt=0, description="seconds until an unfinished request fails")

    first_token_wait_s: float = Field(
        10.0, ge=0, description="seconds a stream's headers wait for the first token, so that errors have a status"
    )
    keep_alive_s: float = Field(15.0, gt=0, description="seconds of silence after which a stream sends a comment")
    slow_reader_s: float = Field(
        30.0, gt=0, description="seconds that a client may take nothing of a stream; then its connection is closed"
    )
    resume_grace_s: float = Field(
        2.0, ge=0, description="seconds a stream goes on without its client; X-Resume-Grace asks for another value"
    )
    max_resume_grace_s: float = Field(60.0, ge=0, description="largest grace a client may ask for, in seconds")
    drain_delay_s: float = Field(
        0.0, ge=0, description="seconds that it goes on accepting after SIGTERM, while /health says draining"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that open requests may take to finish on SIGTERM")

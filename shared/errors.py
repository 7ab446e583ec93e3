"""Every error that headrace raises on purpose, one tree.

    HeadraceError
    ├── ConfigError            a setting, a folder, a port: the process does not start (exit status 2)
    │   ├── ModelRefused       a model folder that cannot be served
    │   └── StoreRefused       a Redis that is too old, evicts, or holds another schema
    ├── RequestError           what a client did wrong, or must wait for: an HTTP status and OpenAI's error shape
    │   ├── InvalidRequest     400
    │   │   └── ContextLengthExceeded
    │   ├── InvalidApiKey      401
    │   ├── NotFound           404
    │   │   └── ModelNotFound
    │   ├── StreamGone         410
    │   ├── Conflict           409
    │   ├── TooLarge           413
    │   ├── Overloaded         429, with Retry-After
    │   └── Unavailable        503
    ├── ProtocolError          a message or reply that cannot be read: poison, or a role of another release
    ├── StoreUnavailable       Redis did not answer within its limit
    ├── Fenced                 another process owns this request or shard now
    └── EngineError            generation failed for a reason that is ours

Foreign errors (redis, pydantic, torch) are translated where they enter. A message names the key, the value and
what happens next, and never a file path or a stack when a client will read it.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of the tree."""


class ConfigError(HeadraceError):
    """A process cannot start as asked. Its text goes to standard error; the exit status is 2."""


class ModelRefused(ConfigError):
    """A model folder is missing, broken, or of an architecture that cannot be served."""


class StoreRefused(ConfigError):
    """The Redis server is too old, evicts keys, or speaks another schema."""


class RequestError(HeadraceError):
    """A request that cannot be served, in OpenAI's terms.

    Args:
        message: what is wrong, naming the value.
        param: the request's field, dotted (``messages.0.content``), or None.
        code: a machine-readable code, or None.
    """

    status = 400
    type = "invalid_request_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError):
    """400: the request itself is wrong."""


class ContextLengthExceeded(InvalidRequest):
    """400: prompt and requested output do not fit the model's context."""

    default_code = "context_length_exceeded"


class InvalidApiKey(RequestError):
    """401: no key, or one that is not known."""

    status = 401
    default_code = "invalid_api_key"


class NotFound(RequestError):
    """404: no such object."""

    status = 404


class ModelNotFound(NotFound):
    """404: no model of that name is registered."""

    default_code = "model_not_found"


class Conflict(RequestError):
    """409: the object's state does not allow it."""

    status = 409


class StreamGone(RequestError):
    """410: the stream asked for has passed its lifetime."""

    status = 410
    default_code = "stream_gone"


class TooLarge(RequestError):
    """413: the body is over the limit."""

    status = 413
    default_code = "request_too_large"


class Overloaded(RequestError):
    """429: a queue or the memory is full. ``retry_after_s`` says when to come again, in seconds."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1, param: str | None = None, code: str | None = None):
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """503: starting, draining, or the store does not answer."""

    status = 503
    type = "service_unavailable_error"
    default_code = "service_unavailable"


class ProtocolError(HeadraceError):
    """A message that cannot be read."""


class StoreUnavailable(HeadraceError):
    """Redis did not answer within its limit."""


class Fenced(HeadraceError):
    """Another process holds what this one thought its own; it must let go and write nothing."""


class EngineError(HeadraceError):
    """Generation failed for a reason that is ours, not the client's."""

"""What is measured of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds on the generator's monotonic clock.

    `start` is when the request was due: a moment before it was sent in a closed loop, its arrival in an open one. So a
    generator that falls behind shows in the latencies, and in `sent - start`, instead of sparing the server.
    """

    start: float
    sent: float = 0.0
    end: float = 0.0
    text_times: list[float] = field(default_factory=list)  # when each event with text in it came
    chunks: int = 0  # events of every kind
    prompt_tokens: int | None = None  # by the server's usage
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """By the server's usage where it sent one, else one for each event with text."""
        return len(self.text_times) if self.completion_tokens is None else self.completion_tokens

"""`headrace chat`: talk to a running server in the terminal, over the same HTTP API as everyone."""

from __future__ import annotations

import os

from pydantic import Field
from rich.console import Console

from ..shared.settings import Settings, StrTuple
from .client import ApiClient


class ChatSettings(Settings):
    """`headrace chat`."""

    url: str = Field("http://127.0.0.1:8000", description="the server")
    model: str = Field("", description="which model; by default the server's first")
    api_key: StrTuple = Field((), description="key to send; by default OPENAI_API_KEY")
    system: str = Field("", description="system message")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")
    temperature: float = Field(0.7, ge=0, description="0 is greedy")


def run(settings: ChatSettings) -> int:
    """Read lines from the terminal and stream the answers, until end of input.

    Raises:
        RequestFailed: the server does not answer, or refuses.
    """
    key = settings.api_key[0] if settings.api_key else os.environ.get("OPENAI_API_KEY", "")
    console = Console(highlight=False)
    messages = beginning = [{"role": "system", "content": settings.system}] if settings.system else []
    with ApiClient(settings.url, key) as client:
        model = settings.model or client.first_model()
        console.print(f"{model} at {settings.url}; /new begins again, Ctrl-D leaves", style="dim")
        while (question := _ask(console)) is not None:
            if question == "/new":
                messages = beginning
                continue
            messages = [*messages, {"role": "user", "content": question}]
            answer = ""
            options = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
            for text in client.stream_chat(model, messages, **options):
                console.print(text, end="", markup=False, soft_wrap=True)
                answer += text
            console.print()
            messages = [*messages, {"role": "assistant", "content": answer}]
    return 0


def _ask(console: Console) -> str | None:
    """The next line that says something; None at the end of input."""
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except EOFError:
            return None
        if line:
            return line

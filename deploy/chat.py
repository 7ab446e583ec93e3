"""`headrace chat`: talk to a running server in the terminal, over the same HTTP API as everyone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
from pydantic import Field

from ..shared.errors import ConfigError
from ..shared.settings import Settings, StrTuple

READ_LIMIT_S = 300.0


class ChatSettings(Settings):
    """`headrace chat`."""

    url: str = Field("http://127.0.0.1:8000", description="the server")
    model: str = Field("", description="which model; by default the server's first")
    api_key: StrTuple = Field((), description="key to send")
    system: str = Field("", description="system message")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")
    temperature: float = Field(0.7, ge=0, description="0 is greedy")


class ChatFailed(ConfigError):
    """The server does not answer, or answers with an error."""


class ChatClient:
    """A conversation with one model of one server."""

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=READ_LIMIT_S))
        self._url = url
        self.model = model or self._first_model()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Yield the answer's text as it comes.

        Raises:
            ChatFailed: the server is gone or refuses.
        """
        body = {"model": self.model, "messages": messages, "stream": True} | options
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatFailed(_error_of(response))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _text_of(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as e:
            raise ChatFailed(f"{self._url} does not answer: {e}; is `headrace serve` running there?") from e

    def _first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except httpx.TransportError as e:
            raise ChatFailed(f"{self._url} does not answer: {e}; is `headrace serve` running there?") from e
        if response.status_code != 200:
            raise ChatFailed(_error_of(response))
        models = response.json()["data"]
        if not models:
            raise ChatFailed(f"{self._url} serves no model yet")
        return str(models[0]["id"])


def run(settings: ChatSettings) -> int:
    """Read lines from the terminal and stream the answers, until end of input.

    Raises:
        ChatFailed: the server does not answer.
    """
    from rich.console import Console

    key = settings.api_key[0] if settings.api_key else os.environ.get("OPENAI_API_KEY", "")
    console = Console()
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    with ChatClient(settings.url, key, settings.model) as client:
        console.print(f"{client.model} at {settings.url}; Ctrl-D leaves, /new begins again", style="dim")
        while (question := _ask(console)) is not None:
            if question == "/new":
                messages = [m for m in messages if m["role"] == "system"]
                continue
            messages.append({"role": "user", "content": question})
            answer = ""
            for text in client.stream(messages, max_tokens=settings.max_tokens, temperature=settings.temperature):
                console.print(text, end="", markup=False, highlight=False)
                answer += text
            console.print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask(console: Any) -> str | None:
    """The next line that says something; None at the end of input."""
    while True:
        try:
            line = str(console.input("[bold]> [/bold]")).strip()
        except EOFError:
            return None
        if line:
            return line


def _text_of(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ChatFailed(event["error"].get("message", str(event["error"])))
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"

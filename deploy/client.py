"""A small client of the HTTP API, for the terminal's commands. Programs use any OpenAI SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from ..shared.errors import ConfigError

CONNECT_LIMIT_S = 10.0
READ_LIMIT_S = 300.0


class RequestFailed(ConfigError):
    """The server does not answer, or answers with an error."""


class ApiClient:
    """One server, one key.

    Every method raises RequestFailed with the server's own words.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(CONNECT_LIMIT_S, read=READ_LIMIT_S)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self.url = url

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return self._send("GET", path).json()

    def get_text(self, path: str) -> str:
        return self._send("GET", path).text

    def post(self, path: str, **content: Any) -> Any:
        """The JSON of a POST; `content` as httpx takes it."""
        return self._send("POST", path, **content).json()

    def first_model(self) -> str:
        models = self.get("/v1/models")["data"]
        if not models:
            raise RequestFailed(f"{self.url} serves no model yet")
        return str(models[0]["id"])

    def stream_chat(self, model: str, messages: Sequence[dict[str, str]], **options: Any) -> Iterator[str]:
        """Yield an answer's text as it comes; `options` are fields of the request."""
        body = {"model": model, "messages": list(messages), "stream": True} | options
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _check(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _texts(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as e:
            raise self._gone(e) from e

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return _check(self._http.request(method, path, **content))
        except httpx.TransportError as e:
            raise self._gone(e) from e

    def _gone(self, error: httpx.TransportError) -> RequestFailed:
        return RequestFailed(f"{self.url} does not answer ({error}); is `headrace serve` running there?")


def _check(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise RequestFailed(f"{response.request.url.path} answered {response.status_code}: {message}")


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise RequestFailed(f"the answer broke off: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text

"""A small OpenAI-compatible server for testing clients of one: what it answers is said by the model's name.

good        streams `max_tokens` words, or answers with as many, with the usage it was asked for
no-usage    the same without any usage
pairs       two tokens in every event
broken      500 with an error in OpenAI's shape
html        502 with a page
cut         ends the stream after one word, without [DONE]
dropped     closes the connection after one word
fails       sends an error event after one word
silent      never answers
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from kit.loopback import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class FakeOpenAI:
    """The running server: where it is, and what it has been asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "good"}]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        chat = request.url.path.endswith("chat/completions")
        match body["model"]:
            case "broken":
                return JSONResponse({"error": {"message": "out of order", "type": "server_error"}}, 500)
            case "html":
                return HTMLResponse("<h1>Bad\nGateway</h1>", 502)
            case "silent":
                while (await request.receive())["type"] != "http.disconnect":
                    pass
        if body["stream"]:
            return StreamingResponse(self._counted(self._stream(body, chat)), media_type="text/event-stream")
        text = " ".join(["word"] * body["max_tokens"])
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return JSONResponse({"choices": [choice]} | _usage(body))

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for event in events:
                await asyncio.sleep(0)  # let the other requests in between
                yield event
        finally:
            self.in_flight -= 1

    async def _stream(self, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        size = 2 if body["model"] == "pairs" else 1
        for _ in range(body["max_tokens"] // size):
            text = " word" * size
            yield _event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            match body["model"]:
                case "cut":
                    return
                case "dropped":
                    raise ConnectionResetError("dropped on purpose")
                case "fails":
                    yield _event({"error": {"message": "worker lost"}})
                    break
        if body["model"] == "undone":
            yield _event({"choices": [{"text": "", "finish_reason": "length"}]} | _usage(body))
            return
        if body.get("stream_options", {}).get("include_usage") and body["model"] != "no-usage":
            yield _event({"choices": []} | _usage(body))
        yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt") or body["messages"][0]["content"]
    tokens = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
    return {} if body["model"] == "no-usage" else {"usage": tokens}


@contextlib.contextmanager
def fake_openai() -> Iterator[FakeOpenAI]:
    """Run the server on a loopback port of its own."""
    fake = FakeOpenAI()
    routes = [Route("/v1/models", fake.models)]
    routes += [Route(f"/v1/{p}", fake.generate, methods=["POST"]) for p in ("completions", "chat/completions")]
    with serve(Starlette(routes=routes)) as url:
        fake.url = url
        yield fake

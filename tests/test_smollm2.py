"""The whole path on real weights: each answer equals transformers' own `generate()`, streamed or not, alone or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit.prompts import PROMPTS
from kit.serving import Serve
from openai import OpenAI

MODEL = os.environ.get("HEADRACE_TEST_MODEL", "")
MAX_TOKENS = 16

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL and not os.environ.get("CI"), reason="HEADRACE_TEST_MODEL names no model"),
]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """transformers' greedy answers in float32, each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = out[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return answers


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    data = tmp_path_factory.mktemp("serve") / "data"
    with Serve(Path(data), "--model", f"smollm2={MODEL}", "--dtype", "float32") as serve:
        url = serve.ready()
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client
        assert serve.stop() == 0


def answer(client: OpenAI, prompt: str) -> str:
    reply = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=MAX_TOKENS
    )
    return reply.choices[0].message.content or ""


def streamed(client: OpenAI, prompt: str) -> str:
    chunks = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_alone_each_streamed_answer_is_generates(client: OpenAI, expected: list[str]) -> None:
    assert [streamed(client, prompt) for prompt in PROMPTS] == expected


def test_sixteen_at_once_each_answer_is_generates(client: OpenAI, expected: list[str]) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda prompt: answer(client, prompt), PROMPTS)) == expected


def test_sixteen_streams_at_once_too(client: OpenAI, expected: list[str]) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda prompt: streamed(client, prompt), PROMPTS)) == expected

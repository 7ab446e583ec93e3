"""What a chaotic run asks for, and what it must be told: of scripted workers, or of a tiny model asked before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
from kit.tokenizers import byte_level

STOP = "<|end|>"
PATTERN = "<tool [^>]*>"
TEXTS = {
    "short": "Grüße!",
    "middle": "世界 <|end 🌶 and <|e more" * 2,
    "pattern": "a stone, <to be>, a 世 <tool",
    "long": "the water turns the wheel, " * 5,
}
ENDS = {"middle": STOP, "pattern": "<tool 世=7 >"}  # what ends an answer, and is cut off


@dataclass(frozen=True)
class Case:
    """A completion's body, where `{key}` stands for what makes a request differ from others; and its answer."""

    body: Mapping[str, Any]
    text: str = ""
    finish: str = "stop"
    tokens: int = 0

    def asked(self, key: str) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 400, **self.body, "prompt": self.body["prompt"].replace("{key}", key)}


@dataclass(frozen=True)
class Work:
    """All that is asked for. `chat` are the fields of each line of a batch beside its message `{key}`."""

    cases: Mapping[str, Case]
    endless: Case
    chat: Mapping[str, Any] = field(default_factory=dict)
    chat_message: str = "short {key}"
    chat_text: str = TEXTS["short"]


def scripts() -> list[dict[str, Any]]:
    """Each text a byte a token: those of `ENDS` are ended by a stop string or a pattern, the others by themselves."""
    spell = byte_level().spelled
    lines = [{"when": "endless", "tokens": 500, "tokens_per_s": 5}]
    for name, text in TEXTS.items():
        ids = spell(text + (ENDS[name] + " never read" if name in ENDS else ""))
        lines.append({"when": name, "steps": [[i] for i in ids], "finish": "stop", "step_ms": 25})
    return lines


def scripted() -> Work:
    def case(name: str) -> Case:
        tokens = len((TEXTS[name] + ENDS.get(name, "")).encode())
        return Case({"prompt": f"{name} {{key}}", "stop": STOP, "stop_regex": PATTERN}, TEXTS[name], "stop", tokens)

    return Work({name: case(name) for name in TEXTS}, Case({"prompt": "endless {key}"}))


# Of a random model: what goes on from token to token beside the tokens themselves is the seed's position, the counts
# that penalties need, the grammar's state, the tokens that are still owed, and half a stop string.
MODEL = {
    "greedy": {"prompt": "the water turns", "max_tokens": 90, "temperature": 0, "frequency_penalty": 0.5},
    "sampled": {"prompt": "the wheel turns", "max_tokens": 110, "seed": 7, "temperature": 0.9, "top_p": 0.95},
    "grammar": {"prompt": "the mill", "max_tokens": 120, "seed": 3, "regex": "([a-z]{3} ){20}"},
    "owed": {"prompt": "a stone", "max_tokens": 100, "min_tokens": 60, "seed": 5, "presence_penalty": 1.5},
}
CHAT: dict[str, Any] = {"seed": 11, "max_tokens": 20}


def of_model(url: str) -> Work:
    """The answers of a model while nothing befalls it."""
    cases = {name: _answered(url, Case(body)) for name, body in MODEL.items()}
    whole = cases["sampled"].text
    stop = whole[len(whole) // 2 :][:4]
    cases["stopped"] = _answered(url, Case(MODEL["sampled"] | {"stop": stop}))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "short"}]
        answer: Any = client.chat.completions.create(model="m", messages=messages, **CHAT)
    endless = Case({"prompt": "an endless {key}", "max_tokens": 150, "ignore_eos": True})
    return Work(cases, endless, CHAT, "short", answer.choices[0].message.content)


def _answered(url: str, case: Case) -> Case:
    body = case.asked("")
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=False, trust_env=False)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    choice = value["choices"][0]
    tokens = value["usage"]["completion_tokens"]
    return replace(case, text=choice["text"], finish=choice["finish_reason"], tokens=tokens)

"""What a model folder says about itself, read without torch: the card that api and detokenizer work from.

config.json             architecture, context length, vocabulary, rotary scaling
generation_config.json  sampling defaults, eos ids
tokenizer.json          the tokenizer itself; its sha256 is its name
modules.json, sentence_bert_config.json   of an embedding model: that it is one, and how long its texts may be
tokenizer_config.json   special tokens, chat template (or chat_template.jinja beside it)
"""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any

import orjson

from ..shared.errors import ConfigError, ModelRefused
from ..shared.messages import Task
from ..shared.model_card import ModelCard
from .settings import WorkerSettings

# Their first token stands at the position after the padding's own id, so that so many positions are lost.
_POSITIONS_AFTER_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet", "longformer", "xmod", "ibert"}
)
_SIZE_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")


def load_card(settings: WorkerSettings) -> tuple[ModelCard, bytes]:
    """Read the card of `settings.model` and the bytes of its tokenizer.json.

    Raises:
        ModelRefused: the folder or a file of it is missing or broken.
        ConfigError: --context-length is more than the model can do.
    """
    name, folder = resolve_model(settings)
    config = _read_json(folder, "config.json", required=True)
    tokenizer = _read_tokenizer(folder)
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    generation = _read_json(folder, "generation_config.json")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelRefused(f"--model {folder}: config.json: text_config should be an object, got {text!r}")
    _check_numbers(folder, text)
    card = ModelCard(
        name=name,
        pool=_pool(name),
        tokenizer=hashlib.sha256(tokenizer).hexdigest(),
        context_length=_context_length(settings, text, _trained_length(folder)),
        vocab_size=int(text.get("vocab_size", 0)),
        eos_token_ids=_eos_token_ids(generation, config, text),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=_token_text(tokenizer_config.get("eos_token")),
        chat_template=_chat_template(folder, tokenizer_config),
        generation_config=generation,
        architecture=(config.get("architectures") or [""])[0],
        task=_task(settings, folder, config),
        labels=_labels(config),
        multi_label=config.get("problem_type") == "multi_label_classification",
        created=int(time.time()),
    )
    return card, tokenizer


def _check_numbers(folder: Path, text: dict[str, Any]) -> None:
    """Raises ModelRefused where a number that this card or a pool of K/V depends on is none, or is not positive."""
    for key in (*_CONTEXT_KEYS, *_SIZE_KEYS):
        value = text.get(key)
        if isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < 1):  # lists are by layer
            raise ModelRefused(f"--model {folder}: config.json: {key} should be a positive integer, got {value!r}")


def _pool(name: str) -> str:
    """A name that can stand in a key; two models never share one, or they would run each other's jobs."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def resolve_model(settings: WorkerSettings) -> tuple[str, Path]:
    """The name clients use and the folder of `--model NAME=DIR` or `DIR`. The command line has fetched what was a name
    of the catalog or a hub id.

    Raises:
        ModelRefused: there is no such folder.
    """
    name, separator, place = settings.model.partition("=")
    if not separator:
        name, place = "", settings.model
    if not place:
        raise ConfigError("--model (HEADRACE_MODEL): give NAME=DIR, a model folder, or a hub id; got nothing")
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise ModelRefused(f"--model {place}: no such folder; give one with config.json")
    return settings.served_model_name or name or folder.resolve().name, folder


def _read_json(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        if required:
            raise ModelRefused(f"--model {folder}: has no {name}; it should be a Hugging Face model folder")
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise ModelRefused(f"--model {folder}: {name} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelRefused(f"--model {folder}: {name} should be a JSON object")
    return value


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelRefused(
            f"--model {folder}: has no tokenizer.json. Convert the tokenizer once with "
            f'`AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")`'
        )
    blob = path.read_bytes()
    try:
        value = orjson.loads(blob)
    except orjson.JSONDecodeError as e:
        raise ModelRefused(f"--model {folder}: tokenizer.json is not JSON: {e}") from e
    if not isinstance(value, dict) or not isinstance(value.get("model"), dict):
        raise ModelRefused(f"--model {folder}: tokenizer.json is no tokenizer: it should be an object with a model")
    return blob


def _task(settings: WorkerSettings, folder: Path, config: dict[str, Any]) -> Task:
    """What the model is served for: what was set, or what its folder says."""
    if settings.task != "auto":
        return settings.task
    architecture = (config.get("architectures") or [""])[0]
    if architecture.endswith(("ForSequenceClassification", "ForRewardModel")):
        return "classify"
    if (folder / "modules.json").is_file() or architecture.endswith(("Model", "ForMaskedLM")):
        # A bare model has no head that predicts text; GPT2LMHeadModel and its like have one, and say so.
        return "generate" if architecture.endswith("LMHeadModel") else "embed"
    return "generate"


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's classes, in their order; empty where config.json has none."""
    named = config.get("id2label")
    if not isinstance(named, dict):
        named = {}
    count = max(len(named), int(config.get("num_labels") or 0))
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))


def _trained_length(folder: Path) -> int:
    """Tokens of the texts that an embedding model was trained on; 0: its folder does not say."""
    return int(_read_json(folder, "sentence_bert_config.json").get("max_seq_length") or 0)


def _context_length(settings: WorkerSettings, text: dict[str, Any], trained: int) -> int:
    default, limit, why = _model_context(text)
    if 0 < trained < (default or trained + 1):
        default = trained
    asked = settings.context_length
    if limit and asked > limit:
        raise ConfigError(f"--context-length (HEADRACE_CONTEXT_LENGTH): {why} {limit} tokens, got {asked}")
    if not (asked or default):
        raise ConfigError("--context-length (HEADRACE_CONTEXT_LENGTH): config.json names none, so it must be given")
    return asked or default


def _model_context(text: dict[str, Any]) -> tuple[int, int, str]:
    """The context in tokens unless told, the longest there is (0: not said), and a phrase that says why."""
    limit = next((int(text[key]) for key in _CONTEXT_KEYS if text.get(key)), 0)
    if text.get("model_type") in _POSITIONS_AFTER_PADDING and limit:
        limit -= int(text.get("pad_token_id") or 0) + 1
    chunk = text.get("attention_chunk_size")
    if chunk and (not limit or int(chunk) < limit):
        return int(chunk), int(chunk), "the model attends in chunks, and this release serves one chunk:"
    for rope in _rope_parameters(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("longrope", "dynamic"):
            # One set of frequencies serves all requests (worker/engine/rope.py): the original context's unless asked.
            original = int(rope.get("original_max_position_embeddings") or _original(text) or limit)
            longest = limit if kind == "longrope" else int(original * float(rope.get("factor") or 1))
            return original, max(longest, original), f"with {kind} rotary scaling, the model's context is"
    return limit, limit, "the model's context is"


def _original(text: dict[str, Any]) -> int:
    return int(text.get("original_max_position_embeddings") or 0)


def _rope_parameters(text: dict[str, Any]) -> list[dict[str, Any]]:
    """All rotary settings: one dict, or one per layer type."""
    found = [value for key in ("rope_parameters", "rope_scaling") if isinstance(value := text.get(key), dict)]
    return found + [inner for value in found for inner in value.values() if isinstance(inner, dict)]


def _eos_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            wrong = next((v for v in values if type(v) is not int), None)
            if wrong is not None:
                raise ModelRefused(f"--model: eos_token_id should be a token id, or a list of them, got {wrong!r}")
            return tuple(values)
    return ()


def _token_text(token: Any) -> str:
    """A special token of tokenizer_config.json: a string, or an object with `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ModelRefused(f"--model {folder}: chat_template.jinja is not UTF-8: {e}") from e
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return str(template) if template else None

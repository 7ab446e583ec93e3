"""Model folders: what is read from them, and which are refused with a sentence that helps."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from headrace.shared.errors import ConfigError, ModelRefused
from headrace.shared.settings import load
from headrace.worker.card import load_card
from headrace.worker.engine import build
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.loader import load_model
from headrace.worker.settings import WorkerSettings
from kit import engines, tiny_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "tiny")


def change(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def card_of(folder: Path, **settings: Any) -> Any:
    return load_card(WorkerSettings(model=str(folder), **settings))[0]


def test_card_says_what_the_folder_says(folder: Path) -> None:
    card, tokenizer = load_card(WorkerSettings(model=f"my model={folder}"))
    assert card.name == "my model"
    assert re.fullmatch(r"my_model-[0-9a-f]{8}", card.pool)  # which no model named my_model shares
    assert load_card(WorkerSettings(model=f"my_model={folder}"))[0].pool == "my_model"
    assert card.tokenizer == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer == (folder / "tokenizer.json").read_bytes()
    assert card.context_length == tiny_models.CONTEXT_LENGTH
    assert card.vocab_size == tiny_models.VOCAB_SIZE
    assert card.eos_token_ids == (tiny_models.EOS_ID,)
    assert (card.bos_token, card.eos_token) == ("<|begin|>", "<|im_end|>")
    assert card.chat_template == tiny_models.CHAT_TEMPLATE
    assert card.architecture == "LlamaForCausalLM"


def test_name_is_the_folders_unless_told(folder: Path) -> None:
    assert card_of(folder).name == "tiny"
    assert card_of(folder, served_model_name="other").name == "other"


def test_generation_config_wins_for_eos_and_a_template_file_wins(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[2, 4], temperature=0.6)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    card = card_of(folder)
    assert card.eos_token_ids == (2, 4)
    assert card.generation_config["temperature"] == 0.6
    assert card.chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change(folder, "tokenizer_config.json", chat_template=named)
    assert card_of(folder).chat_template == "d"


def test_context_length_may_be_lowered_but_not_raised(folder: Path) -> None:
    assert card_of(folder, context_length=64).context_length == 64
    with pytest.raises(ConfigError, match=r"--context-length .* 256 tokens, got 257"):
        card_of(folder, context_length=257)


def test_rotary_scaling_by_length_serves_the_original_context_unless_asked_for_more(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    change(folder, "config.json", rope_parameters=rope)
    assert card_of(folder).context_length == 128
    assert card_of(folder, context_length=512).context_length == 512
    with pytest.raises(ConfigError, match=r"dynamic rotary scaling.* 512 tokens, got 513"):
        card_of(folder, context_length=513)


def test_chunked_attention_serves_one_chunk(folder: Path) -> None:
    change(folder, "config.json", attention_chunk_size=64)
    assert card_of(folder).context_length == 64
    with pytest.raises(ConfigError, match=r"serves one chunk: 64 tokens, got 65"):
        card_of(folder, context_length=65)


def test_card_reads_without_torch(folder: Path) -> None:
    code = (
        "import sys; from headrace.worker.card import load_card; from headrace.worker.settings import WorkerSettings; "
        f"load_card(WorkerSettings(model={str(folder)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json. Convert the tokenizer once with"),
        ("model.safetensors", "the weights cannot be read"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, name: str, says: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelRefused, match=says):
        engines.tiny_engine(folder)


def test_no_folder_no_name_and_broken_json_are_refused(folder: Path) -> None:
    with pytest.raises(ModelRefused, match=r"/nowhere/at/all: no such folder"):
        card_of(Path("/nowhere/at/all"))
    with pytest.raises(ConfigError, match="give NAME=DIR"):
        load_card(WorkerSettings())
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config.json is not JSON"):
        card_of(folder)


BROKEN: dict[str, dict[str, Any]] = {
    r"num_hidden_layers should be a positive integer, got 0": {"num_hidden_layers": 0},
    r"vocab_size should be a positive integer, got 'many'": {"vocab_size": "many"},
    r"max_position_embeddings should be a positive integer, got -5": {"max_position_embeddings": -5},
    r"text_config should be an object, got 'x'": {"text_config": "x"},
    r"9 weights are missing, such as model.layers.2.input_layernorm.weight": {"num_hidden_layers": 3},
    r"k_proj.weight is \[32, 64\], by config.json it should be \[128, 64\]": {"num_key_value_heads": 8},
    r"config.json is not understood: .*not a multiple": {"num_attention_heads": 3},
    r"config.json is not understood: .*rms_norm_eps": {"rms_norm_eps": "small"},
    r"config.json is not understood: .*long_factor": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    r"the weights cannot be read: KeyError: 'newest'": {"rope_parameters": {"rope_type": "newest", "rope_theta": 1e4}},
    r"the weights cannot be read: KeyError: 'zelu'": {"hidden_act": "zelu"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("says", BROKEN)
def test_a_configuration_that_is_wrong_is_refused(folder: Path, says: str) -> None:
    change(folder, "config.json", **BROKEN[says])
    with pytest.raises(ModelRefused, match=says):
        engines.tiny_engine(folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"\xff" * 4000, r"the weights cannot be read: .*header"),
        ("model.safetensors", b"", r"the weights cannot be read"),
        ("tokenizer.json", b"{", r"tokenizer.json is not JSON"),
        ("tokenizer.json", b"[]", r"tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config.json should be a JSON object"),
        ("generation_config.json", b"\xff", r"generation_config.json is not JSON"),
        ("generation_config.json", b'{"eos_token_id": ["end"]}', r"eos_token_id should be a token id.* got 'end'"),
        ("chat_template.jinja", b"\xff", r"chat_template.jinja is not UTF-8"),
    ],
)
def test_a_file_that_is_broken_is_refused(folder: Path, name: str, content: bytes, says: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=says):
        engines.tiny_engine(folder)


def test_weights_that_are_not_safetensors_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # a pickle runs what its writer wanted
    with pytest.raises(ModelRefused, match=r"the weights cannot be read: .*safetensors"):
        engines.tiny_engine(folder)


def test_a_shard_that_is_not_there_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shard = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shard))
    with pytest.raises(ModelRefused, match=r"the weights cannot be read: .*model-00001-of-00002.safetensors"):
        engines.tiny_engine(folder)


def test_missing_weights_are_refused(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"1 weights are missing, such as model.layers.1.mlp.up_proj.weight"):
        engines.tiny_engine(folder)


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},  # ALiBi, its own attention
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 64},  # recurrent
    "qwen3_next": SMALL | {"intermediate_size": 32, "num_experts": 2, "head_dim": 8, "num_key_value_heads": 2},
    "bert": SMALL | {"intermediate_size": 32},  # sees later tokens
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64},  # encoder-decoder
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_that_cannot_run_over_the_pool_are_refused(tmp_path: Path, architecture: str) -> None:
    config = transformers.AutoConfig.for_model(architecture, **REFUSED[architecture])
    known = type(config) in transformers.AutoModelForCausalLM._model_mapping
    if known:
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        from_config(config).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=f"--model {tmp_path}: .*Serve a decoder-only model"):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), context_length=64)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    change(folder, "config.json", model_type="newest")
    with pytest.raises(ModelRefused, match=r"config.json is not understood"):
        engines.tiny_engine(folder)


def test_a_pool_that_does_not_hold_one_context_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory .* there are 0 MiB, and one context of 256 tokens needs"):
        engines.tiny_engine(folder, kv_memory="8kb")


@pytest.mark.parametrize(
    ("text", "size"), [("2gb", 2 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("4096", 4096), ("8k", 8192)]
)
def test_sizes(text: str, size: int) -> None:
    assert load(WorkerSettings, ["--kv-memory", text], "headrace worker").kv_memory == size


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-memory", "lots"], r"--kv-memory \(HEADRACE_KV_MEMORY\): .*2gb.*got 'lots'"),
        (["--device", "tpu"], r"--device \(HEADRACE_DEVICE\): .*cuda:N.*got 'tpu'"),
        (["--dtype", "int8"], r"--dtype \(HEADRACE_DTYPE\)"),
        (["--max-running", "64", "--max-batch-tokens", "32"], r"max_batch_tokens=32 is under max_running=64"),
        (["--block-size", "0"], r"--block-size \(HEADRACE_BLOCK_SIZE\)"),
    ],
)
def test_wrong_settings_name_key_and_value(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(WorkerSettings, flags, "headrace worker")


def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"torch sees {count} GPUs, got cuda:{count}"):
        TransformersEngine(WorkerSettings(model=str(folder), device=f"cuda:{count}"))


def test_kernels_that_run_on_one_thread_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch brings no GNU OpenMP on macOS."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(build, "runs_alone", lambda: True)
    for count, said in ((1, 0), (2, 1)):
        torch.set_num_threads(count)
        engines.tiny_engine(folder, block_size=16).close()
        assert caplog.text.count(f"run on one thread of {count}") == said
    torch.set_num_threads(threads)

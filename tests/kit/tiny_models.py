"""Tiny random models of real architectures, saved as folders that every role can serve.

    folder = build(tmp_path / "m", "qwen2")     config.json, model.safetensors, tokenizer.json, chat template, …

Each is built by the architecture's own configuration and model classes, so that what runs is what runs for a real
one: grouped KV heads, sliding windows, sinks, experts. The tokenizer is byte-level BPE of 256 bytes and a few specials.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320  # of the models: more than the tokenizer has, as padded embeddings are in real ones
CONTEXT_LENGTH = 256
EOS_ID = 4  # <|im_end|>

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_WINDOWS: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH}

# What each configuration class is given besides _SMALL (gpt2 has names of its own).
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen2": _SMALL,
    "qwen3": _SMALL,
    "mistral": _SMALL | {"sliding_window": 16},
    "gemma2": _SMALL | _WINDOWS | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": _SMALL | _WINDOWS | {"query_pre_attn_scalar": 16},
    "phi3": _SMALL,
    "gpt2": _GPT2,
    "qwen3_moe": _SMALL | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    "gpt_oss": _SMALL | _EXPERTS | _WINDOWS | {"num_local_experts": 4},
}


def build(
    folder: Path, architecture: str = "llama", *, vocab_size: int = VOCAB_SIZE, seed: int = 0, **config: Any
) -> Path:
    """Save a model, its tokenizer and its settings into `folder`, float32; `config` overrides configuration fields."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = {"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS_ID}
    fields = ARCHITECTURES[architecture] | ids | config
    settings = transformers.AutoConfig.for_model(architecture, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        model = from_config(settings).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that greedy tokens differ and are not near a tie
                torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and a chat template, without torch."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

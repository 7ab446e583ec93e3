"""A tiny random model of every decoder architecture that transformers knows, built from its own configuration class.

`SIZES` names the fields that make a model big, under all the names that architectures have for them; `OVERRIDES` says
what one architecture needs besides. Windows, chunks and scales that depend on the position are made so small that short
prompts reach past them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from . import tiny_models

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tiny_models.EOS_ID}

# Fields whose values a configuration class gets where it has them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "v_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "moe_num_shared_experts"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "rotary_dim": 8,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "window_size"), 16),
    "floor_scale": 8,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tiny_models.VOCAB_SIZE),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), tiny_models.CONTEXT_LENGTH
    ),
    **_IDS,
}  # fmt: skip

DROP = object()  # a field that is left at its default

_GEMMA4: dict[str, Any] = {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
# Why no tiny model is made.
UNTRIED = {
    "blt": "reads bytes in patches, through models of its own",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "generates audio",
    "musicgen_melody": "generates audio",
    "zamba": "recurrent layers share weights over the depth of the real model",
    "zamba2": "recurrent layers share weights over the depth of the real model",
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "hidden_size_per_layer_input": 8,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4, "laurel_rank": 8},
    "gemma4_text": _GEMMA4 | {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                              "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_unified_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": [2, 2]},
    "inkling2_text": {"vocab_size": DROP},
    "inkling2_loop_text": {"vocab_size": DROP},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "llama4_text": {"attention_chunk_size": tiny_models.CONTEXT_LENGTH},
    "llama4": {"text_config": {"attention_chunk_size": tiny_models.CONTEXT_LENGTH}},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "qwen4_exp_text": {"token_budget": 64, "compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(architecture: str) -> Any:
    """The configuration of a tiny model. Raises what transformers raises where the table does not fit."""
    import transformers

    kind: Any = transformers.CONFIG_MAPPING[architecture]
    plain = kind().to_dict()
    fields = _fields(plain)
    for name in kind.sub_configs:
        if isinstance(plain.get(name), dict):
            fields[name] = _fields(plain[name])
    for key, value in OVERRIDES.get(architecture, {}).items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
    fields = {key: value for key, value in fields.items() if value is not DROP}
    return transformers.AutoConfig.for_model(architecture, **copy.deepcopy(fields))


def _fields(plain: dict[str, Any]) -> dict[str, Any]:
    """What of SIZES a configuration has, and every kind of layer once, whatever pattern the real models have."""
    fields = {key: value for key, value in SIZES.items() if plain.get(key) is not None or key in _IDS}
    if "qk_rope_head_dim" in fields and "head_dim" in fields:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if plain.get("kv_lora_rank") is not None:  # latent attention: each query head has its own K/V
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    kinds = list(dict.fromkeys(plain.get("layer_types") or ()))
    if kinds:
        fields["num_hidden_layers"] = max(2, len(kinds))
        fields["layer_types"] = (kinds * 2)[: fields["num_hidden_layers"]]
    return fields


def build(folder: Path, architecture: str, *, seed: int = 0) -> None:
    """Save a tiny model of an architecture as a folder that an engine serves, float32."""
    import torch
    import transformers

    config = tiny_config(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        model = from_config(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that greedy tokens differ and are not near a tie
                torch.nn.init.normal_(parameter, std=0.25)
            else:  # biases, norms, sinks: none is left at a value that hides it
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_models.save_tokenizer(folder)

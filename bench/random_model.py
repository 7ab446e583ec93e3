"""Makes a model folder of a known shape with random weights: speed does not depend on what they are.

python bench/random_model.py FOLDER [--shape qwen3-0.6b]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architecture": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "architecture": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def build(folder: Path, shape: str) -> None:
    """Save bfloat16 weights, the configuration, and a tokenizer of single bytes."""
    fields = dict(SHAPES[shape])
    config = transformers.AutoConfig.for_model(fields.pop("architecture"), **fields, eos_token_id=0)
    torch.manual_seed(0)
    from_config: Any = transformers.AutoModelForCausalLM.from_config
    model = from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    return made


def main() -> None:
    args = parser().parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    build(args.folder, args.shape)
    print(args.folder)


if __name__ == "__main__":
    main()

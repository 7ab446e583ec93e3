"""A tiny random Llama as a GGUF file and in the wheels of a package index that is a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from headrace.deploy.catalog import Wheel

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 32, 4, 2, 48, 2, 64
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_gguf(path: Path, seed: int = 0, *, rule: str | None = None, quantize: bool = False) -> dict[str, np.ndarray]:
    """Write a byte-level model; returns its tensors by GGUF name.

    Args:
        rule: the name of how the tokenizer cuts text.
        quantize: write the matrices as Q8_0, which is returned dequantised, instead of float32.
    """
    from tokenizers import pre_tokenizers

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_chat_template(TEMPLATE)
    tensors = _tensors(len(tokens), np.random.default_rng(seed))
    for name, tensor in tensors.items():
        if quantize and tensor.ndim > 1 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            tensors[name] = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _tensors(vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    kv = KV_HEADS * HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_wheel(index: Path, project: str, files: dict[str, bytes]) -> Wheel:
    """Put a wheel with these files into the folder `index`, where pip finds it."""
    index.mkdir(exist_ok=True)
    name = project.replace("-", "_")
    path = index / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: kit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as z:
        for member, content in (files | metadata).items():
            z.writestr(member, content)
    data = path.read_bytes()
    return Wheel(project, "1.0", hashlib.sha256(data).hexdigest(), len(data))

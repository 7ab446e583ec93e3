"""Write a GGUF file out once as the Hugging Face folder that a worker loads: bfloat16 safetensors and tokenizer.json.

Runs as a process of its own, so that neither `fetch` nor `serve` keeps torch in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .process import die_with


def convert_gguf(source: Path, target: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Convert the file `source` into the folder `target`.

    Args:
        source: a .gguf file.
        target: created; `changes` names files of it (`tokenizer.json`) and the top-level keys to set in them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    # Written out plain: the values are those of the quantised file, their packing is gone.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.save_pretrained(target)
    splitting = pre_tokenizer(source)
    if splitting is not None:
        changes = changes | {"tokenizer.json": {"pre_tokenizer": splitting} | changes.get("tokenizer.json", {})}
    for file, keys in changes.items():
        path = target / file
        path.write_text(json.dumps(json.loads(path.read_text()) | keys, ensure_ascii=False, indent=2))


# How byte-level BPE cuts text before it merges: the file names a rule, and transformers does not look at it.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_SPLIT = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def pre_tokenizer(source: Path) -> dict[str, Any] | None:
    """The `pre_tokenizer` of tokenizer.json for a GGUF file; None where transformers' own is right.

    Raises:
        ValueError: the file names a rule that is not known here; guessing would give wrong token ids in silence.
    """
    import gguf

    fields = gguf.GGUFReader(source).fields
    if "tokenizer.ggml.model" not in fields or fields["tokenizer.ggml.model"].contents() != "gpt2":
        return None
    rule = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if rule in ("default", "gpt-2"):
        return _GPT2
    if rule == "smollm":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}
    if rule in _SPLIT:
        split = {"type": "Split", "pattern": {"Regex": _SPLIT[rule]}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, _GPT2 | {"use_regex": False}]}
    known = ", ".join(["default", "gpt-2", "smollm", *_SPLIT])
    raise ValueError(
        f"its tokenizer is cut by the rule {rule!r}, and this release knows {known}; serve the model's own folder"
    )


def main() -> int:
    """`PARENT SOURCE TARGET CHANGES`, as `fetch` calls it."""
    parent, source, target, changes = sys.argv[1:]
    die_with(int(parent))
    convert_gguf(Path(source), Path(target), json.loads(changes))
    return 0

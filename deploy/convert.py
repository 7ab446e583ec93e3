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
    for file, keys in changes.items():
        path = target / file
        path.write_text(json.dumps(json.loads(path.read_text()) | keys, ensure_ascii=False, indent=2))


def main() -> int:
    """`PARENT SOURCE TARGET CHANGES`, as `fetch` calls it."""
    parent, source, target, changes = sys.argv[1:]
    die_with(int(parent))
    convert_gguf(Path(source), Path(target), json.loads(changes))
    return 0

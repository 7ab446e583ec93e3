"""The command line: what it says of itself and of mistakes, and the small commands."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
import redis
from headrace.deploy.chat import ChatSettings, run
from headrace.deploy.cli import COMMANDS, main
from headrace.deploy.client import RequestFailed
from headrace.deploy.settings import ServeSettings, child_environment, role_settings, served_models
from headrace.shared.errors import ConfigError
from headrace.shared.model_card import ModelCard
from headrace.shared.settings import load
from headrace.worker.scripted import read_scripts
from kit.serving import scripted_model


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    usage = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " not in usage] == []


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "no command 'sevre'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "model"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"headrace {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["serve"], "--model (HEADRACE_MODEL): give at least one"),
        (["serve", "--model", "a=x", "--model", "a=y"], "two models are called 'a'"),
        (["serve", "--model", "a", "--model", "b", "--served-model-name", "c"], "'c' cannot name 2 models"),
        (["serve", "--model", "m", "--port", "70000"], "--port (HEADRACE_PORT)"),
        (["serve", "--model", "m", "--port", "0", "--host", "no.such.host.invalid"], "--host (HEADRACE_HOST)"),
        (["serve", "--model", "m", "--log-level", "loud"], "--log-level (HEADRACE_LOG_LEVEL)"),
        (["api"], "--redis-url (HEADRACE_REDIS_URL) is not set"),
        (["detok"], "--redis-url (HEADRACE_REDIS_URL) is not set"),
        (["detok", "--redis-url", "http://x"], "--redis-url"),
        (["worker", "--model", "/no/where"], "the folder /no/where does not exist"),
        (["model", "remove"], "'remove'"),
        (["chat", "--url", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_mistakes_name_the_setting(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_DATA_DIR", str(tmp_path / "data"))
    assert main(flags) == 2
    assert says in capsys.readouterr().err


def test_an_open_queue_needs_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted_model(tmp_path / "m")
    flags = [
        *model,
        "--port",
        "0",
        "--data-dir",
        str(tmp_path / "data"),
        "--redis-port",
        "1",
        "--redis-host",
        "0.0.0.0",
    ]
    assert main(["serve", *flags]) == 2
    assert "HEADRACE_REDIS_PASSWORD" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"steps": [[1], [null], ["x"]]}', "line 2: steps.1.0: Input should be a valid integer, got None"),
        ('{"token": 5}', "line 2: token: Extra inputs are not permitted, got 5"),
        ("{", "line 2: unexpected end of data"),
    ],
)
def test_a_line_of_a_script_that_is_wrong_is_named_in_one_line(tmp_path: Path, line: str, says: str) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(f'{{"tokens": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"^--scripted \(HEADRACE_SCRIPTED\): [^\n]*$") as caught:
        read_scripts(str(script))
    assert says in str(caught.value)


def test_names_of_models() -> None:
    def names(*flags: str) -> list[str]:
        return [model.name for model in served_models(load(ServeSettings, flags, "headrace serve"))]

    assert names("--model", "b=/x", "--model", "org/name") == ["b", "name"]
    assert names("--model", "/x/y", "--served-model-name", "z") == ["z"]


def test_children_get_what_was_set_and_they_know() -> None:
    settings = load(
        ServeSettings,
        ["--model", "m", "--lease-s", "4", "--api-key", "a", "--api-key", "b", "--deterministic", "--port", "1"],
        "headrace serve",
    )
    worker = child_environment(settings, role_settings("worker"), {"redis_url": "unix:///s"})
    assert worker["HEADRACE_REDIS_URL"] == "unix:///s"
    assert worker["HEADRACE_LEASE_S"] == "4.0"
    assert worker["HEADRACE_DETERMINISTIC"] == "true"
    assert not {"HEADRACE_API_KEY", "HEADRACE_THREADS", "HEADRACE_PORT"} & worker.keys()
    assert child_environment(settings, role_settings("api"), {})["HEADRACE_API_KEY"] == "a,b"


def test_model_add_registers_without_a_worker(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scripted_model(tmp_path / "m")[1]
    assert main(["model", "add", folder, "--redis-url", redis_url]) == 0
    assert "m: LlamaForCausalLM, 256 tokens of context, registered" in capsys.readouterr().out
    with redis.Redis.from_url(redis_url) as client:
        stored = client.hget("hr:models", "m")
        assert isinstance(stored, bytes)
        assert client.exists(f"hr:blob:{ModelCard.decode(stored).tokenizer}")


def test_doctor_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "data")
    model = scripted_model(tmp_path / "m")
    assert main(["doctor", *model, "--data-dir", data, "--port", "0"]) == 0
    assert main(["doctor", "--model", "/no/where", "--scripted", "x", "--data-dir", data, "--port", "0"]) == 1
    findings = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert findings["model"].startswith("NO")
    assert "/no/where does not exist" in findings["model"]
    assert findings["redis"].startswith("ok")


def test_chat_with_nobody() -> None:
    with pytest.raises(RequestFailed, match="is `headrace serve` running there"):
        run(ChatSettings(url="http://127.0.0.1:9"))
    assert issubclass(RequestFailed, ConfigError)

"""`headrace bench engine` over a tiny model."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from headrace.shared.errors import ConfigError
from headrace.worker.bench import main
from kit import architectures


def test_each_level_is_a_line_that_counts_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architectures.build(tmp_path, "llama")
    flags = ["--device", "cpu", "--kv-memory", "16mb", "--input-len", "9", "--output-len", "4", "--concurrency", "1,3"]
    assert main(["--model", f"tiny={tmp_path}", *flags]) == 0
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["model"], line["concurrency"]) for line in lines] == [("tiny", 1), ("tiny", 3)]
    for line in lines:
        assert line["tokens_per_s"] > 0
        assert line["step_ms"]["best"] <= line["step_ms"]["median"]
        assert set(line["seconds"]) == {"schedule", "forward", "sample"}


def test_a_level_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        main(["--model", str(tmp_path), "--concurrency", "0"])

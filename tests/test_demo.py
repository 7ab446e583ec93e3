"""`headrace demo`, which `make demo` calls, to its end and until Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.serving import HEADRACE, all_gone, descendants, scripted_model, wait_until

STAYS = "It stays up until Ctrl-C"


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The demonstration over a scripted worker, without DEMO_EXIT."""
    flags = [*scripted_model(tmp_path / "m", {"tokens": 12}), "--data-dir", str(tmp_path / "data"), "--port", "0"]
    env = {key: value for key, value in os.environ.items() if key != "DEMO_EXIT"}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen([HEADRACE, "demo", *flags], stdout=said, stderr=said, text=True, env=env)
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_it_shows_an_answer_and_a_batch_and_stays_up(demo: subprocess.Popen[str], tmp_path: Path) -> None:
    def said() -> str:
        return (tmp_path / "said").read_text()

    wait_until(lambda: STAYS in said() or demo.poll() is not None, "the demonstration is through")
    assert demo.poll() is None, said()
    assert " pieces in " in said()
    answers = [line for line in said().splitlines() if line.rstrip().endswith(" The water r")]
    assert len(answers) == 1 + 10, said()  # the streamed one, and the batch's
    children = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 0
    assert all_gone(children)


@pytest.mark.model
def test_on_real_weights(tmp_path: Path) -> None:
    model = os.environ.get("HEADRACE_TEST_MODEL")
    if not model:
        pytest.skip("HEADRACE_TEST_MODEL names no model")
    flags = ["--model", f"smollm2={model}", "--data-dir", str(tmp_path / "data"), "--port", "0"]
    done = subprocess.run(
        [HEADRACE, "demo", *flags],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"DEMO_EXIT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "message queue" in done.stdout
    assert "headrace chat --url http://127.0.0.1:" in done.stdout

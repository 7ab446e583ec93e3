"""`headrace COMMAND`: imports what the command needs and nothing else, so that help is quick and loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from ..shared.errors import ConfigError, StoreUnavailable

USAGE = """\
usage: headrace COMMAND [FLAGS]        (headrace COMMAND --help lists a command's flags)

everything on one machine
  serve       api, workers, detokenizers and batch driver, with an embedded Valkey unless --redis-url is given

one role each, on any machine that reaches the Redis
  api         the HTTP front end
  worker      generates token ids with a model
  detok       turns token ids into text
  batch       drives batches

tools
  fetch NAME  get a model's weights; prints the folder last
  model add   register a model without starting a worker
  demo        fetch a small model, serve it, stream an answer and run a batch
  chat        talk to a running server
  top         watch a deployment live: roles, lanes, streams, rates, takeovers (--once --json for scripts)
  bench       load an OpenAI-compatible server and measure it; `bench engine`: a worker's engine alone
  doctor      look at this machine and say what is missing

Each flag is an environment variable, too: --redis-url is HEADRACE_REDIS_URL."""

EXIT_CONFIG = 2  # nothing was started; the message names the setting
EXIT_STORE = 75  # EX_TEMPFAIL: Redis does not answer; worth another try


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"headrace {version('headrace')}")
        return 0
    if command not in COMMANDS:
        print(f"headrace: there is no command {command!r}\n\n{USAGE}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        return COMMANDS[command](rest)
    except ConfigError as e:
        print(f"headrace {command}: {e}", file=sys.stderr)
        return EXIT_CONFIG
    except StoreUnavailable as e:
        print(f"headrace {command}: {e}", file=sys.stderr)
        return EXIT_STORE
    except KeyboardInterrupt:
        return 130


def _title(role: str) -> None:
    from setproctitle import setproctitle

    setproctitle(f"headrace: {role}")


def _api(argv: Sequence[str]) -> int:
    from ..api.main import run
    from ..api.settings import ApiSettings
    from ..shared.settings import load

    settings = load(ApiSettings, argv, "headrace api")
    _title("api")
    return run(settings)


def _worker(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from ..worker.settings import WorkerSettings

    settings = load(WorkerSettings, argv, "headrace worker")
    if settings.model:
        from .models import resolve, split_name

        name, place = split_name(settings.model)
        folder = resolve(place, needs="tokenizer.json" if settings.scripted else "config.json")
        settings = settings.model_copy(update={"model": f"{name}={folder}"})
    _title("worker")
    from ..worker.main import run

    return run(settings)


def _detok(argv: Sequence[str]) -> int:
    from ..detok.main import run
    from ..detok.settings import DetokSettings
    from ..shared.settings import load

    settings = load(DetokSettings, argv, "headrace detok")
    _title("detok")
    return run(settings)


def _batch(argv: Sequence[str]) -> int:
    from ..api.batches.main import run
    from ..api.batches.settings import BatchSettings
    from ..shared.settings import load

    settings = load(BatchSettings, argv, "headrace batch")
    _title("batch")
    return run(settings)


def _serve(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from .settings import ServeSettings
    from .supervisor import run

    settings = load(ServeSettings, argv, "headrace serve")
    _title("serve")
    return run(settings)


def _fetch(argv: Sequence[str]) -> int:
    from .models import fetch_command

    return fetch_command(argv)


def _model(argv: Sequence[str]) -> int:
    from .models import model_command

    return model_command(argv)


def _bench(argv: Sequence[str]) -> int:
    if argv[:1] == ["engine"]:
        from ..worker.bench import main as bench_engine

        return bench_engine(argv[1:])
    from .bench import main as bench

    return bench(argv)


def _doctor(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from .doctor import run
    from .settings import ServeSettings

    return run(load(ServeSettings, argv, "headrace doctor"))


def _chat(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from .chat import ChatSettings, run

    return run(load(ChatSettings, argv, "headrace chat"))


def _top(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from .top import TopSettings, run

    return run(load(TopSettings, argv, "headrace top"))


def _demo(argv: Sequence[str]) -> int:
    from ..shared.settings import load
    from .demo import DemoSettings, run

    return run(load(DemoSettings, argv, "headrace demo"))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "api": _api,
    "worker": _worker,
    "detok": _detok,
    "batch": _batch,
    "serve": _serve,
    "fetch": _fetch,
    "model": _model,
    "bench": _bench,
    "doctor": _doctor,
    "chat": _chat,
    "top": _top,
    "demo": _demo,
}

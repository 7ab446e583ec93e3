"""Child processes that cannot outlive their parent.

A child asks the kernel to be killed when the thread that started it dies (PR_SET_PDEATHSIG, Linux) and then looks
whether its parent is still the one that started it: a parent that died before the request was made sends no signal.
Start such children from the main thread. Elsewhere than on Linux a killed parent leaves its children running.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1

# Roles are started as a console script would start them: never `python -m` from a folder that holds `worker/`, which
# -P keeps off sys.path, and never with a forked interpreter, whose locks may be held by another thread.
_ROLE = "import sys; from headrace.deploy.process import run_role; sys.exit(run_role(sys.argv[1], sys.argv[2:]))"
_PROGRAM = "import sys; from headrace.deploy.process import run_program; run_program(sys.argv[1], sys.argv[2:])"


def role_command(role: str, *args: str) -> list[str]:
    """The command that runs `headrace ROLE ARGS…` as a child of this process."""
    return [sys.executable, "-P", "-c", _ROLE, str(os.getpid()), role, *args]


def program_command(program: Sequence[str]) -> list[str]:
    """The command that runs another program as a child of this process."""
    return [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *program]


def run_role(parent: str, argv: Sequence[str]) -> int:
    """In the child: bind to `parent` before anything slow is imported, then be the role."""
    die_with(int(parent))
    from .cli import main

    return main(argv)


def run_program(parent: str, argv: Sequence[str]) -> None:
    """In the child: bind to `parent` and become the program; the binding survives the exec."""
    die_with(int(parent))
    os.execv(argv[0], list(argv))


def die_with(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Be killed when `parent`, which must be this process's parent, dies; exit at once when it already has.

    SIGKILL, since whatever a role holds is either in Redis or not worth saving, and a drain would need the others.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + int(sig))


def is_alive(pid: int) -> bool:
    """Whether a process of that id exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform.startswith("linux"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

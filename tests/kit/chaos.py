"""A deployment under faults that follow from a seed, its clients, and what must be true afterwards.

`make chaos SEED=… SECONDS=…` runs one; the seed says against what kind of store and worker (`Chaos`), which faults come
in which order, and at which failpoints processes die. Each request's text, finish and usage are known beforehand;
clients go on with `Last-Event-ID` on the other replica.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from headrace.shared import failpoints
from headrace.shared.clients import connect
from kit import tiny_models
from kit.chaos_checks import left_over, without_lifetime, wrong_sums
from kit.chaos_clients import Clients
from kit.chaos_stores import Fault, OneServer, Store, WatchedStore
from kit.chaos_work import Work, of_model, scripted, scripts
from kit.deployment import Deployment
from kit.faults import Replica, unfinished, until

LEASE_S = 2.0
# By when all is served again after the last fault: two leases, and what a busy machine takes to start processes anew
# and to work off what has piled up.
RECOVERY_S = 2 * LEASE_S + 40
LEASES = ("--lease-s", str(LEASE_S))
FLAGS = {
    "worker": LEASES,
    "detok": (*LEASES, "--shard-lease-s", str(LEASE_S)),
    "api": (),
    "batch": ("--batch-lease-s", "3", "--batch-slice-s", "2", "--batch-window", "8"),
}
MODEL_FLAGS = ("--dtype", "float32", "--deterministic", "--kv-memory", "64mb", "--threads", "1", "--max-running", "8")
PACE = "worker.step=stall:0.02"  # a step of a tiny model is over before anything could befall it
# Points that a process passes while it serves; at the n-th pass it dies, stalls or loses its connection.
POINTS = {
    "worker": (
        "pull.sent",
        "pull.reply",
        "append.send",
        "append.sent",
        "append.reply",
        "worker.claimed",
        "worker.step",
    ),
    "detok": (
        "lease.reply",
        "sweep.sent",
        "publish.send",
        "publish.sent",
        "publish.reply",
        "detok.read",
        "detok.decoded",
    ),
    "api": ("submit.reply", "touch.reply", "api.accepted", "api.repair"),
    "batch": ("batch.taken", "batch.written", "batch.committed", "batch.placed", "submit.reply"),
}


class Chaos:
    """One run. `tally` counts the faults and what became of the requests; `problems` is empty when all was well.

    A seed that five divides has a primary that sentinels replace, one behind it a model in deterministic mode; the rest
    have a server behind a proxy and scripted workers. With an odd seed that server also loses its append-only tail.
    Where a tail may be lost, a client may be told that its stream is.
    """

    def __init__(self, binary: str, folder: Path, seed: int, seconds: float) -> None:
        self._folder, self._seconds, self._seed = folder, seconds, seed
        self._faults = random.Random(seed)
        self._watched, self._of_model = seed % 5 == 0, seed % 5 == 1
        self._lossy = self._watched or bool(seed % 2)
        stores = folder / "store"
        stores.mkdir()
        self._store: Store = (
            WatchedStore(binary, stores, self._faults)
            if self._watched
            else OneServer(binary, stores, self._faults, lossy=self._lossy)
        )
        self.tally: Counter[str] = Counter()
        self.problems: list[str] = []
        self._stopped: list[subprocess.Popen[bytes]] = []
        self._armed: list[subprocess.Popen[bytes]] = []

    @property
    def kind(self) -> str:
        """What the seed chose, in words."""
        words = ["sentinels" if self._watched else "one server", "a model" if self._of_model else "scripted workers"]
        return ", ".join(words + (["tails are lost"] if self._lossy else []))

    def run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._store)
            folder = self._folder / "roles"
            folder.mkdir()
            if self._of_model:
                model = tiny_models.build(self._folder / "m", "qwen3")
                deployment = Deployment(self._store.url, folder, model=model)
            else:
                deployment = Deployment(self._store.url, folder, scripts())
            self._roles = stack.enter_context(deployment)
            self._start_all()
            clients = Clients(self._urls, self._work(), self._seed + 1, lossy=self._lossy, recovery_s=RECOVERY_S)
            with clients.at_work():
                self._disturb()
            self.tally += clients.tally
            self.problems += clients.problems
            self._check()

    def _start_all(self) -> None:
        self._alive: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        for role, number in (("worker", 2), ("detok", 2), ("batch", 1)):
            for n in range(number):
                self._alive[role, n] = self._start(role)
        replicas = [Replica(self._roles, *FLAGS["api"]) for _ in range(2)]
        self._ports = [replica.url.rpartition(":")[2] for replica in replicas]
        self._urls = [replica.url for replica in replicas]
        self._alive |= {("api", n): replica.process for n, replica in enumerate(replicas)}

    def _start(self, role: str, *flags: str, spec: str = "") -> subprocess.Popen[bytes]:
        if role == "worker" and self._of_model:
            flags, spec = (*flags, *MODEL_FLAGS), f"{PACE},{spec}"
        return self._roles.start(role, *FLAGS[role], *flags, failpoints=spec)

    def _work(self) -> Work:
        return of_model(self._urls[0]) if self._of_model else scripted()

    # --- faults ------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """One fault after another until the time is over; then everything is mended, and new processes are whole."""
        ends = time.monotonic() + self._seconds
        kinds: list[Fault] = [self._kill, self._kill, self._stop, *self._store.faults()]
        while time.monotonic() < ends:
            fault = self._faults.choice(kinds)
            self.tally[fault.__name__.strip("_")] += 1
            fault()
            self._wake()
            time.sleep(self._faults.uniform(0.5, 2 * LEASE_S))
            self._revive()
        self._wake()
        self._revive(whole=True)

    def _pick(self) -> tuple[str, int]:
        return self._faults.choice(sorted(self._alive))

    def _kill(self) -> None:
        victim = self._alive[self._pick()]
        victim.kill()
        victim.wait()

    def _stop(self) -> None:
        victim, seconds = self._alive[self._pick()], self._faults.uniform(0.2, 2 * LEASE_S)
        if victim.poll() is None:
            victim.send_signal(signal.SIGSTOP)
            self._stopped.append(victim)
            time.sleep(seconds)

    def _wake(self) -> None:
        while self._stopped:
            self._stopped.pop().send_signal(signal.SIGCONT)

    def _revive(self, *, whole: bool = False) -> None:
        """Start what has died again, every third with a failpoint; `whole`: without, and those that have one too."""
        for (role, n), process in sorted(self._alive.items()):
            armed = self._faults.random() < 0.34 and not whole
            point, at = self._faults.choice(POINTS[role]), self._faults.randrange(1, 40)
            action = self._faults.choice(("kill",) if point in failpoints.DEAF else ("kill", "fail", "stall:1"))
            if whole and process in self._armed:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            flags = ("--fd", "-1", "--port", self._ports[n]) if role == "api" else ()
            spec = f"{point}={action}@{at}" if armed else ""
            self._alive[role, n] = again = self._start(role, *flags, spec=spec)
            self.tally[f"{role}s started again"] += 1
            if armed:
                self.tally["of these with a failpoint"] += 1
                self._armed.append(again)

    # --- afterwards --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        with connect(self._store.direct) as store:
            try:
                until(lambda: unfinished(store) == 0 and not any(left_over(store)), "something is left")
            except AssertionError:
                self.problems += left_over(store) or [f"{unfinished(store)} requests have not ended"]
            self.problems += [f"no lifetime: {key}" for key in without_lifetime(store)]
            self.problems += wrong_sums(store)
        for path in (self._folder / "roles").glob("*.log"):
            lines = path.read_text().splitlines()
            if len(lines) > 200 + 20 * self._seconds:
                self.problems.append(f"{path.name} has {len(lines)} lines")
            for n, line in enumerate(lines):
                if "Traceback" in line or "AssertionError" in line:
                    self.problems.append("\n    ".join([f"{path.name}:", *lines[max(0, n - 2) : n + 120]]))
                    break


def main() -> None:
    """`make chaos`."""
    import shutil
    import tempfile

    from conftest import server_binary

    seed = int(os.environ.get("SEED") or time.time_ns() // 10**6 % 10**6)
    seconds = float(os.environ.get("SECONDS") or 60)
    binary = server_binary()
    assert binary, "no Redis to test with: install headrace[embedded]"
    folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))
    chaos = Chaos(binary, folder, seed, seconds)
    chaos.run()
    print(f"seed {seed} ({chaos.kind}), {seconds:g} s: {dict(sorted(chaos.tally.items()))}")
    for problem in chaos.problems:
        print("PROBLEM", problem)
    if chaos.problems:
        raise SystemExit(f"what its processes said lies in {folder}/roles")
    shutil.rmtree(folder)

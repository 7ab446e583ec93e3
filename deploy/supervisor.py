"""`headrace serve`: starts every role as a child process, keeps them running, and ends them in order.

    checks ─► Valkey ─► workers, detokenizers, batch drivers, apis ─► ready line ─► SIGTERM ─► drain
    drain:  apis and batch drivers finish what they hold ─► workers ─► detokenizers ─► Valkey

All processes are started by the main thread: the kernel kills a child when the thread that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import httpx

from ..shared import logs
from ..shared.clients import TRANSIENT, connect
from ..shared.errors import ConfigError
from ..shared.registry import processes
from ..shared.store import check_control, open_store
from .child import Child, ChildFailed, Deaths
from .data_folder import DataFolder
from .embedded import EmbeddedServer
from .preflight import bind, embedded_server, gpus, locate, url_of
from .settings import ServedModel, ServeSettings, child_environment, role_settings, served_models

log = logging.getLogger(__name__)

POLL_S = 0.1
DRAIN_ORDER = (("api", "batch"), ("worker",), ("detok",))
FIRST_PHASE = 0.8  # of the drain's time is for open requests; the rest for workers and detokenizers to let go
ONE_PORT = {"health_port": 0}  # HEADRACE_HEALTH_PORT cannot be every child's; /health and /server_info tell of them


def run(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a drain.

    Raises:
        ConfigError: something is not as it must be; no process was left behind.
    """
    logs.setup("serve", settings.log_level, settings.log_json)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every look at /health
    models = served_models(settings)
    with bind(settings.host, settings.port) as listener:
        url = url_of(settings.host, listener.getsockname()[1])
        folder = DataFolder(settings.data_dir)
        # Only the embedded server is one process's; beside an outer Redis, several may share the files.
        with contextlib.nullcontext() if settings.redis_url else folder.locked(url):
            models = locate(models, settings)
            store = None if settings.redis_url else embedded_server(settings, folder)
            return asyncio.run(Supervisor(settings, models, folder, listener, url, store).run())


class Supervisor:
    """The children of one `serve`."""

    def __init__(
        self,
        settings: ServeSettings,
        models: tuple[ServedModel, ...],
        folder: DataFolder,
        listener: socket.socket,
        url: str,
        store: EmbeddedServer | None,
    ) -> None:
        self._settings, self._models, self._folder, self._store = settings, models, folder, store
        self._listener, self._url = listener, url
        self._redis_url = store.url if store else settings.redis_url
        self._gpus = gpus(settings.device)
        self._children: list[Child] = []
        self._stop, self._now = asyncio.Event(), asyncio.Event()  # drain, and do not even drain

    async def run(self) -> int:
        """Start, say that we are ready, run until told to stop, drain."""
        self._hear_signals()
        try:
            await self._start_store()
            keepers = self._start_roles()
            try:
                await self._until_stopped(keepers)
            finally:
                await self._drain()
                await _cancel(keepers)
        except ChildFailed as e:
            log.error("%s", e)
            return e.status
        finally:
            if self._store is not None:
                await asyncio.to_thread(self._store.stop)
        return 0

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def hear() -> None:
            if self._stop.is_set():
                self._now.set()
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                loop.add_signal_handler(number, hear)

    async def _start_store(self) -> None:
        """Start or adopt the embedded server, and look whether the store can be trusted before any role does."""
        if self._store is not None:
            adopted = self._store.launch()
            await asyncio.to_thread(self._store.wait)
            log.info("%s Valkey at %s", "adopted" if adopted else "started", self._store.socket)
        settings = self._settings.model_copy(update={"redis_url": self._redis_url})
        await asyncio.to_thread(open_store, settings)
        await asyncio.to_thread(check_control, settings)

    def _start_roles(self) -> list[asyncio.Task[None]]:
        count = self._settings
        for model in self._models:
            for _ in range(count.workers):
                self._add("worker", model=f"{model.name}={model.place}", **self._share_of_cores())
        for _ in range(count.detoks):
            self._add("detok")
        shared = {"data_dir": self._folder.path, "drain_s": count.drain_s * FIRST_PHASE}
        for _ in range(count.batches):
            self._add("batch", **shared)
        for _ in range(count.apis):
            self._add("api", fd=self._listener.fileno(), **shared)
        tasks = [asyncio.create_task(child.keep()) for child in self._children]
        return [*tasks, asyncio.create_task(self._keep_store(self._store))] if self._store else tasks

    def _add(self, role: str, **own: object) -> None:
        index = sum(child.role == role for child in self._children)
        env = child_environment(self._settings, role_settings(role), own | {"redis_url": self._redis_url, **ONE_PORT})
        if role == "worker" and self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)]
        fds = [self._listener.fileno()] if role == "api" else []
        self._children.append(Child(role, index, env, fds=fds, prefixed=not self._settings.log_json))

    def _share_of_cores(self) -> dict[str, object]:
        """Workers on CPU cores share them; left alone, each would start a thread for every core."""
        workers = self._settings.workers * len(self._models)
        if self._settings.threads or workers == 1 or "OMP_NUM_THREADS" in os.environ or self._gpus:
            return {}
        return {"threads": max(1, (os.cpu_count() or 1) // workers)}

    async def _keep_store(self, store: EmbeddedServer) -> None:
        """Start the embedded server again when it dies; the roles wait for it."""
        loop = asyncio.get_running_loop()
        deaths, started = Deaths("Valkey"), loop.time()
        while True:
            await asyncio.sleep(POLL_S)
            if store.is_running():
                continue
            pause = deaths.next_pause(loop.time() - started, f"left its log in {store.log}", was_ready=True)
            log.warning("Valkey died; it starts again in %.1f s", pause)
            await asyncio.sleep(pause)
            started = loop.time()
            store.launch()
            with contextlib.suppress(ConfigError):  # it ended again: seen above
                await asyncio.to_thread(store.wait)

    async def _until_stopped(self, keepers: list[asyncio.Task[None]]) -> None:
        """Return when told to stop.

        Raises:
            ChildFailed: a child cannot run.
        """
        ready = asyncio.create_task(self._say_when_ready())
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Task[Any]] = {*keepers, ready, stop}
        try:
            while not stop.done():
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                waiting -= done
        finally:
            if not ready.done():  # no request was promised an answer yet
                self._now.set()
            await _cancel([ready, stop])

    async def _say_when_ready(self) -> None:
        """Print the ready line once every child says that it works, and the api answers."""
        while not (await asyncio.to_thread(self._all_work) and await self._api_answers()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(POLL_S)
        for child in self._children:
            child.was_ready = True
        print(f"ready {self._url} model={','.join(model.name for model in self._models)}", flush=True)

    def _all_work(self) -> bool:
        here = socket.gethostname()
        with connect(self._redis_url, "serve") as client:
            try:
                working = {p.pid for p in processes(client) if p.host == here and p.state == "ready"}
            except TRANSIENT:
                return False
        return all(child.pid in working for child in self._children)

    async def _api_answers(self) -> bool:
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            try:
                return (await client.get(f"{self._url}/health")).status_code == 200
            except httpx.TransportError:
                return False

    async def _drain(self) -> None:
        """End the roles in order within the limit; a second signal, or the limit, kills what is left."""
        limit_s = 0.0 if self._now.is_set() else self._settings.drain_s
        until = asyncio.get_running_loop().time() + limit_s
        if limit_s:
            log.info("draining for at most %.0f s; a second signal ends it", limit_s)
        for phase in DRAIN_ORDER:
            await self._end([child for child in self._children if child.role in phase], until)

    async def _end(self, children: list[Child], until: float) -> None:
        for child in children:
            child.stop()
        gone = asyncio.ensure_future(asyncio.gather(*(child.ended.wait() for child in children)))
        now = asyncio.create_task(self._now.wait())
        waiting: set[asyncio.Future[Any]] = {gone, now}
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            child.kill()
        await gone
        await _cancel([now])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

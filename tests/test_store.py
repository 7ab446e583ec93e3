"""What a process finds out about Redis before it starts: each refusal says what is wrong and what to do."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.shared.errors import ConfigError, StoreRefused, StoreUnavailable
from headrace.shared.settings import StoreSettings
from headrace.shared.store import check_control, open_store


@contextmanager
def old_server(info: str) -> Iterator[str]:
    """The URL of something that says OK to all, and this to INFO."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while count := self.rfile.readline():
                words = []
                for _ in range(int(count[1:])):
                    self.rfile.readline()
                    words.append(self.rfile.readline().strip())
                says = f"${len(info)}\r\n{info}" if words[0] == b"INFO" else "+OK"
                self.wfile.write(f"{says}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ("redis_version:6.2.14", r"redis 6\.2\.14 is too old: 7\.0 is the oldest"),
        # Valkey calls itself Redis 7.2.4 for clients that know no Valkey.
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.1.9", r"valkey 7\.1\.9 is too old: 7\.2 is"),
    ],
)
def test_a_server_that_is_too_old_is_refused(info: str, says: str) -> None:
    with old_server(info) as url, pytest.raises(StoreRefused, match=says):
        open_store(StoreSettings(redis_url=url))


def test_a_server_that_would_lose_requests_is_refused(redis_url: str) -> None:
    with connect(redis_url) as admin:
        memory = admin.config_get("maxmemory")["maxmemory"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(StoreRefused, match=r"--redis-url: .*allkeys-lru.*Set it to noeviction"):
                open_store(StoreSettings(redis_url=redis_url))
            with pytest.raises(StoreRefused, match=r"--control-redis-url: .*allkeys-lru"):
                check_control(StoreSettings(redis_url="redis://mill", control_redis_url=redis_url))
            admin.config_set("maxmemory-policy", "noeviction")
            check_control(StoreSettings(redis_url="redis://mill", control_redis_url=redis_url))
            admin.config_set("maxmemory", 0)
            with pytest.raises(StoreRefused, match=r"no maxmemory.*--redis-memory"):
                open_store(StoreSettings(redis_url=redis_url))
            assert open_store(StoreSettings(redis_url=redis_url, redis_memory=1 << 30)).memory == 1 << 30
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", memory)


def test_a_store_of_another_schema_is_refused(redis_url: str) -> None:
    with connect(redis_url) as client:
        client.hset(keys.SCHEMA, "major", keys.SCHEMA_MAJOR + 1)
        with pytest.raises(StoreRefused, match=rf"schema {keys.SCHEMA_MAJOR + 1}.*speaks {keys.SCHEMA_MAJOR}"):
            open_store(StoreSettings(redis_url=redis_url))


def test_nobody_there(redis_url: str) -> None:
    with pytest.raises(ConfigError, match=r"--redis-url \(HEADRACE_REDIS_URL\) is not set"):
        open_store(StoreSettings())
    with pytest.raises(StoreUnavailable, match="does not answer"):
        open_store(StoreSettings(redis_url="redis://127.0.0.1:1"), wait_s=0.1)
    with pytest.raises(StoreRefused, match=r"redis\+cluster:// names a server that is in no cluster"):
        open_store(StoreSettings(redis_url="redis+cluster://" + tcp_of(redis_url)))


def tcp_of(url: str) -> str:
    """host:port of a server that listens on a socket: it is told to listen there, too."""
    with connect(url) as admin:
        if admin.config_get("port")["port"] == "0":
            with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
                port = free.server_address[1]
            admin.config_set("port", port)
        return f"127.0.0.1:{admin.config_get('port')['port']}"

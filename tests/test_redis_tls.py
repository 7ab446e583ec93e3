"""TLS and users: what deploy/users.acl grants is what the roles need, and no more."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
import redis.exceptions
import trustme
from conftest import ROOT, tls_server_binary
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.shared.errors import StoreRefused, StoreUnavailable
from headrace.shared.settings import StoreSettings
from headrace.shared.store import open_store
from kit.deployment import Deployment, terminate
from kit.redis_servers import Node, free_port
from kit.serving import wait_until
from kit.streaming import LEASES, SCRIPT, check_texts

USERS = (ROOT / "deploy" / "users.acl").read_text()
ROLES = ("api", "worker", "detok", "batch")


@dataclass(frozen=True)
class Secured:
    """A server that speaks TLS alone, to clients that show a certificate; `admin` may do anything."""

    node: Node
    tls: str  # the query of a URL

    def url(self, user: str, password: str, tls: str | None = None, host: str = "127.0.0.1") -> str:
        return f"rediss://{user}:{password}@{host}:{self.node.port}/0?{self.tls if tls is None else tls}"

    def role(self, role: str) -> str:
        return self.url(f"hr-{role}", f"change-{role}")

    @property
    def admin(self) -> str:
        return self.url("admin", "secret")


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="hr"))
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    ca.issue_cert("headrace@example.org").private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    (folder / "users.acl").write_text(f"user default off\nuser admin on >secret ~* &* +@all\n{USERS}")
    files = {"tls-cert-file": "server.pem", "tls-key-file": "server.pem", "tls-ca-cert-file": "ca.pem"}
    options = {"tls-port": str(free_port()), "port": "0", "aclfile": f"{folder}/users.acl", "appendonly": "yes"}
    options |= {name: f"{folder}/{file}" for name, file in files.items()}
    tls = "&".join(
        f"{name}={folder}/{file}"
        for name, file in {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.pem"}.items()
    )
    node = Node(tls_server_binary(), folder, **options).start()
    try:
        secured = Secured(node, tls)
        wait_until(lambda: answers(secured), "the server does not answer")
        yield secured
    finally:
        node.kill()
        shutil.rmtree(folder)


def answers(secured: Secured) -> bool:
    try:
        with connect(secured.admin) as client:
            return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False


@pytest.fixture
def admin(secured: Secured) -> Iterator[Any]:
    with connect(secured.admin) as client:
        client.flushall()
        client.acl_log_reset()
        yield client


def refusal(url: str, wait_s: float = 0.1) -> str:
    with pytest.raises((StoreRefused, StoreUnavailable)) as refused:
        open_store(StoreSettings(redis_url=url), wait_s)
    return f"{refused.type.__name__}: {refused.value}"


def test_who_is_refused_and_why(secured: Secured, admin: Any) -> None:
    ca = secured.tls.partition("&")[0]
    assert open_store(StoreSettings(redis_url=secured.admin)).shards == 8
    assert "StoreRefused" in (says := refusal(secured.url("admin", "secret", tls="")))
    assert "certificate is not accepted" in says
    assert "certificate is not accepted" in refusal(secured.url("admin", "secret", host="localhost"))
    loose = secured.url("admin", "secret", tls=f"{secured.tls}&ssl_check_hostname=false", host="localhost")
    assert open_store(StoreSettings(redis_url=loose)).shards == 8
    assert "StoreUnavailable" in refusal(secured.url("admin", "secret", tls=ca))  # no certificate of ours
    assert "StoreUnavailable" in refusal(f"redis://admin:secret@127.0.0.1:{secured.node.port}")
    assert "refuses the user or password" in refusal(secured.url("admin", "wrong"))
    admin.acl_setuser("nobody", enabled=True, passwords=["+x"])
    assert "does not let this user" in (says := refusal(secured.url("nobody", "x")))
    assert "'client|setname'" in says


def test_every_role_works_with_its_own_rights(secured: Secured, admin: Any, tmp_path: Path) -> None:
    with Deployment(secured.admin, tmp_path, [SCRIPT]) as deployment:
        deployment.urls = {role: secured.role(role) for role in ROLES}
        roles = [deployment.start("worker", *LEASES), deployment.start("detok", *LEASES)]
        roles += [deployment.start(role, "--durability", "relaxed") for role in ("batch", "api")]  # 7.0 has no WAITAOF
        deployment.ready()
        check_texts(deployment)
        with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            try:
                use_everything(client)
            except openai.APIError as e:
                raise AssertionError(f"{refused(admin)}\n{deployment.logs()}") from e
        victim = roles[0]
        check_texts(deployment, lambda: replace_worker(deployment, victim))
        assert [terminate(process) for process in roles[1:]] == [0] * 3, deployment.logs()
        assert refused(admin) == []


def use_everything(client: openai.OpenAI) -> None:
    """A batch from its file to its answers, a stream that is left, an upload in parts, a control route, the pages."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch does not end")
    second = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    client.batches.cancel(second.id)
    assert len(client.batches.list().data) == 2
    upload = client.uploads.create(bytes=4, filename="f.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload_id=upload.id, data=b"text")
    assert client.uploads.complete(upload_id=upload.id, part_ids=[part.id]).file is not None
    client.files.delete(file.id)
    with client.completions.create(model="m", prompt="left", max_tokens=60, stream=True) as stream:
        next(iter(stream))
    base = str(client.base_url).removesuffix("/v1/")
    for path in ("/metrics", "/server_info", "/health_generate", "/v1/models"):
        assert client._client.get(base + path).status_code == 200, path
    for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
        assert client._client.post(base + path, json={"model": "m"}).status_code == 200, path


def replace_worker(deployment: Deployment, victim: subprocess.Popen[bytes]) -> None:
    deployment.start("worker", *LEASES)
    victim.kill()


def refused(admin: Any) -> list[str]:
    """What the server has refused to the roles."""
    admin.set_response_callback("ACL LOG", lambda reply, **_: reply)
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in admin.acl_log()]
    return [" ".join(entry[name].decode() for name in (b"username", b"reason", b"object")) for entry in entries]


FORBIDDEN: list[tuple[str, tuple[Any, ...]]] = [
    *((role, command) for role in ROLES for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"))),
    *((role, command) for role in ROLES for command in (("SHUTDOWN",), ("ACL", "LIST"), ("GET", "another:key"))),
    *((role, ("SET", "another:key", "x")) for role in ROLES),
    ("api", ("XADD", keys.text(0, "x"), "*", "d", "forged")),
    ("api", ("HSET", keys.lease(0), "owner", "me")),
    ("api", ("CLIENT", "LIST")),
    ("api", ("HSET", keys.MODELS, "m", "forged")),
    ("worker", ("XRANGE", keys.text(0, "x"), "-", "+")),
    ("worker", ("HSET", "hr:{0}:b:x", "body", "forged")),
    ("worker", ("HSET", keys.lease(0), "owner", "me")),
    ("worker", ("HGETALL", "hr:batch:b")),
    ("worker", ("PUBLISH", keys.reader_channel(0, "api"), "forged")),
    ("detok", ("HSET", keys.MODELS, "m", "forged")),
    ("detok", ("SET", keys.blob("x"), "forged")),
    ("detok", ("XADD", keys.control("m"), "*", "c", "forged")),
    ("detok", ("HGETALL", "hr:file:f")),
    ("batch", ("XADD", keys.text(0, "x"), "*", "d", "forged")),
    ("batch", ("XADD", keys.control("m"), "*", "c", "forged")),
]


@pytest.mark.parametrize(
    ("role", "command"), FORBIDDEN, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_what_a_role_may_not(secured: Secured, role: str, command: tuple[Any, ...]) -> None:
    with connect(secured.role(role)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)

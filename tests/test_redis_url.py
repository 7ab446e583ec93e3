"""What a Redis URL may say, and what is said of one that is wrong: key and value, and never a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.shared.address import Address, parse, redacted
from headrace.shared.clients import connect
from headrace.shared.errors import ConfigError
from headrace.shared.settings import StoreSettings, load


def test_forms() -> None:
    assert parse("redis://") == Address("server", (("localhost", 6379),))
    assert parse("redis://u:p%40ss@mill:7000/3") == Address(
        "server", (("mill", 7000),), login={"username": "u", "password": "p@ss", "db": 3}
    )
    assert parse("unix://:secret@/run/my%20valkey.sock?db=2") == Address(
        "server", path="/run/my valkey.sock", login={"password": "secret", "db": 2}
    )
    assert parse("redis://[::1]:7000") == Address("server", (("::1", 7000),))
    assert parse("redis+cluster://a:1,b").nodes == (("a", 1), ("b", 6379))
    watched = parse("redis+sentinel://u:p@a,b:1/mill/4?sentinel_username=s&sentinel_password=t")
    assert (watched.nodes, watched.service) == ((("a", 26379), ("b", 1)), "mill")
    assert watched.login == {"username": "u", "password": "p", "db": 4}
    assert watched.sentinel_login == {"username": "s", "password": "t"}


def test_tls(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    files = {"ssl_ca_certs": f"{tmp_path}/ca", "ssl_certfile": f"{tmp_path}/cert", "ssl_keyfile": f"{tmp_path}/key"}
    query = "&".join(f"{name}={file}" for name, file in files.items())
    assert parse(f"rediss://mill?{query}").tls == files
    assert parse("rediss+cluster://mill").tls == {}
    assert parse("rediss+sentinel://mill/m?ssl_check_hostname=false").tls == {"ssl_check_hostname": False}
    assert parse("redis://mill").tls is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://mill", r"should begin with one of redis://"),
        ("mill:6379", r"should begin with one of redis://"),
        ("redis://a,b", r"several hosts"),
        ("redis://mill:0", r"'mill:0' is no host:port"),
        ("redis://mill:port", r"'mill:port' is no host:port"),
        ("redis://mill/first", r"a database is a number, not 'first'"),
        ("redis+cluster://mill/1", r"one database, and no /1"),
        ("redis+cluster://a,,b", r"'' is no host:port"),
        ("redis+sentinel://mill", r"should name the service"),
        ("redis://mill?sentinel_password=x", r"are for redis\+sentinel"),
        ("redis://mill?ssl_check_hostname=true", r"TLS, which is spoken with rediss"),
        ("rediss://mill?ssl_check_hostname=maybe", r"should be true or false, not 'maybe'"),
        ("rediss://mill?ssl_ca_certs=/no/such/ca.pem", r"ssl_ca_certs: there is no file /no/such/ca.pem"),
        ("redis://mill?socket_timeout=1", r"not known here: socket_timeout"),
        ("unix://mill/socket", r"whole path"),
    ],
)
def test_mistakes(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(url)


def test_passwords_are_not_repeated() -> None:
    assert redacted("redis://u:secret@mill/0") == "redis://u:***@mill/0"
    assert redacted("unix://:se:cr@et@/s") == "unix://:***@/s"
    assert redacted("redis+sentinel://a/m?sentinel_password=secret&db=1") == (
        "redis+sentinel://a/m?sentinel_password=***&db=1"
    )
    with pytest.raises(ConfigError, match=r"got 'redis://u:\*\*\*@mill/x'"):
        connect("redis://u:secret@mill/x")
    with pytest.raises(ConfigError, match=r"--redis-url \(HEADRACE_REDIS_URL\).*number, not 'x'.*u:\*\*\*@mill/x"):
        load(StoreSettings, ["--redis-url", "redis://u:secret@mill/x"], "headrace worker")


def test_batches_do_not_live_on_a_cluster() -> None:
    settings = StoreSettings(redis_url="redis+cluster://mill")
    with pytest.raises(ConfigError, match=r"--control-redis-url \(HEADRACE_CONTROL_REDIS_URL\) is not set"):
        _ = settings.control_url
    with pytest.raises(ConfigError, match=r"--control-redis-url.*not a cluster.*redis\+cluster://other"):
        load(StoreSettings, ["--control-redis-url", "redis+cluster://other"], "headrace api")
    assert StoreSettings(redis_url="redis://a").control_url == "redis://a"
    assert StoreSettings(redis_url="redis+cluster://a", control_redis_url="redis://b").control_url == "redis://b"

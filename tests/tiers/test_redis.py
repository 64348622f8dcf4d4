"""One real Valkey: what it must do, and every way it can fail."""

import shutil
import ssl
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcellar.errors import CellarError, ConfigError
from kvcellar.tiers import EngineError, redis_nodes
from kvcellar.tiers.redis import RedisEngine, open_redis
from tests.server.engine import eventually
from tests.tiers.conformance import MIB, buffer, name_of, same
from tests.tiers.gate import Gate
from tests.tiers.remote import NAME, RemoteConformance, answers, every_call
from tools.backends import Valkey

LARGE = 9 * MIB


@pytest.fixture
def engine(valkey: Valkey, opened: Callable[..., RedisEngine]) -> RedisEngine:
    valkey.say("FLUSHALL")
    return opened(valkey.url)


class TestRedis(RemoteConformance):
    @pytest.fixture
    def make(self, valkey, opened):
        valkey.say("FLUSHALL")
        return lambda: opened(valkey.url)


# -- parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 2, 4])
@pytest.mark.parametrize("damage", ["removed", "shorter", "longer"])
def test_a_value_with_a_bad_part_is_a_miss_and_is_forgotten(engine, valkey, part, damage):
    engine.write(NAME, buffer(LARGE, seed=1))
    key = f"kvcellar:{NAME}#{part}"
    assert valkey.say("EXISTS", key) == b":1\r\n"
    match damage:
        case "removed":
            valkey.say("DEL", key)
        case "shorter":
            valkey.say("SET", key, "cut off")
        case "longer":
            valkey.say("APPEND", key, "x")
    assert not engine.read(NAME, buffer(LARGE))
    assert engine.exist([NAME]) == [False]
    engine.write(NAME, buffer(LARGE, seed=1))
    target = buffer(LARGE)
    assert engine.read(NAME, target)
    assert same(buffer(LARGE, seed=1), target)


def test_delete_leaves_no_parts_behind(engine, valkey):
    engine.write(NAME, buffer(LARGE, seed=1))
    engine.delete([NAME])
    assert valkey.say("DBSIZE") == b":0\r\n"


def test_what_somebody_else_wrote_under_our_name_is_a_miss(engine, valkey):
    valkey.say("SET", f"kvcellar:{NAME}", "x" * (16 + 64 + 1000))
    assert not engine.read(NAME, buffer(1000))
    engine.write(NAME, buffer(1000, seed=1))
    assert engine.read(NAME, buffer(1000))


def test_a_writer_that_dies_among_its_parts_leaves_nothing_to_find(opened, valkey):
    valkey.say("FLUSHALL")
    with Gate(valkey.port) as gate:
        engine = opened(f"redis://127.0.0.1:{gate.port}")
        gate.cut_after(8)  # one reply passes, +OK of the first part; the second does not
        with pytest.raises(EngineError):
            engine.write(NAME, buffer(LARGE, seed=1))
        assert engine.exist([NAME]) == [False]
        assert not engine.read(NAME, buffer(LARGE))


# -- connections ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 50, 70_000, 3 * MIB, 3 * MIB + 300_000])
def test_a_connection_cut_in_mid_value_is_an_error_and_is_never_used_again(opened, valkey, cut):
    sources = [buffer(LARGE if cut > 3 * MIB else 3 * MIB, seed=seed) for seed in range(2)]
    with Gate(valkey.port) as gate:
        engine = opened(f"redis://127.0.0.1:{gate.port}")
        for number, source in enumerate(sources):
            engine.write(f"ns/{number}", source)
        before = gate.connections
        gate.cut_after(cut)
        target = buffer(sources[0].size)
        with pytest.raises(EngineError, match=r"closed|hung up"):
            engine.read("ns/0", target)
        assert engine.read("ns/1", target)
        assert same(sources[1], target)
        assert gate.connections == before + 1


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one(opened, valkey, monkeypatch):
    monkeypatch.setattr(redis_nodes, "_REST_S", 0.0)
    with Gate(valkey.port) as gate, ThreadPoolExecutor(1) as pool:
        engine = opened(f"redis://127.0.0.1:{gate.port}", timeout="2")
        for seed in range(2):
            engine.write(name_of(seed), buffer(3 * MIB, seed=seed))
        gate.hold()
        target = buffer(3 * MIB)
        with pytest.raises(EngineError, match="did not answer in time"):
            engine.read(name_of(0), target)
        before = gate.requests
        second = pool.submit(engine.read, name_of(1), target)
        eventually(lambda: gate.requests > before)
        gate.release()  # both replies are on their way now
        assert second.result()
        assert same(buffer(3 * MIB, seed=1), target)


def test_connections_are_kept(opened, valkey):
    with Gate(valkey.port) as gate:
        engine = opened(f"redis://127.0.0.1:{gate.port}")
        for _ in range(10):
            engine.write(NAME, buffer(LARGE, seed=1))
            assert engine.read(NAME, buffer(LARGE))
        assert gate.connections == 1


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    pem = tmp_path / "pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", pem, "-out", tmp_path / "ca"], check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "ca").read_text())
    return pem


def test_tls(opened, valkey, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Gate(valkey.port, context) as gate:
        url = f"rediss://127.0.0.1:{gate.port}"
        engine = opened(url, ca_file=str(certificate))
        for size in (1000, 3 * MIB, LARGE):
            target = buffer(size)
            engine.write(NAME, buffer(size, seed=1))
            assert engine.read(NAME, target)
            assert same(buffer(size, seed=1), target)
        with pytest.raises(EngineError, match="not trusted; name the authority's with ca_file="):
            opened(url)
        with pytest.raises(EngineError, match="use rediss:// in the URL"):
            opened(f"redis://127.0.0.1:{gate.port}")
    with pytest.raises(EngineError, match="without TLS"):
        opened(f"rediss://127.0.0.1:{valkey.port}", ca_file=str(certificate), timeout="2")


# -- faults ---------------------------------------------------------------------------------------------


def test_killed_is_an_error_and_restarted_empty_is_a_miss(opened, start_valkey):
    server = start_valkey()
    engine = opened(server.url)
    engine.write(NAME, buffer(LARGE, seed=1))
    server.kill()
    for call in every_call(engine).values():
        with pytest.raises(EngineError, match="is the server running"):
            call()
    server.start()
    assert engine.exist([NAME]) == [False]
    assert not engine.read(NAME, buffer(LARGE))
    engine.write(NAME, buffer(LARGE, seed=1))
    assert engine.read(NAME, buffer(LARGE))


def test_paused_is_an_error_in_time_and_heals(opened, start_valkey):
    server = start_valkey()
    engine = opened(server.url, timeout="2")
    server.pause()
    for call in every_call(engine).values():
        with pytest.raises(EngineError, match="did not answer"):
            call()
    server.resume()
    eventually(answers(engine))
    engine.write(NAME, buffer(1000, seed=1))
    assert engine.read(NAME, buffer(1000))


def test_a_full_server_that_may_not_evict_says_what_to_set(opened, start_valkey):
    server = start_valkey("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    engine = opened(server.url)
    with pytest.raises(EngineError, match="maxmemory-policy allkeys-lru"):
        engine.write(NAME, buffer(LARGE, seed=1))
    assert engine.exist([NAME]) == [False]


def test_passwords(opened, start_valkey, tmp_path, monkeypatch):
    server = start_valkey("--requirepass", "tops3cret")
    with pytest.raises(EngineError, match="it wants a password"):
        opened(server.url)
    monkeypatch.setenv("OUR_PASSWORD", "wr0ng")
    with pytest.raises(
        EngineError, match="check what username=, password_file= or password_env= point to"
    ) as caught:
        opened(server.url, password_env="OUR_PASSWORD")
    assert "wr0ng" not in str(caught.value)
    monkeypatch.setenv("OUR_PASSWORD", "tops3cret")
    engine = opened(server.url, password_env="OUR_PASSWORD")
    engine.write(NAME, buffer(1000, seed=1))
    file = tmp_path / "password"
    file.write_text("tops3cret\n")
    assert opened(server.url, password_file=str(file), username="default").exist([NAME]) == [True]


def test_a_changed_password_is_read_again(opened, start_valkey, tmp_path):
    server = start_valkey("--requirepass", "first")
    file = tmp_path / "password"
    file.write_text("first")
    engine = opened(server.url, password_file=str(file))
    server.kill()
    server.arguments = ("--requirepass", "second")
    server.start()
    with pytest.raises(EngineError):
        engine.exist([NAME])
    file.write_text("second")
    assert engine.exist([NAME]) == [False]


def test_a_password_that_could_not_be_read_once_leaves_no_connection_without_it(
    opened, start_valkey, tmp_path
):
    server = start_valkey("--requirepass", "tops3cret")
    file = tmp_path / "password"
    file.write_text("tops3cret")
    engine = opened(server.url, password_file=str(file))
    server.kill()
    server.start()
    file.rename(tmp_path / "away")
    with pytest.raises(EngineError, match=r"cannot read .*/password: No such file"):
        engine.exist([NAME])
    (tmp_path / "away").rename(file)
    assert engine.exist([NAME]) == [False]


def test_a_server_without_password_says_so(opened, valkey, monkeypatch):
    monkeypatch.setenv("OUR_PASSWORD", "x")
    with pytest.raises(EngineError, match=r"leave password_file= and password_env= out"):
        opened(valkey.url, password_env="OUR_PASSWORD")


def test_values_expire(opened, valkey):
    valkey.say("FLUSHALL")
    engine = opened(valkey.url, ttl="86400")
    engine.write(NAME, buffer(LARGE, seed=1))
    for key in ("", "#0", "#4"):
        assert int(valkey.say("TTL", f"kvcellar:{NAME}{key}")[1:]) > 86000


def test_databases_and_prefixes_are_apart(opened, valkey):
    valkey.say("FLUSHALL")
    engines = [
        opened(valkey.url),
        opened(valkey.url, prefix="other/"),
        opened(f"redis://127.0.0.1:{valkey.port}/3"),
    ]
    for number, engine in enumerate(engines):
        assert engine.exist([NAME]) == [False]
        engine.write(NAME, buffer(1000 + number, seed=1))
    for number, engine in enumerate(engines):
        assert engine.read(NAME, buffer(1000 + number))


def test_a_cluster_that_is_none_says_so(opened, valkey):
    with pytest.raises(EngineError, match="use redis:// in the URL"):
        opened(f"redis+cluster://127.0.0.1:{valkey.port}")


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("redis://user:pw@h:1", {}, "holds no user and password"),
        ("redis://h:1", {"tll": "5"}, "unknown option 'tll'; known are .*ttl"),
        ("redis://h:1", {"ttl": "soon"}, "ttl='soon' should be a whole number"),
        ("redis://h:1", {"timeout": "0"}, "timeout='0' should be seconds"),
        ("redis://h:1", {"prefix": "{tag}"}, "prefix='{tag}' should match"),
        ("redis://h:1", {"password_file": "/nowhere"}, "there is no such file"),
        ("redis://h:1", {"password_env": "SURELY_NOT_SET"}, "SURELY_NOT_SET is not set"),
        ("redis://h:1", {"ca_file": __file__}, "certificates need TLS"),
        ("redis://h:99999", {}, "should be HOST:PORT"),
        ("redis://", {}, "should be HOST:PORT"),
        ("redis://h:1/zero", {}, "the number of a database"),
        ("redis://a:1,b:2", {}, r"redis:// is one server; for a cluster use redis\+cluster://"),
        ("rediss://a:1,b:2", {}, r"rediss:// is one server; for a cluster use rediss\+cluster://"),
        ("redis+cluster://h:1/1", {}, "the number of a database"),
    ],
)
def test_bad_settings_are_refused(url, options, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        open_redis(url, options)
    assert "pw@" not in str(caught.value)


def test_a_host_that_does_not_exist_is_said(opened):
    with pytest.raises(CellarError, match="no such host"):
        opened("redis://no-such-host.invalid:1")

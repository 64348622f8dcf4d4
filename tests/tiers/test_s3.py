"""A real S3 server (SeaweedFS): what it must do, and every way it can fail."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import obstore
import pytest
from obstore.store import S3Store

from kvcellar.errors import ConfigError, EngineError
from kvcellar.tiers.s3 import S3Engine, open_s3
from tests.server.engine import PATIENCE, eventually
from tests.tiers.conformance import MIB, buffer, name_of
from tests.tiers.gate import Gate
from tests.tiers.remote import NAME, RemoteConformance, answers, every_call, round_trip
from tools.backends import ACCESS_KEY, SECRET_KEY, SeaweedFS


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture
def opened(seaweedfs: SeaweedFS) -> Iterator[Callable[..., S3Engine]]:
    """opened(prefix="x", port=1, timeout="5"): closed at the end."""
    made: list[S3Engine] = []

    def open_one(
        bucket: str = SeaweedFS.BUCKET, prefix: str = "kv", port: int = 0, **options: str
    ) -> S3Engine:
        # A busy machine may take its time to hash what is put.
        endpoint = {"endpoint": f"http://127.0.0.1:{port or seaweedfs.port}", "timeout": "30"}
        made.append(open_s3(f"s3://{bucket}/{prefix}", endpoint | options))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture
def empty(raw: S3Store) -> None:
    for page in obstore.list(raw):
        obstore.delete(raw, [one["path"] for one in page])


@pytest.fixture
def engine(empty: None, opened: Callable[..., S3Engine]) -> S3Engine:
    return opened()


@pytest.fixture
def raw(seaweedfs: SeaweedFS) -> S3Store:
    """The same bucket without our engine."""
    options = {"allow_http": True}
    endpoint = f"http://127.0.0.1:{seaweedfs.port}"
    return S3Store(
        SeaweedFS.BUCKET,
        prefix="kv",
        endpoint=endpoint,
        region="us-east-1",
        client_options=options,  # type: ignore[arg-type]
    )


class TestS3(RemoteConformance):
    @pytest.fixture
    def make(self, empty, opened):
        return opened


@pytest.mark.parametrize("change", [-1, 1])
def test_a_truncated_or_longer_object_is_a_miss(engine, raw, change):
    engine.write(NAME, buffer(9 * MIB, seed=1))
    content = bytes(obstore.get(raw, NAME).bytes())
    obstore.put(raw, NAME, content[:change] if change < 0 else content + b"x", use_multipart=False)
    assert not engine.read(NAME, buffer(9 * MIB))
    engine.write(NAME, buffer(9 * MIB, seed=1))
    assert engine.read(NAME, buffer(9 * MIB))


def test_prefixes_are_apart(engine, opened):
    other = opened(prefix="other/place")
    engine.write(NAME, buffer(100, seed=1))
    assert other.exist([NAME]) == [False]
    other.write(NAME, buffer(200, seed=1))
    assert engine.read(NAME, buffer(100))
    assert other.read(NAME, buffer(200))
    other.delete([NAME])


# -- faults ---------------------------------------------------------------------------------------------


def test_a_missing_bucket_is_said(opened):
    with pytest.raises(EngineError, match="NoSuchBucket: there is no such bucket; make it"):
        opened(bucket="no-such-bucket")


def test_a_bucket_that_vanishes_is_said_and_used_again_when_it_is_back(opened, seaweedfs):
    seaweedfs.make_bucket("vanishing")
    engine = opened(bucket="vanishing")
    assert round_trip(engine, 1000, NAME)
    seaweedfs.remove_bucket("vanishing")

    # A read, since SeaweedFS makes a bucket anew when somebody writes to it. Again until it says so, since
    # its S3 side hears of what becomes of buckets a little later: until then the object is a mere miss.
    with pytest.raises(EngineError, match="there is no such bucket"):
        eventually(lambda: engine.read(NAME, buffer(1000)) and False)
    seaweedfs.make_bucket("vanishing")
    eventually(lambda: works(engine))


def works(engine: S3Engine) -> bool:
    """As `answers`, for a missing bucket: to ask for one object in it is a miss, and no error. That it can be
    listed does not mean yet that it may be written to.
    """
    with contextlib.suppress(EngineError):
        engine.check()
        return round_trip(engine, 1000, NAME)
    return False


def test_wrong_keys_are_said_and_not_shown(opened, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng-s3cret")
    with pytest.raises(EngineError, match="the keys are not right; see AWS_ACCESS_KEY_ID") as caught:
        opened()
    assert "wr0ng" not in str(caught.value)
    assert ACCESS_KEY not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(EngineError, match="the keys are not right"):
        opened()


def test_keys_from_a_file(opened, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    file.write_text(f"[cellar]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    assert round_trip(opened(credentials_file=str(file), profile="cellar"), 1000)
    with pytest.raises(ConfigError, match=r"should have a section \[default\]"):
        opened(credentials_file=str(file))
    file.write_text("s3cret, and nothing else")
    with pytest.raises(ConfigError, match="is not a file as `aws configure` writes it") as caught:
        opened(credentials_file=str(file))
    assert "s3cret" not in str(caught.value)


def test_no_keys_at_all_are_said(opened, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # where machines of a cloud have theirs
    with pytest.raises(EngineError, match="no keys were found; see AWS_ACCESS_KEY_ID"):
        opened(timeout="1")


ASK_AND_END = """
import sys, threading
from datetime import timedelta
from obstore.store import S3Store
from kvcellar.tiers.s3 import S3Engine

patient = {"allow_http": True, "timeout": timedelta(hours=1)}
store = S3Store("bucket", endpoint=sys.argv[1], region="us-east-1", client_options=patient)
engine = S3Engine(store, "", 3600.0)
threading.Thread(target=engine.exist, args=[["a0/b0-0-0", "a0/b1-0-0"]], daemon=True).start()
input()
"""


def test_an_endpoint_that_hangs_does_not_keep_a_process_that_ends(seaweedfs):
    with Gate(seaweedfs.port) as gate:
        gate.hold()
        command = [sys.executable, "-c", ASK_AND_END, f"http://127.0.0.1:{gate.port}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            eventually(lambda: gate.requests >= 2)
            try:
                process.communicate("\n", timeout=PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 0


def test_an_engine_that_could_not_be_opened_leaves_no_threads(opened):
    with pytest.raises(EngineError):
        opened(port=1)
    eventually(lambda: not [one for one in threading.enumerate() if "s3-head" in one.name])


def test_nobody_there_is_said(opened):
    with pytest.raises(EngineError, match="it cannot be reached; is it running"):
        opened(port=1)


@pytest.mark.parametrize("cut", [10, 300, 70_000, 5 * MIB])
def test_a_connection_cut_in_mid_value_is_an_error_and_the_next_read_is_right(opened, seaweedfs, cut):
    with Gate(seaweedfs.port) as gate:
        engine = opened(port=gate.port)
        engine.write(NAME, buffer(9 * MIB, seed=1))
        gate.cut_after(cut)
        with contextlib.suppress(EngineError):  # or obstore asks again by itself
            assert engine.read(NAME, buffer(9 * MIB))
        assert round_trip(engine, 9 * MIB, NAME, seed=2)
        engine.delete([NAME])


def test_killed_is_an_error_and_restarted_empty_is_a_miss(needs_backends, tmp_path):
    server = SeaweedFS(tmp_path)
    with server:
        url, endpoint = f"s3://{server.BUCKET}/kv", {"endpoint": f"http://127.0.0.1:{server.port}"}
        # A busy machine may take seconds for a large one; a server that is paused is not waited for so long.
        engine, hasty = (open_s3(url, endpoint | {"timeout": seconds}) for seconds in ("30", "2"))
        assert round_trip(engine, 9 * MIB, NAME)
        server.pause()
        for call in every_call(hasty).values():
            with pytest.raises(EngineError, match="did not answer in time"):
                call()
        server.resume()
        eventually(answers(hasty))
        assert round_trip(engine, 1000)
        server.kill()
        for call in every_call(engine).values():
            with pytest.raises(EngineError, match="cannot be reached"):
                call()
        server.start()
        eventually(answers(engine))
        assert engine.exist([NAME, name_of(2)]) == [False, False]
        assert not engine.read(NAME, buffer(9 * MIB))
        assert round_trip(engine, 9 * MIB)
        for one in (engine, hasty):
            one.close()


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("s3://key:secret@bucket", {}, "holds no user and password"),
        ("s3://", {}, "comes the name of a bucket"),
        ("s3://No_Bucket", {}, "comes the name of a bucket"),
        ("s3://bucket", {"endpoint": "127.0.0.1:9000"}, "endpoint='127.0.0.1:9000' should match"),
        ("s3://bucket", {"endpoint": "http://k:s@h"}, "endpoint=.* should match"),
        ("s3://bucket", {"regoin": "x"}, "unknown option 'regoin'; known are .*region"),
        ("s3://bucket", {"credentials_file": "/nowhere"}, "there is no such file"),
    ],
)
def test_bad_settings_are_refused(url, options, problem):
    with pytest.raises(ConfigError, match=problem):
        open_s3(url, options)

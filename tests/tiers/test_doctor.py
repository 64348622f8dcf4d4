"""`kvcellar doctor` against real engines, well and ill."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.cli.doctor import Finding, examine, print_findings
from kvcellar.tiers.disk import DiskEngine
from tests.tiers.conformance import buffer, name_of
from tests.tiers.liar import Liar


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcellar", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment or None)


def test_a_healthy_tier_is_measured_and_left_as_it_was(valkey):
    valkey.say("FLUSHALL")
    found = doctor("--json", "--tier", valkey.url)
    assert found.returncode == 0, found.stderr
    (finding,) = json.loads(found.stdout)
    assert finding["ok"]
    assert all(finding[figure] > 0 for figure in ("open_ms", "exist_ms", "write_gbps", "read_gbps"))
    assert valkey.say("DBSIZE") == b":0\r\n"


def test_each_tier_is_judged_apart(valkey, tmp_path):
    found = doctor("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB", "--tier", "redis://127.0.0.1:1")
    assert found.returncode == 1
    assert "ok   disk://" in found.stdout
    assert "FAIL redis://127.0.0.1:1" in found.stdout
    assert "is the server running, and is the port right?" in found.stdout


def test_a_tier_that_falls_silent_is_said_to_and_not_that_it_cannot_be_cleaned():
    with Liar() as liar:
        liar.reply = lambda _: None
        (finding,) = examine([f"{liar.url}?timeout=1"])
        assert "did not answer in time" in finding.problem


def test_what_a_store_says_moves_no_cursor(capsys):
    print_findings([Finding("s3://bucket", "AccessDenied: \x1b[2Jgone\x9b")], as_json=False)
    assert r"AccessDenied: \x1b[2Jgone\x9b" in capsys.readouterr().out


def test_it_is_said_in_terminals_that_do_not_know_their_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    print_findings([Finding("s3://bucket", "AccessDenied")], as_json=False)
    assert capsys.readouterr().out == "FAIL s3://bucket\n     AccessDenied\n"


def filled(folder: Path) -> dict[str, bytes]:
    """A disk of 4 MiB, full of small objects: its files."""
    engine = DiskEngine(folder, 4 << 20)
    for number in range(100):
        engine.write(name_of(number), buffer(64 << 10, seed=number))
    engine.close()
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", ["", "?size=4MiB", "?size=1MiB"])
def test_a_disk_that_is_full_is_well_and_keeps_what_it_has(size, tmp_path):
    before = filled(tmp_path)
    (tmp_path / "doctor").mkdir()  # one that was killed left it
    found = doctor("--json", "--tier", f"disk://{tmp_path}{size}")
    assert found.returncode == 0, found.stdout
    assert json.loads(found.stdout)[0]["write_gbps"] > 0
    assert files(tmp_path) == before


def test_a_file_system_that_is_full_is_well_and_not_measured(tmp_path, monkeypatch):
    before = filled(tmp_path)
    monkeypatch.setattr("kvcellar.cli.doctor._BESIDE_BYTES", 1 << 60)
    [found] = examine([f"disk://{tmp_path}"])
    assert (found.problem, found.note[:13]) == ("", "not measured,")
    assert files(tmp_path) == before


def test_a_disk_is_checked_as_the_server_would(tmp_path):
    (tmp_path / "thesis.tex").touch()
    found = examine([f"disk://{tmp_path}", f"disk://{tmp_path / 'new'}?size=1000TiB"])
    assert "choose an empty folder" in found[0].problem
    assert "lower the size" in found[1].problem


def test_tiers_come_from_variables_and_files_as_for_the_server(valkey, tmp_path):
    config = tmp_path / "kvcellar.toml"
    config.write_text(f'tier = ["{valkey.url}", "memory://"]\n')
    assert doctor("--config", str(config)).stdout.count("ok ") == 2
    assert doctor(KVCELLAR_TIER=valkey.url).stdout.count("ok ") == 1


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://bucket?endpoint=http://127.0.0.1:1", "it cannot be reached"),
        ("mooncake://127.0.0.1:1", "is mooncake_master running there"),
        ("redis://127.0.0.1:1?tll=5", "unknown option 'tll'"),
        ("gopher://x", "unknown; known are"),
    ],
)
def test_what_is_wrong_is_said(url, problem):
    found = doctor("--tier", url, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    assert found.returncode == 1
    assert problem in found.stdout
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("scheme", ["redis", "redys"])
def test_a_password_is_not_shown(scheme):
    found = doctor("--tier", f"{scheme}://:pa/ss@127.0.0.1:1?ttl=5")
    assert f"FAIL {scheme}://127.0.0.1:1\n" in found.stdout
    assert "pa/ss" not in found.stdout + found.stderr


def test_brackets_are_no_markup(tmp_path):
    found = doctor("--disk", str(tmp_path / "[" / "y]"), "--tier", "redis://[fd00::1]:1?tll=5")
    assert f"ok   disk://{tmp_path}/%5B/y%5D: opened" in found.stdout
    assert "FAIL redis://[fd00::1]:1\n     redis://[fd00::1]:1: unknown option" in found.stdout
    found = doctor("--tier", f"disk://{tmp_path}/[/x]?size=0")
    assert f"FAIL disk://{tmp_path}/[/x]\n     disk tier: " in found.stdout


def test_nothing_to_examine_is_said():
    found = doctor(KVCELLAR_TIER="")
    assert found.returncode == 2
    assert "name one with --tier URL or --disk PATH" in found.stderr


def test_a_missing_package_is_said(tmp_path):
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError(name='redis')")
    found = doctor("--tier", "redis://127.0.0.1:1", PYTHONPATH=str(tmp_path))
    assert "needs the package redis: pip install 'kvcellar[redis]'" in found.stdout


@pytest.fixture
def broken(install, tmp_path):
    """broken("import gone"): the scheme of a package whose module is this."""

    def broken(source: str) -> str:
        (tmp_path / "broken_tier.py").write_text(source)
        install("broken", tmp_path / "broken_tier.py", "open_broken")
        return "broken"

    return broken


BROKEN_ENGINE = """
class Engine:
    def __init__(self, bad): self.bad = bad
    def write(self, name, source): self.do("write")
    def exist(self, names): return [False for _ in names]
    def read(self, name, target): return False
    def delete(self, names): self.do("delete")
    def close(self): pass
    def do(self, what):
        if what in self.bad: raise {error}

def open_broken(url, options):
    engine = Engine(options["bad"])
    engine.do("open")
    return engine
"""


@pytest.mark.parametrize("error", ["ValueError('cannot ' + what)", "OSError(5, 'cannot ' + what)"])
@pytest.mark.parametrize("bad", ["open", "write", "write,delete"])
def test_an_engine_that_breaks_is_a_finding_and_the_others_are_examined(broken, error, bad):
    scheme = broken(BROKEN_ENGINE.format(error=error))
    found = doctor("--json", "--tier", f"{scheme}://u:tops3cret@h?bad={bad}", "--tier", "memory://")
    assert "Traceback" not in found.stderr
    assert found.returncode == 1
    first, second = json.loads(found.stdout)
    assert (first["tier"], first["ok"], second["ok"]) == ("broken://h", False, True)
    assert first["problem"].startswith("it broke: " + error.partition("(")[0])
    assert first["problem"].endswith("cannot " + bad.partition(",")[0])
    assert "tops3cret" not in found.stdout + found.stderr


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("from json import nowhere", "ImportError: cannot import name 'nowhere'"),
        ("", "AttributeError: module 'broken_tier' has no attribute 'open_broken'"),
        ("def open_broken(:", "SyntaxError"),
        ("raise RuntimeError('two\\nlines')", r"RuntimeError: two\nlines"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_said_in_one_line(broken, source, why, tmp_path):
    url = f"{broken(source)}://u:tops3cret@h"
    said = f"--tier broken://...: cannot be loaded: {why}"
    found = doctor("--tier", url, "--tier", "memory://")
    assert found.returncode == 1
    assert f"FAIL broken://h\n     {said}" in found.stdout
    assert "ok   memory://" in found.stdout
    where = ["--socket", str(tmp_path / "s"), "--folder", str(tmp_path / "memory")]
    command = [sys.executable, "-m", "kvcellar", "serve", "--memory", "1MiB", *where, "--tier", url]
    served = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert served.returncode == 2
    assert served.stderr.splitlines()[-1].startswith(f"kvcellar: {said}")
    everything = found.stdout + found.stderr + served.stderr
    assert "Traceback" not in everything
    assert "tops3cret" not in everything


def test_help_teaches():
    text = doctor("--help").stdout
    assert "kvcellar doctor --tier 'redis://" in text
    assert "exit code is 0" in text

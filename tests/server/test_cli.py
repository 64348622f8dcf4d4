"""The command line: what it shows, what it changes, and what it says when something is wrong."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import msgspec
import pytest

from kvcellar import __version__
from kvcellar.cli import main as cli
from kvcellar.cli import status
from kvcellar.config import HELP, load_settings
from kvcellar.wire import PREFIX, encode
from kvcellar.wire import messages as m
from kvcellar.wire.report import StatusReport
from tests.server.engine import NAMESPACES
from tests.server.raw import hello
from tests.support import namespace


@pytest.fixture
def kvcellar(monkeypatch, capsys):
    """kvcellar("status", "--json"): runs a command here; returns exit code, output and errors."""
    monkeypatch.setattr("kvcellar.server.Server", None)  # a server would never come back
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvcellar", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli()
        return end.value.code or 0, *capsys.readouterr()

    return run


def refused(*arguments):
    """What `kvcellar serve`, in a process of its own, says before it exits with code 2."""
    command = [sys.executable, "-m", "kvcellar", "serve", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert ended.stderr.startswith("kvcellar: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


# -- status, clear, pin


def test_status_is_for_people(server, engine, kvcellar):
    one = engine("tp2", session="llama-0")
    one.store(4)
    one.lookup(4)
    code, shown, _ = kvcellar("status", "--socket", server.socket)
    assert code == 0
    assert re.match(rf"kvcellar {__version__}, pid {server.pid}, serving .*{server.socket}", shown)
    short = one.namespace.id.hex()[:8]
    assert f"\n  {short}  tiny, bfloat16\n      4 chunks of 256 tokens in memory, with room for " in shown
    assert " in 2 shards; used by 1 engine\n" in shown
    assert f"\n  llama-0  test, ranks scheduler, 0, 1; namespace {short}\n" in shown
    assert (
        "\n      1 lookup found 4 of 4 chunks (100%); 4 chunks stored\n      1 lease with 32 KiB\n" in shown
    )


def test_status_says_why_engines_of_one_model_do_not_share(server, engine, kvcellar):
    engine("one", session="a")
    _, shown, _ = kvcellar("status", "--socket", server.socket)
    assert "differ in" not in shown
    engine("other", session="b")
    engine("tp2", session="c")
    _, shown, _ = kvcellar("status", "--socket", server.socket)
    differ = "tiny: 3 namespaces, which differ in\n"
    assert f"{differ}      parallel: [1,1,1,false] / [2,1,1,false]\n      tenant: none / other\n" in shown


def test_status_shows_of_long_values_only_the_words_that_differ_and_of_many_some(
    server, engine, kvcellar, monkeypatch
):
    for number in range(6):
        odd = namespace(checksum="xxh3-64", weights=f"v1 up to {4096 + number} tokens ab")
        monkeypatch.setitem(NAMESPACES, f"w{number}", odd)
        engine(f"w{number}", session=f"s{number}")
    _, shown, _ = kvcellar("status", "--socket", server.socket)
    assert "      weights: 4096 / 4097 / 4098 / 4099 / and 2 more\n" in shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1 << 10, "1 KiB"), ((1 << 30) - 4096, "1.0 GiB")]
)
def test_sizes_are_in_one_unit_however_they_round(size, shown):
    assert status._size(size) == shown


def test_status_shows_brackets_and_colons_as_they_are(server, engine, kvcellar, monkeypatch):
    for tenant in ("a", "b"):
        odd = namespace(checksum="xxh3-64", model="/models/[v1]/:cat:[/b]", tenant=tenant)
        monkeypatch.setitem(NAMESPACES, tenant, odd)
        engine(tenant, session=f"[red]{tenant}")
    code, shown, _ = kvcellar("status", "--socket", server.socket)
    assert code == 0
    assert shown.count("  /models/[v1]/:cat:[/b], bfloat16\n") == 2
    assert "/models/[v1]/:cat:[/b]: 2 namespaces, which differ in\n      tenant: a / b\n" in shown
    assert "\n  [red]b  test, " in shown


CLEAR_SCREEN, CSI, BACKWARDS = "\x1b[2J", "\x9b", "\u202e"


def test_a_terminal_obeys_no_name_that_an_engine_chose(server, raw, kvcellar):
    client = raw(hello("worker", session=f"a\nb{CSI}", label=f"{BACKWARDS}c"))
    client.register(namespace(checksum="xxh3-64", model=f"模型{CLEAR_SCREEN}"))
    _, shown, _ = kvcellar("status", "--socket", server.socket)
    assert r"  模型\x1b[2J, bfloat16" in shown
    assert "\n  a\\nb\\x9b  \\u202ec, ranks 0; namespace " in shown
    assert shown.replace("\n", "").isprintable()


def test_where_a_name_has_no_letters_it_is_spelled(server, raw):
    raw(hello("worker")).register(namespace(checksum="xxh3-64", model="模型"))
    command = [sys.executable, "-m", "kvcellar", "status", "--socket", str(server.socket)]
    latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=latin)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"  \u6a21\u578b, bfloat16" in ended.stdout


def test_a_mistake_is_one_line_whatever_is_in_it(kvcellar):
    _, _, said = kvcellar("status", "--socket", f"/nowhere/a\nb{CLEAR_SCREEN}")
    assert said.startswith(r"kvcellar: no server on /nowhere/a\nb\x1b[2J: No such file or directory; ")


def test_status_as_json_is_the_servers_report(server, engine, kvcellar):
    engine()
    code, shown, _ = kvcellar("status", "--json", "--socket", server.socket)
    report = msgspec.json.decode(shown, type=StatusReport)
    assert (code, report.pid, report.memory_limit) == (0, server.pid, 16 << 20)
    assert [session.name for session in report.sessions] == ["engine"]


def test_clear_forgets_one_namespace_or_everything(server, engine, kvcellar):
    one, other = engine("one", session="a"), engine("other", session="b")
    one.store(4)
    other.store(3)
    where = ["--socket", server.socket]
    assert kvcellar("clear", "--namespace", one.namespace.id.hex(), *where) == (0, "forgot 4 chunks\n", "")
    assert (one.hit(4), other.hit(3)) == (0, 3)
    assert kvcellar("clear", *where)[1] == "forgot 3 chunks\n"
    assert other.hit(3) == 0


def test_clear_leaves_what_is_being_read_until_it_has_been_read(server, engine, kvcellar):
    one = engine()
    one.store(4)
    hit = one.lookup(4)
    kvcellar("clear", "--socket", server.socket)
    assert one.hit(4) == 0
    assert one.read(hit) == []
    one.release(hit)
    [group] = server.status().namespaces[0].groups
    assert group.free == group.slots


def test_clear_without_a_server_frees_the_memory_it_left(server, engine, kvcellar):
    engine().store(4)
    where = server.where()
    assert server.stop() == 0
    assert server.slab_bytes() > 0
    code, shown, _ = kvcellar("clear", *where)
    assert code == 0
    assert f"that an earlier server left in {server.folder}" in shown
    assert not server.folder.exists()


def test_a_folder_of_somebody_elses_files_is_neither_used_nor_cleared(kvcellar, tmp_path):
    where = ["--socket", tmp_path / "s", "--folder", tmp_path / "home"]
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "photos").mkdir()
    says = f"kvcellar: {tmp_path}/home holds files and none of KVCellar's; nothing was touched: "
    assert refused(*where, "--memory", "1MiB").startswith(says)
    code, _, said = kvcellar("clear", *where)
    assert code == 2
    assert said.startswith(says)
    assert [*(tmp_path / "home").rglob("*")] == [tmp_path / "home" / "photos"]


def test_clear_does_not_touch_the_folder_of_a_server_on_another_socket(server, kvcellar, tmp_path):
    code, _, said = kvcellar("clear", "--socket", tmp_path / "nobody", "--folder", server.folder)
    assert code == 2
    assert f"another server (pid {server.pid}) is using {server.folder}" in said
    assert server.answers()


def test_pin_keeps_a_namespace_and_off_lets_it_go(server, engine, kvcellar):
    name = engine().namespace.id.hex()
    where = ["--socket", server.socket]
    assert kvcellar("pin", name, *where) == (0, f"{name} is pinned\n", "")
    assert server.status().namespaces[0].pinned
    assert kvcellar("pin", name, "--off", *where) == (0, f"{name} may be evicted again\n", "")
    assert not server.status().namespaces[0].pinned


def test_the_beginning_of_an_id_will_do_if_it_is_one_namespaces(server, engine, kvcellar, monkeypatch):
    one = engine("one", session="a")
    name = one.namespace.id.hex()
    where = ["--socket", server.socket]
    assert kvcellar("pin", name[:8], *where) == (0, f"{name} is pinned\n", "")
    twin = SimpleNamespace(id=name[:8] + "0" * 24)
    report = SimpleNamespace(namespaces=[twin, SimpleNamespace(id=name)])
    monkeypatch.setattr("kvcellar.client.AdminClient.status", lambda admin: report)
    code, _, said = kvcellar("clear", "--namespace", name[:8], *where)
    assert (code, said.startswith(f"kvcellar: 2 namespaces begin with {name[:8]}; ")) == (2, True)


def test_a_namespace_that_is_none_is_refused(server, kvcellar):
    where = ["--socket", server.socket]
    for name, says in (
        ("xyz", "'xyz' is no id of a namespace: 4 to 32 hex digits, as `kvcellar status` shows them"),
        ("bc9", "'bc9' is no id of a namespace: 4 to 32 hex digits, as `kvcellar status` shows them"),
        ("00" * 16, f"there is no namespace {'00' * 16}; `kvcellar status` lists them"),
    ):
        for command in (["clear", "--namespace", name], ["pin", name]):
            code, _, said = kvcellar(*command, *where)
            assert code == 2
            assert says in said


def test_without_a_server_every_question_says_so(tmp_path, kvcellar):
    missing = tmp_path / "s"
    for command in (["status"], ["pin", "00" * 16], ["clear", "--name", "nobodys-name"]):
        code, _, said = kvcellar(*command, "--socket", missing)
        advice = "is `kvcellar serve` running, and is that its --socket?"
        assert (code, said) == (2, f"kvcellar: no server on {missing}: No such file or directory; {advice}\n")


def test_clear_of_a_folder_is_of_that_folder_and_no_other(server, engine, kvcellar, tmp_path):
    one = engine()
    one.store(4)
    code, _, said = kvcellar("clear", "--folder", tmp_path / "none", "--socket", server.socket)
    assert (code, said) == (2, f"kvcellar: {tmp_path}/none is not there: no server left anything\n")
    code, _, said = kvcellar("clear", "--folder", server.folder, "--socket", server.socket)
    assert code == 2
    assert f"another server (pid {server.pid}) is using {server.folder}" in said
    code, _, said = kvcellar("clear", "--folder", server.folder, "--namespace", "0000")
    assert (code, "give one of them" in said) == (2, True)
    assert one.hit(4) == 4


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["clear", "--folder", "/tmp/" + "x" * 300], "File name too long; see --folder"),
        (
            ["bench", "tiers", "--folder", "/nowhere"],
            "No such file or directory; choose another with --folder",
        ),
        (["serve", "--disk", "/\udcff"], r"--disk: got '/\udcff', expected UTF-8"),
    ],
)
def test_a_path_that_cannot_be_is_one_line(command, problem, tmp_path, kvcellar):
    where = ["--socket", tmp_path / "s"] if command[0] != "bench" else []
    code, _, said = kvcellar(*command, *where)
    assert (code, said.count("\n")) == (2, 1)
    assert problem in said


def test_help_mentions_every_flag(kvcellar):
    serve = [f"--{name.replace('_', '-')}" for name in HELP]
    flags = {
        ("serve",): [*serve, "--config"],
        ("status",): ["--name", "--socket", "--json", "--config"],
        ("clear",): ["--namespace", "--name", "--socket", "--folder", "--config"],
        ("pin",): ["--off", "--name", "--socket", "--config"],
        ("bench", "copy"): ["--json", "--quick"],
        ("bench", "control"): ["--json", "--quick", "--peer"],
        ("bench", "tiers"): ["--json", "--quick", "--folder", "--tier"],
        (): ["serve", "status", "clear", "pin", "bench", "--version"],
    }
    for command, words in flags.items():
        code, shown, _ = kvcellar(*command, "--help")
        assert code == 0
        assert [word for word in words if word not in shown] == []
    assert kvcellar("clear", "-h") == kvcellar("clear", "--help")
    assert kvcellar("--version") == (0, f"{__version__}\n", "")


# -- settings

WRONG = {
    "name": ["", "a/b", "-x", "x" * 65],
    "memory": ["", "lots", "-1", "12XB", "1023KiB"],
    "folder": [""],
    "socket": [""],
    "hold_percent": ["", "0", "101", "half", "1.5"],
    "allow_uids": ["root", "1000,-1"],
    "drain_seconds": ["", "-1", "soon", "3601", "inf", "nan"],
    "grace_seconds": ["", "-1", "soon", "3601"],
    "disk": [""],
    "disk_size": ["", "lots", "-1", "1023KiB"],
    "tier": ["disk", "disk:///a b"],
    "log_level": ["", "loud"],
}


def test_there_is_a_wrong_value_for_every_setting():
    assert set(WRONG) == set(HELP)


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_line_that_names_it_and_what_is_expected(
    name, source, kvcellar, monkeypatch, tmp_path
):
    for value in WRONG[name]:
        arguments, called = [f"--{name.replace('_', '-')}={value}"], f"--{name.replace('_', '-')}"
        if source == "variable":
            arguments, called = [], f"KVCELLAR_{name.upper()}"
            monkeypatch.setenv(called, value)
        elif source == "file":
            path = tmp_path / "kvcellar.toml"
            path.write_text(f"{name} = {json.dumps(value)}")
            arguments, called = ["--config", str(path)], f"{name} in {path}"
        code, _, said = kvcellar("serve", *arguments)
        assert code == 2
        assert said.startswith(f"kvcellar: {called}: got {value!r}, expected ")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"), [("memory", "9" * 400), ("folder", "~nobody-by-this-name/x"), ("socket", "a\0b")]
)
def test_a_value_that_python_chokes_on_is_refused_like_any_other(name, value, kvcellar, tmp_path):
    path = tmp_path / "kvcellar.toml"
    path.write_text(f"{name} = {json.dumps(value)}")
    code, _, said = kvcellar("serve", "--config", path)
    assert code == 2
    assert f"{name} in {path}: got {value!r}, expected " in said


def test_a_file_with_an_unknown_key_or_no_toml_is_refused(kvcellar, tmp_path):
    path = tmp_path / "kvcellar.toml"
    for text, says in (("colour = 1", "unknown setting 'colour'; known are allow_uids,"), ("=", "not TOML")):
        path.write_text(text)
        code, _, said = kvcellar("serve", "--config", path)
        assert code == 2
        assert says in said
    path.write_text(f"tier = {'[' * 5000}{']' * 5000}")
    for wrong, says in ((path, "nested too deeply"), ("/dev/zero", "longer than 1 MiB")):
        code, _, said = kvcellar("serve", "--config", wrong)
        assert (code, said) == (2, f"kvcellar: {wrong} is no file of settings: it is {says}\n")
    code, _, said = kvcellar("serve", "--config", tmp_path / "missing")
    assert (code, said) == (2, f"kvcellar: cannot read {tmp_path}/missing: No such file or directory\n")


def test_flags_win_over_variables_and_variables_over_the_file(monkeypatch, tmp_path):
    path = tmp_path / "kvcellar.toml"
    path.write_text('name = "file"\nmemory = "1GiB"\nhold_percent = 10\nallow_uids = [1, 2]')
    monkeypatch.setenv("KVCELLAR_NAME", "variable")
    monkeypatch.setenv("KVCELLAR_MEMORY", "2GiB")
    settings = load_settings({"name": "flag"}, str(path))
    assert (settings.name, settings.memory, settings.hold_percent) == ("flag", 2 << 30, 10)
    assert (settings.allow_uids, settings.drain_seconds) == ((1, 2), 5.0)


STRANGE = {
    "no result": ["Reply", 1, []],
    "the answer to something else": ["Reply", 1, [["Pong"]]],
    "the report of another version": ["Reply", 1, [["Report", {"version": "9"}]]],
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_server_that_answers_something_else_is_one_line(what, kvcellar, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcellar.client.link._ids", itertools.repeat(1))
    body = msgspec.msgpack.encode(STRANGE[what])

    def serve():
        client, _ = listener.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(encode(m.Welcome(m.PROTOCOL_VERSION, 1, "9")))
            client.recv(1 << 16)
            client.sendall(len(body).to_bytes(PREFIX, "little") + body)
            client.recv(1 << 16)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        code, _, said = kvcellar("status", "--socket", tmp_path / "s")
        thread.join()
    assert (code, said[:10], said.count("\n")) == (2, "kvcellar: ", 1)


def test_output_that_goes_nowhere_is_one_line(server):
    command = [sys.executable, "-m", "kvcellar", "status", "--socket", str(server.socket)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, "kvcellar: cannot go on: No space left on device\n")


def test_trouble_with_a_file_names_the_file(stopped_server):
    roster = stopped_server.folder / "roster"
    assert stopped_server.start().stop() == 0
    roster.mkdir()
    said = refused(*stopped_server.where(), "--memory", "1MiB")
    assert said == f"kvcellar: cannot go on: Is a directory: {roster}\n"


# -- places where no server can be


def test_a_socket_path_that_is_taken_is_not_taken_over(server, tmp_path):
    other = ["--folder", tmp_path / "shm", "--memory", "1MiB"]
    (tmp_path / "file").write_text("precious")
    assert "exists and is not a socket" in refused(*other, "--socket", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    assert "a server is listening on" in refused(*other, "--socket", server.socket)
    assert server.answers()


def test_the_socket_of_a_dead_server_is_replaced(server):
    server.kill()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(str(server.socket))
    assert server.start().answers()


def test_a_folder_belongs_to_one_server(server, tmp_path):
    said = refused("--socket", tmp_path / "other", "--folder", server.folder, "--memory", "1MiB")
    assert f"another server (pid {server.pid}) is using {server.folder}" in said
    assert server.answers()


def test_places_that_cannot_be_used_are_refused_with_advice(tmp_path):
    (tmp_path / "file").touch()
    small = ["--memory", "1MiB"]
    here = ["--socket", tmp_path / "s", "--folder"]
    assert "choose another with --folder" in refused(*here, tmp_path / "file" / "below", *small)
    assert "choose another with --folder" in refused(*here, "/proc/kvcellar", *small)
    assert "choose another with --folder" in refused(*here, tmp_path / ("x" * 300))
    assert "Lower --memory" in refused(*here, tmp_path / "shm", "--memory", "100TiB")
    (tmp_path / "open").mkdir(mode=0o755)
    assert "mode 0700; remove it, or choose" in refused(*here, tmp_path / "open", *small)
    for path in ("/proc/kvcellar/s", tmp_path / ("x" * 108)):
        assert "choose another --socket" in refused("--socket", path, "--folder", tmp_path / "shm", *small)

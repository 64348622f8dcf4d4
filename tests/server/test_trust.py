"""Who may do what, and who is believed: other users of the host."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar.server.server import _MAX_OPENING
from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.server.test_cli import refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

NOBODY = 65534


def python_as(uid: int, code: str, *arguments: object) -> list[str]:
    """A command. Imports first: that user cannot read where we are installed."""
    needs = "import os, socket, sys, kvcellar.cli.status, kvcellar.server, kvcellar.transfer, encodings.idna"
    become = f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})"
    return [sys.executable, "-c", "\n".join([needs, become, code]), *map(str, arguments)]


@contextmanager
def running_as(uid: int, code: str, *arguments: object) -> Iterator[None]:
    """Until it is told to end. It says "ready" when it is."""
    command = python_as(uid, f"{code}\nprint('ready', flush=True)\nsys.stdin.read()", *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.communicate()


def said_as(uid: int, code: str, *arguments: object) -> tuple[int, str]:
    command = python_as(uid, code, *arguments)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def kvcellar_as(uid: int, *arguments: object) -> tuple[int, str]:
    code = "from kvcellar.cli import main\nsys.argv[0] = 'kvcellar'\nmain()"
    return said_as(uid, code, *arguments)


@pytest.fixture
def reachable(stopped_server: ServerProcess) -> Iterator[ServerProcess]:
    """A server whose socket others can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        stopped_server.socket = Path(folder) / "s"
        yield stopped_server
        assert stopped_server.process is None or stopped_server.stop() == 0


@pytest.fixture
def made_by_nobody() -> Iterator[Path]:
    """Where our own folder would be, had nobody been faster."""
    path = Path(f"/tmp/kvcellar-{os.getpid() + 100_000}")
    path.mkdir(mode=0o755)
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def test_another_user_is_refused_with_a_sentence_unless_allowed(reachable):
    def ask():
        return kvcellar_as(NOBODY, "status", "--json", "--socket", reachable.socket)

    reachable.start()
    advice = "is `kvcellar serve` running, and is that its --socket?"
    assert ask() == (2, f"kvcellar: no server on {reachable.socket}: Permission denied; {advice}\n")
    reachable.restart(allow_uids="65533")
    says = "kvcellar: uid 65534 may not attach; start the server with --allow-uids 65534\n"
    assert ask() == (2, says)
    reachable.restart(allow_uids="65533,65534")
    eventually(lambda: ask()[0] == 0)


def test_who_was_let_in_neither_clears_nor_pins(reachable, engine):
    reachable.start(allow_uids=str(NOBODY))
    one = engine()
    one.store(4)
    name = one.namespace.id.hex()
    for command in (["clear"], ["clear", "--namespace", name], ["pin", name]):
        code, said = kvcellar_as(NOBODY, *command, "--socket", reachable.socket)
        assert (code, said) == (2, "kvcellar: only the server's own user and root can do that\n")
    assert one.hit(4) == 4
    assert not reachable.status().namespaces[0].pinned
    one.close()


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_server_that_keeps_us_out_has_not_stopped_and_left_what_is_ours(
    reachable, made_by_nobody, monkeypatch, mode
):
    """Who names it would free memory that his own server left, and which nobody spoke of."""
    left = made_by_nobody / "left"
    left.mkdir(mode=0o700)
    (left / "lock").touch(mode=0o600)
    for path in (left, left / "lock"):
        os.chown(path, NOBODY, NOBODY)
    monkeypatch.setenv("KVCELLAR_FOLDER", str(left))
    reachable.start()
    reachable.socket.parent.chmod(mode)
    code, said = kvcellar_as(NOBODY, "clear", "--socket", reachable.socket)
    assert (code, "Permission denied" in said) == (2, True)
    assert left.exists()
    assert kvcellar_as(NOBODY, "clear", "--socket", made_by_nobody / "nobody is there") == (0, "")
    assert not left.exists()


HOLD = """
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(sys.argv[1])
"""


def test_who_may_not_attach_keeps_nobody_out(reachable):
    reachable.start(allow_uids="4242")
    with running_as(NOBODY, HOLD, reachable.socket, _MAX_OPENING + 50):
        assert reachable.answers()


LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
"""

FETCH = """
from pathlib import Path
from kvcellar.client.slabs import fetch_sketch
fetch_sketch(Path(sys.argv[1]))
"""


def test_our_default_socket_is_believed_only_of_us_and_root(made_by_nobody):
    """Somebody made the folder before us, and listens there as a server would."""
    us, path = int(made_by_nobody.name.rpartition("-")[2]), made_by_nobody / "default.sock"
    with running_as(NOBODY, LISTEN, path):
        code, said = kvcellar_as(us, "status")
        assert code == 2
        assert said.startswith(f"kvcellar: {path} is not to be trusted: it is served by uid {NOBODY}, and ")
        assert f"it is served by uid {NOBODY}" in said_as(us, FETCH, path)[1]


@pytest.mark.parametrize(("owner", "mode"), [(NOBODY, 0o755), (NOBODY, 0o1777), (0, 0o777)])
def test_slabs_lie_where_nobody_else_can_replace_them(made_by_nobody, owner, mode, tmp_path):
    """The number of nobody is also that of a root without a name, who owns /dev/shm in a user namespace."""
    os.chown(made_by_nobody, owner, owner)
    made_by_nobody.chmod(mode)
    said = refused("--socket", tmp_path / "s", "--folder", made_by_nobody / "slabs", "--memory", "1MiB")
    why = f"others can write to {made_by_nobody}; chmod go-w it, or "
    if owner:
        why = f"{made_by_nobody} belongs to uid {owner}, who could replace what is in it; "
    assert said == f"kvcellar: {why}choose another --folder\n"
    assert [*made_by_nobody.iterdir()] == []


def test_slabs_lie_behind_no_link_that_somebody_else_can_make_anew(stopped_server, tmp_path):
    """Where the kernel has no rule of its own for links in /tmp."""
    link = tmp_path / "link"
    link.symlink_to(stopped_server.folder, target_is_directory=True)
    stopped_server.folder = link / "slabs"
    stopped_server.start()
    assert stopped_server.stop() == 0
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    said = refused(*stopped_server.where(), "--memory", "1MiB")
    assert said.startswith(f"kvcellar: {link} belongs to uid {NOBODY}, who could replace what is in it; ")


IN_A_USER_NAMESPACE = """
import ctypes, os, sys
from pathlib import Path
from kvcellar.folders import check_parent
PR_SET_DUMPABLE, CLONE_NEWUSER = 4, 0x10000000
os.setuid(4242)
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else it may not write its own map
if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
    sys.exit(77)
Path("/proc/self/uid_map").write_text("0 4242 1")
assert Path("/dev/shm").stat().st_uid not in (0, os.geteuid())
check_parent(Path("/dev/shm"), "")
"""


def test_where_root_has_no_name_slabs_may_lie_in_shared_memory():
    command = [sys.executable, "-c", IN_A_USER_NAMESPACE]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    if ended.returncode == 77:
        pytest.skip("the kernel gives no user namespace")
    assert (ended.returncode, ended.stderr) == (0, "")

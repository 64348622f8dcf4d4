"""The command as a terminal's program: how it is stopped, and where there is no terminal at all."""

import os
import signal
import subprocess
import sys

import pytest


def with_signal(number, action):
    """A wrapper for programs that are to find it like this, whatever these tests were started under."""
    code = f"import os, signal, sys; signal.signal({number:d}, signal.{action}); "
    return [sys.executable, "-c", code + "os.execv(sys.argv[1], sys.argv[1:])"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_terminal_that_is_closed_stop_it_in_order(stopped_server, number):
    stopped_server.wrapper = with_signal(number, "SIG_DFL")
    stopped_server.start().signal(number)
    assert stopped_server.wait() == 0
    assert "stopped; 0 MiB stay in" in stopped_server.log.read_text()


def test_under_nohup_a_terminal_that_is_closed_does_not_stop_it(stopped_server):
    stopped_server.wrapper = with_signal(signal.SIGHUP, "SIG_IGN")
    stopped_server.start().signal(signal.SIGHUP)
    assert stopped_server.answers()


def test_ctrl_c_while_modules_are_imported_is_no_stack_trace(tmp_path):
    """One of them is in no hurry here."""
    (tmp_path / "typer.py").write_text("print('importing', flush=True)\ninput()\n")
    command = [*with_signal(signal.SIGINT, "SIG_DFL"), sys.executable, "-m", "kvcellar", "status"]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, text=True, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_without_standard_input_or_output_it_serves_and_stops_in_order(stopped_server, closed):
    """The event loop's own descriptors must not take their numbers: it would abort at its end."""
    stopped_server.wrapper = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    stopped_server.start()
    for number in range(3):
        assert "anon_inode" not in os.readlink(f"/proc/{stopped_server.pid}/fd/{number}")
    assert stopped_server.stop() == 0

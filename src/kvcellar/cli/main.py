"""The commands. A user's mistake is one line and exit code 2, never a stack trace.

Imports are kept inside commands where they are heavy: `kvcellar serve` must be ready in half a second.
"""

import asyncio
import contextlib
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvcellar import __version__
from kvcellar.cli import bench
from kvcellar.cli.plain import plain
from kvcellar.cli.simulate import simulate, trace
from kvcellar.config import HELP, load_settings
from kvcellar.errors import BadRequest, CellarError, Disconnected, StartupError
from kvcellar.wire.report import StatusReport

# \b keeps the lines of a paragraph as they are.
_HELP = """KVCellar keeps the KV cache that LLM engines throw away.

\b
One server per host, any number of engines, and a look at what they share:
  kvcellar serve
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVCellarConnector",
    "kv_connector_module_path":"kvcellar.vllm","kv_role":"kv_both"}'
  kvcellar status
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench", help="Measure this machine.")


def _flag(name: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{name.replace('_', '-')}", help=HELP[name], show_default=False
    )
    return option


Text = str | None
Name = Annotated[Text, _flag("name")]
Socket = Annotated[Text, _flag("socket")]
Config = Annotated[
    Text, typer.Option("--config", help="TOML file with any of these settings.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    name: Name = None,
    memory: Annotated[Text, _flag("memory")] = None,
    folder: Annotated[Text, _flag("folder")] = None,
    socket: Socket = None,
    hold_percent: Annotated[Text, _flag("hold_percent")] = None,
    allow_uids: Annotated[Text, _flag("allow_uids")] = None,
    drain_seconds: Annotated[Text, _flag("drain_seconds")] = None,
    grace_seconds: Annotated[Text, _flag("grace_seconds")] = None,
    disk: Annotated[Text, _flag("disk")] = None,
    disk_size: Annotated[Text, _flag("disk_size")] = None,
    tier: Annotated[list[str] | None, _flag("tier")] = None,
    log_level: Annotated[Text, _flag("log_level")] = None,
    config: Config = None,
) -> None:
    """Run the server of this host.

    No flag is needed. It runs until SIGTERM or Ctrl-C; what it holds stays in shared memory, and the next one
    goes on with it (`kvcellar clear` frees it). Every flag can also be given as KVCELLAR_<FLAG> or in a TOML
    file (--config); flags win, then variables.
    """
    flags = {key: value for key, value in locals().items() if key not in ("config", "tier")}
    flags["tier"] = " ".join(tier) if tier else None
    settings = load_settings(flags, config)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    import uvloop  # noqa: PLC0415 - only the server needs it

    from kvcellar.server import Server  # noqa: PLC0415 - likewise

    async def run() -> None:
        await Server(settings).serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@app.command()
def status(name: Name = None, socket: Socket = None, as_json: Json = False, config: Config = None) -> None:
    """Show what the server holds, and for whom."""
    from kvcellar.cli.status import fetch_status, print_status  # noqa: PLC0415 - numpy takes its time

    report = fetch_status(_socket(name, socket, config))
    print_status(report, as_json=as_json)


@app.command()
def clear(
    namespace: Annotated[str, typer.Option(help="Only this namespace: its id, as `status` shows it.")] = "",
    name: Name = None,
    socket: Socket = None,
    folder: Annotated[
        Text, typer.Option(help="Free what a stopped server left in this folder.", show_default=False)
    ] = None,
    config: Config = None,
) -> None:
    """Forget cached KV. Without a running server, free the shared memory that the last one left.

    Pinned namespaces are no exception. Tiers keep what they have.
    What engines are reading at this moment stays until they have read it.
    """
    from kvcellar.arena import remove_folder  # noqa: PLC0415 - numpy takes its time
    from kvcellar.client import AdminClient  # noqa: PLC0415 - likewise

    settings = load_settings({"name": name, "socket": socket, "folder": folder}, config)
    if folder is not None and namespace:
        raise StartupError(
            "--namespace asks a server, --folder frees what a stopped one left: give one of them"
        )
    left = settings.folder_path
    try:
        if folder is None:
            with AdminClient(settings.socket_path) as admin:
                chosen = _find_namespace(admin.status(), namespace) if namespace else None
                print(f"forgot {admin.clear(chosen):,} chunks")
                return
    except Disconnected:
        if namespace or _keeps_us_out(settings.socket_path) or not _is_there(left):
            raise
    if not _is_there(left):
        raise StartupError(f"{left} is not there: no server left anything")
    freed = remove_folder(left)
    print(f"freed {freed >> 20} MiB that an earlier server left in {left}")


@app.command()
def pin(
    namespace: Annotated[str, typer.Argument(help="Its id, as `status` shows it.")],
    off: Annotated[bool, typer.Option("--off", help="Allow eviction again.")] = False,
    name: Name = None,
    socket: Socket = None,
    config: Config = None,
) -> None:
    """Evict nothing of a namespace.

    Until the pin is taken off or the server stops.
    """
    from kvcellar.client import AdminClient  # noqa: PLC0415 - numpy takes its time

    with AdminClient(_socket(name, socket, config)) as admin:
        found = _find_namespace(admin.status(), namespace)
        admin.pin(found, not off)
    print(f"{found.hex()} may be evicted again" if off else f"{found.hex()} is pinned")


@app.command()
def doctor(
    tier: Annotated[list[str] | None, _flag("tier")] = None,
    disk: Annotated[Text, _flag("disk")] = None,
    disk_size: Annotated[Text, _flag("disk_size")] = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Check the tiers (disk, Redis, S3, ...): can each be used, how fast is it, or what is wrong.

    Examines the tiers that `kvcellar serve` would have with the same flags, variables and TOML file:

    \b
    kvcellar doctor --tier 'redis://cache:6379?password_file=/etc/kvcellar/redis'

    Each is opened as the server would do it, and a few objects of 4 MiB are written, found, read, compared
    and deleted again; nothing else that is stored there is touched. Of a disk the folder is checked, and made
    if it is not there; the objects go to a folder of their own in it, which is removed again. It must not be
    in use by a server: `kvcellar status` shows that one. The exit code is 0 if all can be used, 1 if not.
    """
    from kvcellar.cli.doctor import examine, print_findings  # noqa: PLC0415 - numpy takes its time

    flags = {"disk": disk, "disk_size": disk_size, "tier": " ".join(tier) if tier else None}
    urls = load_settings(flags, config).tier_urls
    if not urls:
        raise StartupError("there are no tiers: name one with --tier URL or --disk PATH, see docs/tiers.md")
    findings = examine(urls)
    print_findings(findings, as_json=as_json)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


app.command()(simulate)
app.command()(trace)


def _socket(name: str | None, socket: str | None, config: str | None) -> Path:
    return load_settings({"name": name, "socket": socket}, config).socket_path


def _keeps_us_out(socket: Path) -> bool:
    """A server that is somebody else's has not stopped, and did not leave what lies in our own folder."""
    try:
        socket.stat()
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(socket, os.W_OK)


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError as error:
        raise StartupError(f"cannot use {folder}: {error.strerror}; see --folder") from None


def _find_namespace(report: StatusReport, text: str) -> bytes:
    """By the beginning of its id."""
    if not re.fullmatch("[0-9a-fA-F]{4,32}", text):
        raise BadRequest(
            f"{text!r} is no id of a namespace: 4 to 32 hex digits, as `kvcellar status` shows them"
        )
    found = [one.id for one in report.namespaces if one.id.startswith(text.lower())]
    if not found:
        raise BadRequest(f"there is no namespace {text}; `kvcellar status` lists them")
    if len(found) > 1:
        raise BadRequest(f"{len(found)} namespaces begin with {text}; `kvcellar status --json` has whole ids")
    return bytes.fromhex(found[0])


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may be without the letters of a name
    try:
        app()
    except Disconnected as error:
        _fail(f"{error}; is `kvcellar serve` running, and is that its --socket?")
    except CellarError as error:
        _fail(str(error))
    except OSError as error:  # the output goes nowhere: a full disk
        with contextlib.suppress(OSError):
            sys.stdout.close()
        what = f": {error.filename}" if error.filename else ""
        _fail(f"cannot go on: {error.strerror or error}{what}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(why: str) -> NoReturn:
    print(f"kvcellar: {plain(why)}", file=sys.stderr)
    sys.exit(2)

"""The kvcellar command, and `python -m kvcellar`. Ctrl-C while modules are still being imported is an end
like any other, not a stack trace: so nothing else is imported at the top.
"""

import signal


def main() -> None:
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as under nohup
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvcellar.cli import main as run  # noqa: PLC0415 - this is what takes the time

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

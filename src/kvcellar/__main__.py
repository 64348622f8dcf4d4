"""The kvcellar command, and `python -m kvcellar`. Ctrl-C while modules are still being imported is an end
like any other, not a stack trace: so nothing else is imported at the top.
"""

import os
import signal


def main() -> None:
    _fill_standard_descriptors()
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as under nohup
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvcellar.cli import main as run  # noqa: PLC0415 - this is what takes the time

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _fill_standard_descriptors() -> None:
    """One that is closed (`<&-`) would be given to the next file that is opened: to an event loop's, which
    dies of that, or to a slab, and errors be printed into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one


if __name__ == "__main__":
    main()

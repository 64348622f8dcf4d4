"""Where engines come from: a process that has vLLM imported, and forks for each of them; so they are up in
three seconds instead of ten. A program for vLLM's own interpreter; `births.py` drives it.

Reads on the socket that is its stdin, until that ends: one JSON object at a time, the environment of an
engine, with three descriptors: the engine's stdin, stdout and stderr. Answers each with the engine's pid. The
engine is the program engine.py.
"""

# mypy: disable-error-code="import-not-found"

import array
import json
import os
import signal
import socket

from tests.vllm import engine

_MOST = 1 << 20  # bytes of an environment


def main() -> None:
    sock = socket.socket(fileno=os.dup(0))
    engine.set_environment(ranks=1)
    import vllm.config  # noqa: PLC0415 -- only after the environment is set
    import vllm.lora.request  # noqa: PLC0415
    import vllm.v1.core.sched.scheduler  # noqa: PLC0415
    import vllm.v1.engine.core  # noqa: PLC0415
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever asked for them sees them end
    while True:
        data, control, _, _ = sock.recvmsg(_MOST, socket.CMSG_SPACE(3 * 4))
        if not data:
            return
        fds = array.array("i")
        [(_, _, payload)] = control
        fds.frombytes(payload)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            sock.close()
            os.environ.clear()
            os.environ.update(json.loads(data))
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
                os.close(fd)
            engine.main()
            os._exit(0)
        for fd in fds:
            os.close(fd)
        sock.sendall(child.to_bytes(4, "little"))


if __name__ == "__main__":
    main()

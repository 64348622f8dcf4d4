"""The GPU's mover, kernel and all, without a GPU: a program for vLLM's interpreter, which has torch and
Triton. test_kernels.py drives it.

Reads cases of bench/gpu/geometry.py from stdin, one JSON array a line, and answers each with a line: "same",
or what differs, as JSON text.
"""

import json
import sys
import traceback

from tests.cuda import emulate

emulate.install()

import torch  # noqa: E402

from bench.gpu.check import check  # noqa: E402
from bench.gpu.geometry import from_json  # noqa: E402
from kvcellar.transfer.cuda import Pins, launch  # noqa: E402


def main() -> None:
    emulate.launch_on_streams(launch)
    pins = Pins(torch.device("cpu"))
    for line in sys.stdin:
        case = from_json(json.loads(line))
        emulate.shuffle(case.seed)
        try:
            check(case, torch.device("cpu"), pins if case.seed % 2 else None)
            answer = "same"
        except Exception:  # noqa: BLE001 - whatever it is, the test tells it
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""The kernel as Triton compiles it for a GPU, on a machine without any: a program for vLLM's interpreter.
test_kernels.py drives it.

Answers with a JSON object: by kind of kernel, whether it may be launched without Triton; and the same of
kernels that must not be.
"""

import json
import os

from tests.cuda import emulate

emulate.install()
os.environ["TRITON_INTERPRET"] = "0"  # this once it is compiled

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvcellar.transfer import kernels  # noqa: E402
from kvcellar.transfer.cuda.launch import takes_ours  # noqa: E402


def ptx(unit: int, *, load: bool) -> str:
    function = kernels._move
    names = [parameter.name for parameter in function.params]
    staging = "*i64" if unit == kernels.WORD else "*u8"
    types = ["*i64", "*i64", staging, "*i64", "*i64", "*i64", *["i32"] * 4, *["constexpr"] * 4]
    values = {(10,): unit, (11,): load, (12,): True, (13,): kernels._TILE}
    source = ASTSource(function, dict(zip(names, types, strict=True)), values)
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return text


def main() -> None:
    compiled = {
        f"{unit} {load}": ptx(unit, load=load)
        for unit in (kernels.WORD, kernels.BYTE)
        for load in (True, False)
    }
    one = next(iter(compiled.values()))
    first = one.index(".param")
    others = {
        "one more before": one[:first] + ".param .u64 hidden,\n" + one[first:],
        "one less": one[:first] + one[one.index(".param", first + 1) :],
        "another type": one.replace(".param .u32", ".param .u64"),
        "not a kernel": "",
    }
    print(json.dumps({name: takes_ours(text) for name, text in (compiled | others).items()}))


if __name__ == "__main__":
    main()

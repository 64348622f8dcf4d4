"""The kernels under Triton's interpreter against a plain copy, for random geometries. Needs torch and Triton,
no GPU; run by test_kernels.py in vLLM's environment.
"""

import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch

from kvcellar.transfer import sum64
from kvcellar.transfer.kernels import move
from tests.cuda.geometry import checksum, draw, object_bytes, shape_of, tensors


def check(seed: int) -> str:
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    case = draw(random_)
    layers = tensors(case, "cpu")
    per_chunk, chunks = random_.randint(1, 2), random_.randint(1, 2)
    ids = random_.sample(range(case.num_blocks), per_chunk * chunks)
    blocks = torch.tensor(ids, dtype=torch.int64).view(chunks, per_chunk)
    table, size = [], 0
    for layer in layers:
        shape = shape_of(layer, case.num_blocks)
        for number, piece in enumerate(shape.pieces):
            start = size + number * shape.run
            table.append([layer.data_ptr() + piece, shape.stride, shape.run // 8, start, shape.block_bytes])
        size += shape.block_bytes * per_chunk
    weights = [sum64.row_weights(sum64.rows_of(size)), sum64.COLUMN]
    on_device = tuple(torch.from_numpy(words.view(np.int64).copy()) for words in weights)
    staging = torch.zeros(chunks * size // 8, dtype=torch.int64)
    expected = [object_bytes(layers, case.num_blocks, row) for row in blocks.tolist()]
    promised = [checksum(data) for data in expected]

    def run(*, load: bool, some: torch.Tensor = blocks) -> list[int]:
        sums = torch.zeros(chunks, dtype=torch.int64)
        move(torch.tensor(table), some, range(chunks), staging, sums, on_device, 0, size, load=load)
        return list(sum64.finish(sums.numpy().view(np.uint64), size).tolist())

    assert run(load=False) == promised, f"{case}: sums of a gather"
    assert staging.numpy().tobytes() == b"".join(expected), f"{case}: bytes of a gather"
    for layer in layers:
        layer.view(torch.uint8).zero_() if layer.is_contiguous() else layer.copy_(torch.zeros_like(layer))
    skipped = blocks.clone()
    skipped[0, 0] = -1
    assert run(load=True, some=skipped) == promised, f"{case}: sums of a scatter that skips"
    got = [object_bytes(layers, case.num_blocks, row) for row in blocks.tolist()]
    assert got[0] != expected[0], f"{case}: a skipped block was written"
    assert got[1:] == expected[1:], f"{case}: bytes of a scatter that skips"
    assert run(load=True) == promised, f"{case}: sums of a scatter"
    assert [object_bytes(layers, case.num_blocks, row) for row in blocks.tolist()] == expected, f"{case}"
    staging[random_.randrange(len(staging))] ^= 1 << random_.randrange(63)
    assert run(load=True) != promised, f"{case}: a flipped bit went unseen"
    return case.kind


def main() -> None:
    seeds = range(int(sys.argv[1]), int(sys.argv[2]))
    kinds = [check(seed) for seed in seeds]
    print(f"{len(kinds)} geometries of {len(set(kinds))} kinds")


if __name__ == "__main__":
    main()

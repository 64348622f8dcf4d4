"""Random KV memory in the shapes and orders that attention backends use, and in some that none does.

Knows where a block's bytes lie by plain indexing; knows nothing of kernels, slots and keys.
"""

import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcellar.transfer.geometry import block_shape

KINDS = ("nhd", "hnd", "split", "interleaved", "mla", "cross-layer", "small-kernel-blocks", "padded")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}

_MOST_BYTES = 8 << 20


class GroupCase(NamedTuple):
    """The KV of one group."""

    kind: str
    layers: int
    tokens: int  # of a block
    heads: int
    dim: int
    dtype: str
    shift: int  # elements before the first: what follows is not aligned, if odd


class Case(NamedTuple):
    groups: list[GroupCase]
    num_blocks: int
    per_chunk: int  # blocks of a chunk in the group with the largest ones
    chunks: int
    staging: int  # bytes
    seed: int


def from_json(fields: list[object]) -> Case:
    """A tuple in JSON is a list."""
    case = Case(*fields)  # type: ignore[arg-type]
    return case._replace(groups=[GroupCase(*group) for group in case.groups])


def draw(seed: int) -> Case:
    """A case for a GPU: blocks of real sizes, and few enough for a host to compare every byte."""
    pick = random.Random(seed)
    while True:
        case = _draw(pick, seed)
        if sum(_bytes(group) for group in case.groups) * case.num_blocks <= _MOST_BYTES:
            return case


def _draw(pick: random.Random, seed: int) -> Case:
    smallest = pick.choice([16, 16, 32, 64, 128, 256])
    groups = [
        GroupCase(
            kind=pick.choice(KINDS),
            layers=pick.randint(1, 6),
            tokens=min(256, smallest * pick.choice([1, 1, 2])),
            heads=pick.choice([1, 2, 8]),
            dim=pick.choice([8, 64, 80, 128, 192, 576] if pick.random() < 0.7 else [1, 3, 5, 33]),
            dtype=pick.choice(list(DTYPES)),
            shift=0 if pick.random() < 0.8 else pick.randint(1, 7),
        )
        for _ in range(pick.choice([1, 1, 2, 3]))
    ]
    per_chunk, chunks = pick.randint(1, 2), pick.randint(1, 5)
    num_blocks = 2 * chunks * per_chunk * 2 + pick.randint(3, 9)
    staging = pick.choice([0, 64 << 10, 1 << 20, 64 << 20])
    return Case(groups, num_blocks, per_chunk, chunks, staging, seed)


def _bytes(group: GroupCase) -> int:
    """Of one block in all layers, about."""
    width: int = DTYPES[group.dtype].itemsize
    return group.layers * group.tokens * group.heads * 2 * group.dim * width


def tensors(group: GroupCase, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    """The KV of every layer, random bytes."""
    tokens, heads, dim = group.tokens, group.heads, group.dim
    if group.kind == "cross-layer":
        whole = _random((num_blocks, group.layers, tokens, heads, 2 * dim), group, device)
        return [whole[:, layer] for layer in range(group.layers)]
    cut = 2 if tokens % 2 == 0 else 1
    shape = {
        "nhd": (num_blocks, tokens, heads, 2 * dim),
        "hnd": (num_blocks, heads, tokens, 2 * dim),
        "split": (2, num_blocks, tokens, heads, dim),
        "interleaved": (num_blocks, 2, tokens, heads, dim),
        "mla": (num_blocks, tokens, dim),
        "small-kernel-blocks": (num_blocks * cut, tokens // cut, heads, dim),
        "padded": (num_blocks, heads, tokens, dim + 1),
    }[group.kind]
    layers = [_random(shape, group, device) for _ in range(group.layers)]
    if group.kind == "padded":
        return [layer[..., :dim] for layer in layers]
    return [layer.transpose(1, 2) if group.kind == "nhd" else layer for layer in layers]


def _random(shape: tuple[int, ...], group: GroupCase, device: torch.device) -> torch.Tensor:
    dtype = DTYPES[group.dtype]
    count = int(np.prod(shape)) + group.shift
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).to(device)
    return raw.view(dtype)[group.shift :].view(shape)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte that the tensor's storage has, those between its elements too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def block_places(tensor: torch.Tensor, num_blocks: int) -> npt.NDArray[np.int64]:
    """(num_blocks, block_bytes): where in that storage each byte of a block lies, in object order."""
    shape = block_shape(tensor.shape, tensor.stride(), tensor.element_size(), num_blocks)
    starts = tensor.storage_offset() * tensor.element_size() + shape.stride * np.arange(num_blocks)
    inside = np.add.outer(np.array(shape.pieces), np.arange(shape.run)).reshape(-1)
    places: npt.NDArray[np.int64] = np.add.outer(starts, inside)
    return places

"""Tensors in the shapes and orders that attention backends use, and what a plain copy makes of them."""

import random
from typing import NamedTuple

import torch

from kvcellar.transfer import sum64
from kvcellar.transfer.geometry import BlockShape, block_shape

KINDS = ("nhd", "hnd", "split", "interleaved", "mla", "cross-layer", "small-kernel-blocks")


class Case(NamedTuple):
    kind: str
    layers: int
    num_blocks: int
    tokens: int  # of a block
    heads: int
    dim: int
    dtype: torch.dtype


def draw(random_: random.Random) -> Case:
    dtype = random_.choice([torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    return Case(
        kind=random_.choice(KINDS),
        layers=random_.randint(1, 4),
        num_blocks=random_.randint(6, 20),
        tokens=random_.choice([16, 32, 64]),
        heads=random_.choice([1, 2, 8]),
        dim=random_.choice([8, 64, 80, 128]),
        dtype=dtype,
    )


def tensors(case: Case, device: str) -> list[torch.Tensor]:
    """The KV of every layer, filled with random bytes."""
    blocks, tokens, heads, dim = case.num_blocks, case.tokens, case.heads, case.dim
    if case.kind == "cross-layer":
        whole = _fill((blocks, case.layers, tokens, heads, 2 * dim), case.dtype, device)
        return [whole[:, layer] for layer in range(case.layers)]
    return [_layer(case, device) for _ in range(case.layers)]


def _layer(case: Case, device: str) -> torch.Tensor:
    blocks, tokens, heads, dim = case.num_blocks, case.tokens, case.heads, case.dim
    shape = {
        "nhd": (blocks, tokens, heads, 2 * dim),
        "hnd": (blocks, heads, tokens, 2 * dim),
        "split": (2, blocks, tokens, heads, dim),
        "interleaved": (blocks, 2, tokens, heads, dim),
        "mla": (blocks, tokens, dim),
        "small-kernel-blocks": (blocks * (tokens // 8), 8, heads, dim),
    }[case.kind]
    whole = _fill(shape, case.dtype, device)
    return whole.transpose(1, 2) if case.kind == "nhd" else whole


def _fill(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    raw = torch.empty(shape, dtype=dtype, device=device)
    size = raw.numel() * raw.element_size()
    raw.view(torch.uint8).view(-1).copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, device=device))
    return raw


def shape_of(tensor: torch.Tensor, num_blocks: int) -> BlockShape:
    return block_shape(tensor.shape, tensor.stride(), tensor.element_size(), num_blocks)


def block_bytes(tensor: torch.Tensor, num_blocks: int, block: int) -> bytes:
    """A block's bytes by plain indexing, piece after piece."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    raw = whole.view(torch.uint8).cpu()
    shape = shape_of(tensor, num_blocks)
    start = tensor.storage_offset() * tensor.element_size() + block * shape.stride
    return b"".join(
        raw[start + piece : start + piece + shape.run].numpy().tobytes() for piece in shape.pieces
    )


def object_bytes(layers: list[torch.Tensor], num_blocks: int, blocks: list[int]) -> bytes:
    """An object as identity/layout.py describes it."""
    return b"".join(block_bytes(layer, num_blocks, block) for layer in layers for block in blocks)


def checksum(data: bytes) -> int:
    digest = sum64.Sum64()
    digest.update(data)
    return digest.intdigest()

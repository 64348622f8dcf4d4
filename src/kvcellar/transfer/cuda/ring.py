"""Staging buffers in GPU memory, and the streams that fill and empty them.

All DMA of a direction is on one stream, so that the bus goes from one copy to the next without a gap; kernels
run on another, beside the DMA of the next buffer. Events keep a buffer from being overwritten. Knows nothing
of objects: whoever calls says what a kernel does with a buffer.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime as cudart

from kvcellar.errors import CellarError
from kvcellar.transfer import sum64
from kvcellar.transfer.steps import BlockIds

BUFFERS = 2  # one is moved by a kernel while the other is on the bus

Span = tuple[int, int]  # address and bytes on the host

_TO_GPU = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
_TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


class Run:
    """One call: block tables and sums on the GPU, by group; at its end, the sums here."""

    def __init__(self, blocks: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
        self.blocks = blocks
        self.sums = sums
        self.added: list[sum64.Words] = []


class _Buffer:
    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.empty(size // 8, dtype=torch.int64, device=device)
        self.copied = torch.cuda.Event()  # to or from the host
        self.moved = torch.cuda.Event()  # by a kernel


class Ring:
    """The staging buffers of one direction: all DMA on one stream, all kernels on another."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._dma = torch.cuda.Stream(device)
        # Ahead of the engine's kernels: ours are short, and the bus waits for them.
        self._work = torch.cuda.Stream(device, priority=-1)
        self._buffers = [_Buffer(device, buffer_bytes) for _ in range(BUFFERS)]
        self._turn = 0

    @contextlib.contextmanager
    def running(self, tables: Sequence[BlockIds], after: torch.cuda.Event | None) -> Iterator[Run]:
        """From what the kernels read to what they have added up. Whatever happens in between, afterwards
        nothing is under way any more.
        """
        if after is not None:
            self._work.wait_event(after)
            self._dma.wait_event(after)
        flat = torch.from_numpy(np.concatenate([table.reshape(-1) for table in tables])).pin_memory()
        rows = [len(table) for table in tables]
        with torch.cuda.stream(self._work):
            blocks = flat.to(self._device, non_blocking=True)
            sums = torch.zeros(sum(rows), dtype=torch.int64, device=self._device)
            by_group = blocks.split([table.size for table in tables])
            shaped = [part.view(table.shape) for part, table in zip(by_group, tables, strict=True)]
            run = Run(shaped, sums.split(rows))
            try:
                yield run
            finally:
                self._work.wait_stream(self._dma)
                added = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
                added.copy_(sums, non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record()
                done.synchronize()
        run.added = np.split(added.numpy().view(np.uint64), np.cumsum(rows)[:-1])

    def load(self, spans: Sequence[Span], scatter: Callable[[torch.Tensor], None]) -> None:
        """Bytes at these addresses into a buffer, and out of it."""
        buffer = self._next()
        self._dma.wait_event(buffer.moved)
        _copy(buffer.words.data_ptr(), spans, self._dma, _TO_GPU)
        buffer.copied.record(self._dma)
        self._work.wait_event(buffer.copied)
        scatter(buffer.words)
        buffer.moved.record(self._work)

    def store(self, spans: Sequence[Span], gather: Callable[[torch.Tensor], None]) -> None:
        """Bytes into a buffer, and out of it to these addresses."""
        buffer = self._next()
        self._work.wait_event(buffer.copied)
        gather(buffer.words)
        buffer.moved.record(self._work)
        self._dma.wait_event(buffer.moved)
        _copy(buffer.words.data_ptr(), spans, self._dma, _TO_HOST)
        buffer.copied.record(self._dma)

    def _next(self) -> "_Buffer":
        self._turn = (self._turn + 1) % BUFFERS
        return self._buffers[self._turn]


def _copy(gpu: int, spans: Sequence[Span], stream: torch.cuda.Stream, kind: Any) -> None:
    """Between a staging buffer and host memory."""
    raw = stream.cuda_stream
    for host, size in spans:
        pair = (gpu, host) if kind is _TO_GPU else (host, gpu)
        (error,) = cudart.cudaMemcpyAsync(*pair, size, kind, raw)
        if error != cudart.cudaError_t.cudaSuccess:
            raise CellarError(f"a copy of {size} bytes was refused: {error.name}")
        gpu += size

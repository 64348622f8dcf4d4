"""Staging buffers in GPU memory, and the streams that fill and empty them.

All DMA of a direction is on one stream, so that the bus goes from one copy to the next without a gap; kernels
run on another, beside the DMA of the next buffer. Events keep a buffer from being overwritten. Knows nothing
of objects: whoever calls says what a kernel does with a buffer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcellar.transfer import sum64
from kvcellar.transfer.cuda import driver
from kvcellar.transfer.steps import BlockIds

BUFFERS = 2  # one is moved by a kernel while the other is on the bus

# So many calls of the driver are made in one go, which holds the GIL for a millisecond, and twice as many are
# under way at most: with more, the driver would make us wait, GIL and all. Six for a buffer that is filled
# from one place make 32 buffers. Each pause is a change of the GIL's hands: with 2 buffers in a go, a thread
# that launches small kernels beside loads took 1.9 times as long, with 8 1.5, with 32 1.2, which is what it
# takes with no Python at all (H200).
_PACE, _PER_BUFFER = 192, 5

Span = tuple[int, int]  # address and bytes on the host
Kernel = Callable[[torch.Tensor, int], None]  # what to do with a buffer, on a stream


class Run:
    """One call: what its kernels work with, sent when first asked for; at its end, what they added up."""

    def __init__(self, send: Callable[[], "Sent"]) -> None:
        self._send = send
        self.added: list[sum64.Words] = []

    @functools.cached_property
    def sent(self) -> "Sent":
        return self._send()


class Sent(NamedTuple):
    """Block tables and sums on the GPU, by group."""

    blocks: Sequence[torch.Tensor]
    sums: Sequence[torch.Tensor]


class _Tables:
    """What the kernels of a run read and add to: all its sums, then all its block ids, here and on the GPU.

    Kept from run to run: allocating page-locked memory takes longer than copying it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(1 << 14)

    def _grow(self, words: int) -> None:
        self._here = torch.empty(words, dtype=torch.int64, pin_memory=True)
        self._there = torch.empty(words, dtype=torch.int64, device=self._device)

    def send(self, tables: Sequence[BlockIds]) -> Sent:
        """On the current stream."""
        rows = [len(table) for table in tables]
        words = sum(rows) + sum(table.size for table in tables)
        if words > len(self._here):
            self._grow(1 << (words - 1).bit_length())
        here = self._here.numpy()[:words]
        here[: sum(rows)] = 0
        np.concatenate([table.reshape(-1) for table in tables], out=here[sum(rows) :])
        there = self._there[:words].copy_(self._here[:words], non_blocking=True)
        sums, *blocks = there.split([sum(rows), *(table.size for table in tables)])
        shaped = [part.view(table.shape) for part, table in zip(blocks, tables, strict=True)]
        return Sent(shaped, sums.split(rows))

    def fetch(self, sent: Sent) -> list[sum64.Words]:
        """The sums, on the current stream: they are here when what is launched now has run."""
        rows = [len(sums) for sums in sent.sums]
        self._here[: sum(rows)].copy_(self._there[: sum(rows)], non_blocking=True)
        return np.split(self._here.numpy()[: sum(rows)].view(np.uint64), np.cumsum(rows)[:-1])


class _Buffer:
    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.empty(size // 8, dtype=torch.int64, device=device)
        self.address = self.words.data_ptr()
        self.copied = driver.Event()  # to or from the host
        self.moved = driver.Event()  # by a kernel


class Ring:
    """The staging buffers of one direction: all DMA on one stream, all kernels on another."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        driver.enter(device)
        self.buffer_bytes = buffer_bytes
        self.locked = True  # whether all host memory is page-locked
        self._device = device
        self._dma = torch.cuda.Stream(device)
        # Ahead of the engine's kernels: ours are short, and the bus waits for them.
        self._work = torch.cuda.Stream(device, priority=-1)
        self._buffers = [_Buffer(device, buffer_bytes) for _ in range(BUFFERS)]
        self._tables = _Tables(device)
        self._done = driver.Event()
        self._paces = [driver.Event(), driver.Event()]
        self._calls = 0  # since the last pause
        self._turn = 0

    @contextlib.contextmanager
    def running(
        self, tables: Callable[[], Sequence[BlockIds]], after: torch.cuda.Event | None
    ) -> Iterator[Run]:
        """From the first copy to what the kernels have added up. `tables` is asked for when the first kernel
        is about to be launched: a load's first copy is under way by then. Whatever happens in between,
        afterwards nothing is.
        """
        driver.enter(self._device)
        if after is not None:
            self._work.wait_event(after)
            self._dma.wait_event(after)
        with torch.cuda.stream(self._work):
            run = Run(lambda: self._tables.send(tables()))
            try:
                yield run
                run.added = self._tables.fetch(run.sent)
            finally:
                self._work.wait_stream(self._dma)
                self._done.record(self._work.cuda_stream)
                self._done.synchronize()

    def load(self, spans: Sequence[Span], scatter: Kernel) -> None:
        """Bytes at these addresses into a buffer, and out of it."""
        buffer, dma, work = self._next(), self._dma.cuda_stream, self._work.cuda_stream
        buffer.moved.hold_up(dma)
        self._copy(driver.copy_to_gpu, buffer, spans)
        buffer.copied.hold_up(work)
        scatter(buffer.words, work)
        buffer.moved.record(work)
        self._pace(work, len(spans))

    def store(self, spans: Sequence[Span], gather: Kernel) -> None:
        """Bytes into a buffer, and out of it to these addresses."""
        buffer, dma, work = self._next(), self._dma.cuda_stream, self._work.cuda_stream
        buffer.copied.hold_up(work)
        gather(buffer.words, work)
        buffer.moved.record(work)
        buffer.moved.hold_up(dma)
        self._copy(driver.copy_to_host, buffer, spans)
        self._pace(dma, len(spans))

    def _copy(self, call: Callable[..., None], buffer: "_Buffer", spans: Sequence[Span]) -> None:
        gpu, dma = buffer.address, self._dma.cuda_stream
        for host, size in spans:
            call(gpu, host, size, dma, locked=self.locked)
            gpu += size
        buffer.copied.record(dma)

    def _next(self) -> "_Buffer":
        self._turn += 1
        return self._buffers[self._turn % BUFFERS]

    def _pace(self, stream: int, copies: int) -> None:
        """Not too far ahead of what is over on this stream."""
        self._calls += copies + _PER_BUFFER
        if self._calls >= _PACE:
            self._calls = 0
            self._paces[0].record(stream)
            self._paces[1].synchronize()
            self._paces.reverse()

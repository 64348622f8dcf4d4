"""Staging buffers in GPU memory, and the streams that fill and empty them.

Each buffer has a stream of its own, on which DMA and kernel alternate: while one waits for its kernel, the
bus is the other's. That keeps a buffer from being overwritten, and lets others at the bus in between: the
GPU's copy engine goes on with a stream as long as that has copies ready, and when all DMA was on one stream,
the engine's own small copies waited for whole loads (steps took 13 to 25 times as long, now 1.0 to 1.8: see
bench/results/gpu/rings.txt).

Knows nothing of objects: whoever calls says what a kernel does with a buffer.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcellar.transfer import sum64
from kvcellar.transfer.cuda import driver
from kvcellar.transfer.steps import BlockIds

# One is moved by a kernel while the other is on the bus. Not more: with four, others wait as with one stream.
BUFFERS = 2

# So many calls of the driver are made in one go, with the GIL held, and about twice as many are under way. A
# buffer that is filled from one place takes two. With more, loads and stores get in each other's way: both
# at once reach 0.96 of the bus with 16, and 0.92 with 32 to 96 (bench/results/gpu/rings.txt). With fewer, the
# GIL changes hands more often.
_PACE = 16

Span = tuple[int, int]  # address and bytes on the host
Kernel = Callable[[torch.Tensor, torch.cuda.Stream], None]  # what to do with a buffer, on a stream


class Run:
    """One call: what its kernels work with, sent when first asked for; at its end, what they added up."""

    def __init__(self, send: Callable[[], "Sent"]) -> None:
        self._send = send
        self.added: list[sum64.Words] = []

    @functools.cached_property
    def sent(self) -> "Sent":
        return self._send()


class Sent(NamedTuple):
    """Block tables and sums on the GPU, by part of the call."""

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


class _Lane:
    """A buffer, and the stream on which it is filled and emptied."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.empty(size // 8, dtype=torch.int64, device=device)
        self.address = self.words.data_ptr()
        # Ahead of the engine's kernels: ours are short, and the bus waits for them.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.raw = self.stream.cuda_stream


class Ring:
    """The staging buffers of one direction."""

    def __init__(self, device: torch.device, buffer_bytes: int, rest: float = 0.0) -> None:
        driver.enter(device)
        self.buffer_bytes = buffer_bytes
        self._rest = rest  # seconds, after an engine's step that a copy had to wait for
        self.locked = True  # whether all host memory is page-locked
        self._device = device
        self._lanes = [_Lane(device, buffer_bytes) for _ in range(BUFFERS)]
        self._tables = _Tables(device)
        self._sent, self._over, self._done = driver.Event(), driver.Event(), driver.Event()
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
        first, second = self._lanes
        with driver.beside_captures(), torch.cuda.stream(first.stream):
            if after is not None and not after.query():
                self._wait_for_the_engine(after)
            run = Run(lambda: self._send(tables()))
            try:
                yield run
                self._wait_for(second, first, self._over)
                run.added = self._tables.fetch(run.sent)
            finally:
                self._wait_for(second, first, self._over)
                self._done.record(first.raw)
                self._done.synchronize()

    def _wait_for_the_engine(self, after: torch.cuda.Event) -> None:
        """Here, not on the GPU: what waits there may keep others waiting that share a hardware queue."""
        after.synchronize()
        if self._rest:  # to sleep not at all lets go of the GIL, too
            time.sleep(self._rest)

    def _send(self, tables: Sequence[BlockIds]) -> Sent:
        first, second = self._lanes
        sent = self._tables.send(tables)
        self._wait_for(first, second, self._sent)
        return sent

    @staticmethod
    def _wait_for(lane: _Lane, waiting: _Lane, by: driver.Event) -> None:
        by.record(lane.raw)
        by.hold_up(waiting.raw)

    def load(self, spans: Sequence[Span], scatter: Kernel) -> None:
        """Bytes at these addresses into a buffer, and out of it."""
        lane = self._next()
        gpu = lane.address
        for host, size in spans:
            driver.copy_to_gpu(gpu, host, size, lane.raw, locked=self.locked)
            gpu += size
        scatter(lane.words, lane.stream)
        self._pace(lane, len(spans))

    def store(self, spans: Sequence[Span], gather: Kernel) -> None:
        """Bytes into a buffer, and out of it to these addresses."""
        lane = self._next()
        gather(lane.words, lane.stream)
        gpu = lane.address
        for host, size in spans:
            driver.copy_to_host(gpu, host, size, lane.raw, locked=self.locked)
            gpu += size
        self._pace(lane, len(spans))

    def _next(self) -> _Lane:
        self._turn += 1
        return self._lanes[self._turn % BUFFERS]

    def _pace(self, lane: _Lane, copies: int) -> None:
        """Not too far ahead of what is over in this lane."""
        self._calls += copies + 1
        if self._calls >= _PACE:
            self._calls = 0
            self._paces[0].record(lane.raw)
            self._paces[1].synchronize()
            self._paces.reverse()

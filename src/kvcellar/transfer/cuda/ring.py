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
import itertools
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
# at once reach 0.97 to 0.99 of the bus with 8, a hundredth less with 16, and 0.92 with 32 to 96; with fewer
# than 8, no more (bench/results/gpu/rings.txt), and the GIL changes hands more often.
_PACE = 8

Span = tuple[int, int]  # address and bytes on the host
Kernel = Callable[["Lane"], None]  # what to do with a buffer, on its stream


class Run:
    """One call: what its kernels work with, sent when first asked for; at its end, what they added up."""

    def __init__(self, send: Callable[[], "Sent"]) -> None:
        self._send = send
        self.added: list[sum64.Words] = []

    @functools.cached_property
    def sent(self) -> "Sent":
        return self._send()


class Sent(NamedTuple):
    """The tables of a run on the GPU, and by part of the call which word is the first of its own."""

    words: torch.Tensor
    address: int
    blocks: Sequence[int]  # and the end of the last
    sums: Sequence[int]  # likewise


class _Tables:
    """What the kernels of a run read and add to: all its sums, then all its block ids, here and on the GPU.

    Kept from run to run: allocating page-locked memory takes longer than copying it. Addresses, not tensors:
    slicing those takes ten times as long, and the bus waits for the first kernel.
    """

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        self._grow(1 << 14)

    def _grow(self, words: int) -> None:
        self._pinned = torch.empty(words, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._lane.stream):  # memory that nobody else's kernels are working with
            self._there = torch.empty(words, dtype=torch.int64, device=self._lane.words.device)
        self._here, self._from, self._to = (
            self._pinned.numpy(),
            self._pinned.data_ptr(),
            self._there.data_ptr(),
        )

    def send(self, tables: Sequence[BlockIds]) -> Sent:
        sums = list(itertools.accumulate(map(len, tables), initial=0))
        blocks = list(itertools.accumulate((table.size for table in tables), initial=sums[-1]))
        if blocks[-1] > len(self._here):
            self._grow(1 << (blocks[-1] - 1).bit_length())
        self._here[: sums[-1]] = 0
        for table, (first, end) in zip(tables, itertools.pairwise(blocks), strict=True):
            self._here[first:end] = table.reshape(-1)
        if tables:
            driver.copy_to_gpu(self._to, self._from, 8 * blocks[-1], self._lane.raw, locked=True)
        return Sent(self._there, self._to, blocks, sums)

    def fetch(self, sent: Sent) -> list[sum64.Words]:
        """The sums: they are here when what is launched now has run."""
        if sent.sums[-1]:
            driver.copy_to_host(self._to, self._from, 8 * sent.sums[-1], self._lane.raw, locked=True)
        return [self._here[first:end].view(np.uint64) for first, end in itertools.pairwise(sent.sums)]


class Lane:
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
        self._lanes = [Lane(device, buffer_bytes) for _ in range(BUFFERS)]
        self._tables = _Tables(self._lanes[0])
        self._sent, self._over, self._done = driver.Event(), driver.Event(), driver.Event()
        self._paces = [driver.Event(), driver.Event()]
        self._calls = 0  # since the last pause
        self._turn = 0  # buffers filled in this run
        self._due: list[tuple[Kernel, Lane]] = []  # whose bytes are on their way

    @contextlib.contextmanager
    def running(
        self, tables: Callable[[], Sequence[BlockIds]], after: torch.cuda.Event | None
    ) -> Iterator[Run]:
        """From the first copy to what the kernels have added up. `tables` is asked for when the first kernel
        is about to be launched: a load's first copies are under way by then. Whatever happens in between,
        afterwards nothing is.
        """
        self.wait_for_the_engine(after)
        first, second = self._lanes
        self._turn = 0
        with driver.beside_captures():
            run = Run(lambda: self._send(tables()))
            try:
                yield run
                self._scatter()
                self._wait_for(second, first, self._over)
                run.added = self._tables.fetch(run.sent)
            finally:
                self._due.clear()
                self._wait_for(second, first, self._over)
                self._done.record(first.raw)
                self._done.synchronize()

    def wait_for_the_engine(self, after: torch.cuda.Event | None) -> None:
        """Here, not on the GPU: what waits there may keep others waiting that share a hardware queue."""
        driver.enter(self._device)
        with driver.beside_captures():
            if after is None or after.query():
                return
            after.synchronize()
        if self._rest:  # to sleep not at all lets go of the GIL, too
            time.sleep(self._rest)

    def _send(self, tables: Sequence[BlockIds]) -> Sent:
        first, second = self._lanes
        sent = self._tables.send(tables)
        self._wait_for(first, second, self._sent)
        return sent

    @staticmethod
    def _wait_for(lane: Lane, waiting: Lane, by: driver.Event) -> None:
        by.record(lane.raw)
        by.hold_up(waiting.raw)

    def load(self, spans: Sequence[Span], scatter: Kernel) -> None:
        """Bytes at these addresses into a buffer, and out of it."""
        lane = self._next()
        gpu = lane.address
        for host, size in spans:
            driver.copy_to_gpu(gpu, host, size, lane.raw, locked=self.locked)
            self._pace(lane)
            gpu += size
        self._due.append((scatter, lane))
        # The first kernel takes as long to launch as a buffer to fill: both are on their way before it.
        if self._turn >= BUFFERS:
            self._scatter()

    def _scatter(self) -> None:
        for scatter, lane in self._due:
            scatter(lane)
            self._pace(lane)
        self._due.clear()

    def store(self, spans: Sequence[Span], gather: Kernel) -> None:
        """Bytes into a buffer, and out of it to these addresses."""
        lane = self._next()
        gather(lane)
        self._pace(lane)
        gpu = lane.address
        for host, size in spans:
            driver.copy_to_host(gpu, host, size, lane.raw, locked=self.locked)
            self._pace(lane)
            gpu += size

    def _next(self) -> Lane:
        """The first is the one that the tables are sent on: right behind its bytes."""
        lane = self._lanes[self._turn % BUFFERS]
        self._turn += 1
        return lane

    def _pace(self, lane: Lane) -> None:
        """Not too far ahead of what is over in this lane."""
        self._calls += 1
        if self._calls >= _PACE:
            self._calls = 0
            self._paces[0].record(lane.raw)
            self._paces[1].synchronize()
            self._paces.reverse()

"""Random KV geometries on a real GPU: what its mover stores and loads, byte by byte, against the host's.

    python -m bench.gpu.check [--cases 40] [--first SEED]

Each case is stored by both movers and the slots compared, loaded into other blocks with some left out and all
of the memory compared, and loaded again with a bit flipped, with another object in a slot, and, on a GPU,
while a store runs beside it. Slabs are page-locked in every other case. Exits with 1 at the first that fails
and says how to repeat it.
"""

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from bench.gpu.geometry import Case, block_places, draw, memory, tensors
from kvcellar.identity import (
    SKIP,
    BlockHash,
    ChunkKey,
    CopyPlan,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    layout_of,
)
from kvcellar.slab import OBJECT_HEADER, Bytes, Slab, SlabShape, Slot
from kvcellar.transfer import HostMover, Rows
from kvcellar.transfer.cuda import CudaMover, Pins

SPARE = 2  # slots that nothing is stored in
JUNK = 0xA5


class Slabs:
    """One slab per group, full of junk."""

    def __init__(self, namespace: Namespace, slots: int) -> None:
        self.by_group = []
        for number in range(len(namespace.groups)):
            shape = SlabShape(slots, layout_of(namespace, 0, number).slot_bytes)
            with tempfile.TemporaryFile(dir="/dev/shm") as file:  # stays as long as it is mapped
                os.posix_fallocate(file.fileno(), 0, shape.file_bytes)
                slab = Slab(file.fileno(), shape)
            np.frombuffer(slab.memory, dtype=np.uint8)[:] = JUNK
            self.by_group.append(slab)

    def slot(self, group: int, place: int) -> Slot:
        return self.by_group[group].at(place)

    def bytes(self) -> list[bytes]:
        return [slab.memory.tobytes() for slab in self.by_group]


class World:
    """One case: KV on the device, the same on the host, slabs for each, and what is to be copied."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        self.case, self.device, self.random = case, device, random.Random(case.seed)
        self.layers = [tensors(group, case.num_blocks, device) for group in case.groups]
        self.places = [[block_places(layer, case.num_blocks) for layer in group] for group in self.layers]
        self.namespace = self._namespace()
        self.theirs, self.ours = (Slabs(self.namespace, case.chunks + SPARE) for _ in range(2))
        copies = [
            [memory(layer).cpu().numpy()[places] for layer, places in zip(group, its, strict=True)]
            for group, its in zip(self.layers, self.places, strict=True)
        ]
        self.host = HostMover(self.namespace, 0, copies)
        self.stores, self.loads = self._rows()

    def _namespace(self) -> Namespace:
        case = self.case
        largest = max(group.tokens for group in case.groups)
        groups = tuple(
            Group(group.tokens, tuple(Layer(f"{n}.{i}", its.shape[1]) for i, its in enumerate(places)))
            for n, (group, places) in enumerate(zip(case.groups, self.places, strict=True))
        )
        return Namespace(
            engine="check",
            model="random",
            weights="",
            kv_dtype="",
            kv_layout="",
            groups=groups,
            parallel=ParallelStrategy(tp=1),
            chunk_tokens=largest * case.per_chunk,
            block_hash=BlockHash("sha256", largest, ""),
            checksum="sum64",
        )

    def _rows(self) -> tuple[list[Rows], list[Rows]]:
        """All chunks of every group from some blocks, and into others, of which some are left out."""
        case = self.case
        stores: list[Rows] = []
        loads: list[Rows] = []
        keys = [ChunkKey(self.random.randbytes(16)) for _ in range(case.chunks)]
        for number in range(len(case.groups)):
            layout = layout_of(self.namespace, 0, number)
            each = case.chunks * layout.blocks_per_chunk
            slots = self.random.sample(range(case.chunks + SPARE), case.chunks)
            ids = self.random.sample(range(case.num_blocks), 2 * each)
            left_out = [SKIP if self.random.random() < 0.2 else block for block in ids[each:]]
            for rows, blocks in ((stores, ids[:each]), (loads, left_out)):
                table = np.reshape(np.array(blocks, np.int64), (case.chunks, -1))
                rows.append(Rows(CopyPlan(number, np.array(slots, np.uint32), table), keys))
        return stores, loads

    def expected(self) -> dict[int, Bytes]:
        """All memory, by address, as it has to be after the load."""
        after: dict[int, Bytes] = {}
        for group, places, stored, loaded in zip(
            self.layers, self.places, self.stores, self.loads, strict=True
        ):
            sources, targets = stored.plan.blocks.reshape(-1), loaded.plan.blocks.reshape(-1)
            wanted = targets != SKIP
            for layer, where in zip(group, places, strict=True):
                whole = memory(layer)
                mine = after.setdefault(whole.data_ptr(), whole.cpu().numpy().copy())
                mine[where[targets[wanted]]] = mine[where[sources[wanted]]]
        return after

    def found(self) -> dict[int, Bytes]:
        whole = [memory(layer) for group in self.layers for layer in group]
        return {one.data_ptr(): one.cpu().numpy() for one in whole}


def check(case: Case, device: torch.device, pins: Pins | None) -> None:
    """Raises AssertionError where the movers differ."""
    with contextlib.ExitStack() as stack:
        world = World(case, device)
        if pins is not None:
            for slab in world.ours.by_group:
                pins.mapped(slab)
                stack.callback(pins.unmapped, slab)
        mover = CudaMover(
            world.namespace, 0, world.layers, case.num_blocks, staging_bytes=case.staging, pins=pins
        )
        _check_store(world, mover)
        _check_load(world, mover)
        _check_what_must_fail(world, mover)
        if device.type == "cuda":  # Triton's interpreter knows no threads
            _check_both(world, mover)
            if pins is not None:
                _check_beside_a_capture(world, mover, pins)


def _check_store(world: World, mover: CudaMover) -> None:
    world.host.store(world.stores, world.theirs.slot, None)
    mover.store(world.stores, world.ours.slot, mover.fence())
    assert world.ours.bytes() == world.theirs.bytes(), "slabs differ after a store"


def _check_load(world: World, mover: CudaMover) -> None:
    expected = world.expected()
    failed = mover.load(world.loads, world.ours.slot, mover.fence())
    assert failed == [[] for _ in world.loads], f"rows that failed: {failed}"
    found = world.found()
    for address, after in expected.items():
        wrong = int((found[address] != after).sum())
        assert not wrong, f"{wrong} bytes of memory differ after a load"


def _check_what_must_fail(world: World, mover: CudaMover) -> None:
    group = world.random.randrange(len(world.loads))
    plan = world.loads[group].plan
    row = world.random.randrange(len(plan.places))
    slot = world.ours.slot(group, int(plan.places[row]))
    only_that = [[row] if number == group else [] for number in range(len(world.loads))]
    at, bit = world.random.randrange(mover.object_bytes(group)), 1 << world.random.randrange(8)
    slot.payload[at] ^= bit
    assert mover.load(world.loads, world.ours.slot, None) == only_that, f"bit {bit} of byte {at} went unseen"
    slot.payload[at] ^= bit
    slot.header.view(OBJECT_HEADER)["key"][0, 0] ^= np.uint64(1)
    assert mover.load(world.loads, world.ours.slot, None) == only_that, "another object went unseen"
    slot.header.view(OBJECT_HEADER)["key"][0, 0] ^= np.uint64(1)


def _check_both(world: World, mover: CudaMover) -> None:
    """A load and a store at once, into slots of its own, and each as if it were alone."""
    beside = Slabs(world.namespace, world.case.chunks + SPARE)
    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(mover.store, world.stores, beside.slot, None)
        failed = mover.load(world.loads, world.ours.slot, None)
        storing.result(60)
    assert not any(failed), f"rows that failed beside a store: {failed}"
    assert beside.bytes() == world.theirs.bytes(), "a store beside a load differs"


def _check_beside_a_capture(world: World, mover: CudaMover, pins: Pins) -> None:
    """An engine captures a CUDA graph while a copy runs, and the cache is being page-locked."""
    beside = Slabs(world.namespace, world.case.chunks + SPARE)
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device=world.device)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        with torch.cuda.graph(graph):
            counter.add_(1)
            for slab in beside.by_group:
                pins.mapped(slab)
                stack.callback(pins.unmapped, slab)
            pool.submit(mover.store, world.stores, beside.slot, None).result(60)
            counter.add_(1)
        graph.replay()
        assert counter.item() == 2, "what was captured beside a copy is not what was launched"
        assert pins.all_locked, "page-locking was refused beside a capture"
        assert beside.bytes() == world.theirs.bytes(), "a store beside a capture differs"


@contextlib.contextmanager
def _named(case: Case) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(f"FAILED: {case}\nrepeat with: python -m bench.gpu.check --first {case.seed} --cases 1")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=120, help="stop after so long, and say so")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu.check needs an NVIDIA GPU, and finds none: nothing was checked")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    pins, started, bytewise = Pins(device), time.monotonic(), 0
    for number, seed in enumerate(range(args.first, args.first + args.cases), start=1):
        case = draw(seed)
        with _named(case):
            check(case, device, pins if seed % 2 else None)
        bytewise += any(group.dim % 8 or group.shift for group in case.groups)
        if number % 10 == 0 or number == args.cases:
            print(f"{time.monotonic() - started:6.1f} s  {number} geometries the same", flush=True)
        if time.monotonic() - started > args.seconds and number < args.cases:
            sys.exit(f"only {number} of {args.cases} geometries within {args.seconds:.0f} s")
    print(f"bench.gpu.check: {args.cases} geometries, {bytewise} of them odd: all the same on {device}")


if __name__ == "__main__":
    main()

"""What the words of a fuzzer are made of: values of every type and size, from a seeded random source."""

import random
from typing import Any

from kvcellar.identity import BlockHash, ChunkKey, Group, Layer, Namespace, ParallelStrategy
from kvcellar.wire import messages as m

LEASE_BITS = 40


def namespace(number: int = 0, **changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "engine": "fuzz/1",
        "model": f"fuzz-{number}",
        "weights": "",
        "kv_dtype": "bfloat16",
        "kv_layout": "NHD",
        "groups": (Group(16, (Layer("layers.0", 256),)),) * (1 + number % 3),
        "parallel": ParallelStrategy(tp=1 + number % 2),
        "chunk_tokens": 256,
        "block_hash": BlockHash("sha256", 16, "00"),
        "checksum": "xxh3-64",
    }
    return Namespace(**fields | changes)


NAMESPACES = [namespace(number) for number in range(4)]
_IDS = [space.id for space in NAMESPACES]


class Values:
    def __init__(self, seed: str, foreign: list[bytes]) -> None:
        self.random = random.Random(seed)
        self.epoch = 0  # of the server, and ...
        self.newest = 0  # ... a lease it granted: learnt on the way
        self.favourite = _IDS[0]  # a namespace id
        self._foreign = foreign  # namespace ids of others

    def lease(self) -> int:
        near = max(0, self.newest + self.random.randint(-40, 40))
        far = (0, 1, self.epoch << LEASE_BITS, (1 << 62) - 1, self.random.getrandbits(62))
        return self.random.choice((near, near, near, *far))

    def span(self) -> tuple[int, int]:
        return self.random.choice(((0, 1), (0, 3), (0, m.MAX_KEYS), (5, 2), (m.MAX_KEYS, 0), (1, 40)))

    def space_id(self) -> bytes:
        if self.random.random() < 0.5:
            return self.favourite
        return self.random.choice((*_IDS, *_IDS, *self._foreign, self.random.randbytes(16)))

    def keys(self, count: int) -> bytes:
        """Few enough that sessions meet in them."""
        if count > 100:
            return self.random.randbytes(16 * count)
        return b"".join(ChunkKey(self.random.randrange(400).to_bytes(16, "little")) for _ in range(count))

    def text(self, length: int) -> str:
        return "".join(self.random.choices("abc \n\x00\x1b\u20ac", k=length))

    def value(self, depth: int) -> Any:
        kind = self.random.randrange(9 if depth else 7)
        if kind == 7:
            return [self.value(depth - 1) for _ in range(self.random.randrange(5))]
        if kind == 8:
            return {self.text(3): self.value(depth - 1) for _ in range(self.random.randrange(3))}
        simple = (None, True, self.random.getrandbits(64), -self.random.getrandbits(63), self.random.random())
        return (*simple, self.text(5), self.random.randbytes(self.random.choice((0, 16, 40))))[kind]

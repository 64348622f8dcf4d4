"""What the connector's scheduler side knows of one request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcellar.client import Expected, Grant
from kvcellar.identity import KEY_BYTES, ChunkKey
from kvcellar.vllm.adapters import with_adapter

if TYPE_CHECKING:
    from vllm.v1.request import Request

_TRIES = 4  # to store what there was no room for


class Tracked:
    def __init__(self, request: "Request", hashes_per_chunk: int, adapter: bytes | None) -> None:
        self.request = request
        self.keys: list[ChunkKey] = []
        # The server knows that it waits, or will at the end of the step.
        self.expected: Expected | None = None
        # What the cache has of it: asked for once, and again after a preemption.
        self.grant: Grant | None = None
        self.asked_at = -1  # number of preemptions when it was asked
        self.computed = 0  # what the engine had when it was offered
        self.loading = False
        self.failed = False  # a load went wrong: it is not offered the cache again
        self.planned = 0  # chunks before this one are stored, or on their way
        self.ready = 0  # and those before this one could be: they are computed, in blocks it has
        self.ready_at = -1  # number of preemptions when that was found
        # vLLM's own lists, which it keeps up to date: by group, the blocks the request has.
        self.blocks: Sequence[Sequence[Any]] = ()
        self._patience = _TRIES
        self.mixed_at = -1  # number of preemptions when the weights changed under its KV
        self._hashes_per_chunk = hashes_per_chunk
        self._adapter = adapter  # digest of a LoRA adapter; None: not known what it is, so no chunk has a key

    def refused(self, chunk: int, *, unheard: bool) -> None:
        """There was no room for this chunk and those after it: there may be at a later step. Or, `unheard`,
        the connection was lost before the answer, as when a step takes longer than answers may lie unread.
        """
        if self._patience or unheard:
            self._patience -= not unheard
            self.plan_from(min(self.planned, chunk))

    def plan_from(self, chunk: int) -> None:
        """Chunks before this one need not be stored; what is computed beyond will be looked at again."""
        self.planned = self.ready = chunk

    @property
    def is_mixed(self) -> bool:
        """Its KV was made by two generations of weights, or may be; until it is computed from the start."""
        return bool(self.mixed_at == self.request.num_preemptions)

    def hashed_chunks(self) -> int:
        """Chunks whose last block vLLM has hashed; brings the keys up to date.

        vLLM hashes only tokens that are certain, so neither drafts nor placeholders are among them. A block's
        hash covers everything before it, and with it does a chunk's key.
        """
        if self._adapter is None:
            return 0
        hashes = self.request.block_hashes
        for chunk in range(len(self.keys), len(hashes) // self._hashes_per_chunk):
            last = hashes[(chunk + 1) * self._hashes_per_chunk - 1]
            self.keys.append(with_adapter(bytes(last[:KEY_BYTES]), self._adapter))
        return len(self.keys)

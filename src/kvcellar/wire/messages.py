"""Every message that crosses the control socket. `docs/protocol.md` lists the same; a test compares them.

A client opens with Hello and is answered by Welcome or Refused. After that it sends Requests, each with one
or more operations, and gets one Reply per Request with one result per operation, in order; Events come
unasked. Keys and places travel packed: 16 bytes a key, a little-endian u32 a place. Bounds that the decoder
can check are declared here, so a handler never sees an absurd value.
"""

import struct
from typing import Annotated, Literal

import msgspec

from kvcellar.errors import BadRequest
from kvcellar.identity import ID_BYTES, KEY_BYTES, ChunkKey, Namespace

PROTOCOL_VERSION = 4

MAX_KEYS = 65_536
MAX_OPS = 256
MAX_WAIT_MS = 60_000
MAX_OUTLOOK_US = 1 << 40

_KEY = struct.Struct(f"{KEY_BYTES}s")
Meta = msgspec.Meta
NamespaceIdField = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
KeyField = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
KeysField = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_KEYS * KEY_BYTES)]
LeaseField = Annotated[int, Meta(ge=0, lt=1 << 62)]
ChunkField = Annotated[int, Meta(ge=0, le=MAX_KEYS)]
GroupField = Annotated[int, Meta(ge=0, lt=64)]
TicketField = Annotated[int, Meta(ge=0, lt=1 << 62)]
OutlookField = Annotated[int, Meta(ge=0, le=MAX_OUTLOOK_US)]
RackField = Annotated[int, Meta(ge=0, lt=1 << 14)]
Text = Annotated[str, Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """An array that starts with its name: compact, and readable in a dump."""


# -- opening -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """Who I am. `leases`: those a returning scheduler knows; the server drops the others.

    A worker's Hello also says "I hold nothing": whatever this rank held before is over.
    """

    version: int
    role: Literal["scheduler", "worker", "admin"]
    session: Annotated[str, Meta(max_length=128)] = ""  # common to all processes of one engine
    rank: Annotated[int, Meta(ge=0, lt=1 << 20)] = 0  # of a worker
    label: Text = ""  # for people
    leases: Annotated[
        tuple[LeaseField, ...], Meta(max_length=1 << 20)
    ] = ()  # a scheduler's, when it comes back


class Welcome(Message, frozen=True):
    """Attached. Another epoch than last time: another server, and all earlier leases are void.

    A rank that attaches has no share in leases up to `newest_lease`, also if it is told of them later.
    """

    version: int
    epoch: int
    server: Text
    newest_lease: LeaseField = 0
    has_tiers: bool = False  # without, nobody need say Expect


class Refused(Message, frozen=True):
    """Why the server closes this connection."""

    code: Text
    message: Text


# -- operations and their results ----------------------------------------------------------------------------


class Ping(Message, frozen=True):
    """Is anybody there? -> Pong."""


class Register(Message, frozen=True):
    """Open a namespace for the engine; from a scheduler: in place of any other -> Registered."""

    namespace: Namespace


class Lookup(Message, frozen=True):
    """The longest prefix of these chunks that is in memory, pinned for all ranks -> Granted. `wait_ms`: if
    tiers may have more, bring it up, and say Brought within this time.
    """

    namespace: NamespaceIdField
    keys: KeysField
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0


class Expect(Message, frozen=True):
    """A request that needs these chunks is in the engine's queue: if tiers have them, read them for so long
    at most, in the order of arrival, and keep them until Abandon -> Granted, of a ticket alone.
    """

    namespace: NamespaceIdField
    keys: KeysField
    wait_ms: Annotated[int, Meta(ge=1, le=MAX_WAIT_MS)]


class Abandon(Message, frozen=True):
    """Nobody waits for Brought with this ticket any more, or expects what it is for -> Settled."""

    ticket: TicketField


class Reserve(Message, frozen=True):
    """Places to write these chunks in -> Granted. What is here already, or being written, gets none."""

    namespace: NamespaceIdField
    keys: KeysField
    parent: KeyField | None = None  # the chunk before the first
    groups: Annotated[tuple[GroupField, ...], Meta(min_length=1, max_length=64)] | None = None  # default: all


class Release(Message, frozen=True):
    """This rank has read chunks [first, stop); from a scheduler: no rank will -> Settled."""

    lease: LeaseField
    first: ChunkField
    stop: ChunkField


class Commit(Message, frozen=True):
    """This rank has all bytes of chunks [first, stop) in place -> Settled."""

    lease: LeaseField
    first: ChunkField
    stop: ChunkField


class Abort(Message, frozen=True):
    """This rank will not write chunks [first, stop); from a scheduler: no rank will -> Settled."""

    lease: LeaseField
    first: ChunkField
    stop: ChunkField


class Condemn(Message, frozen=True):
    """This rank read wrong bytes: nobody shall find this stripe again -> Settled."""

    lease: LeaseField
    group: GroupField
    chunk: ChunkField


class Unmapped(Message, frozen=True):
    """The answer to RackLeaving: this rank maps the rack no more -> Settled."""

    namespace: NamespaceIdField
    group: GroupField
    rack: RackField


class Leave(Message, frozen=True):
    """This process is done: it reads, writes and maps nothing more, and will close -> Settled."""


class Status(Message, frozen=True):
    """What the server holds and for whom (admin) -> Report."""


class Clear(Message, frozen=True):
    """Forget one namespace, or everything (admin) -> Settled."""

    namespace: NamespaceIdField | None = None


class Pin(Message, frozen=True):
    """Evict nothing of a namespace, or allow it again (admin) -> Settled."""

    namespace: NamespaceIdField
    pinned: bool


class Pong(Message, frozen=True):
    """Somebody is."""


class Registered(Message, frozen=True):
    """The namespace is open; `slot_bytes` by group and shard, `racks` as (group, rack)."""

    namespace: NamespaceIdField
    chunk_tokens: int
    slot_bytes: tuple[tuple[int, ...], ...]
    racks: tuple[tuple[int, int], ...]


class Granted(Message, frozen=True):
    """`places` by group, packed, 0xFFFFFFFF where there is nothing to read or write; lease 0: none. After
    a lookup, a `ticket` says that Brought will follow. From a tier the first chunk takes `lead_us`, and each
    `chunk_us`; 0 if not known.
    """

    lease: LeaseField
    chunks: ChunkField
    places: tuple[bytes, ...]
    reason: Text = ""  # why it is not more: unknown_namespace, hold_limit, no_room, orphan
    ticket: TicketField = 0
    lead_us: OutlookField = 0
    chunk_us: OutlookField = 0


class Settled(Message, frozen=True):
    """How many stripes this changed: 0 for what was over already, or unknown to this server."""

    stripes: int


class Report(Message, frozen=True):
    """A StatusReport (kvcellar.wire.report), as a msgpack map."""

    status: msgspec.Raw


class Failure(Message, frozen=True):
    """In place of any result. The code names a class in kvcellar.errors."""

    code: Text
    message: Text


Operation = (
    Ping
    | Register
    | Lookup
    | Expect
    | Abandon
    | Reserve
    | Release
    | Commit
    | Abort
    | Condemn
    | Unmapped
    | Leave
    | Status
    | Clear
    | Pin
)
Result = Pong | Registered | Granted | Settled | Report | Failure


class Request(Message, frozen=True):
    """One to 256 operations, done in order; only a Reserve may wait, for memory to be allocated: until the
    deadline, and no longer than a second. Then it is granted what fits.
    """

    id: Annotated[int, Meta(ge=0, lt=1 << 62)]
    deadline_ms: Annotated[int, Meta(ge=1, le=600_000)]
    ops: Annotated[tuple[Operation, ...], Meta(min_length=1, max_length=MAX_OPS)]


class Reply(Message, frozen=True):
    """The results of the request with this id, one per operation, in order."""

    id: int
    results: Annotated[tuple[Result, ...], Meta(min_length=1)]


# -- events --------------------------------------------------------------------------------------------------


class RackAdded(Message, frozen=True):
    """The namespace has one more rack: fetch and map its slab."""

    namespace: NamespaceIdField
    group: GroupField
    rack: RackField


class RackLeaving(Message, frozen=True):
    """Unmap this rack's slab as soon as no copy uses it, and say Unmapped."""

    namespace: NamespaceIdField
    group: GroupField
    rack: RackField


class Brought(Message, frozen=True):
    """To the scheduler: what the lookup with this ticket waited for. The whole hit under a lease of its own,
    the part that was in memory included; lease 0: nothing more than was granted at once.
    """

    ticket: TicketField
    lease: LeaseField
    chunks: ChunkField
    places: tuple[bytes, ...]


class Goodbye(Message, frozen=True):
    """The server is going; it will refuse new work and close."""


FromClient = Hello | Request
FromServer = Welcome | Refused | Reply | RackAdded | RackLeaving | Brought | Goodbye


# -- the descriptor connection -------------------------------------------------------------------------------


class FetchSlab(Message, frozen=True):
    """On a connection of its own: the slab of this rank's shard. Answered by SlabSent, with the descriptor,
    or Refused.
    """

    version: int
    session: Annotated[str, Meta(max_length=128)]
    rank: Annotated[int, Meta(ge=0, lt=1 << 20)]
    namespace: NamespaceIdField
    group: GroupField
    rack: RackField


class SlabSent(Message, frozen=True):
    """The slab's descriptor comes with this message (SCM_RIGHTS)."""

    slots: int
    slot_bytes: int


class FetchSketch(Message, frozen=True):
    """On a connection of its own: the sketch of what memory may hold, to be read without asking. Answered by
    SketchSent, with the descriptor, or Refused.
    """

    version: int


class SketchSent(Message, frozen=True):
    """The sketch's descriptor comes with this message (SCM_RIGHTS). It has a byte for every value of the
    lower 20 bits of a key's first four bytes, little-endian: 0 if no chunk with such a key is in memory.
    """


DescriptorAnswer = SlabSent | SketchSent | Refused


def split_keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) % KEY_BYTES:
        raise BadRequest(f"{len(packed)} bytes are not a whole number of {KEY_BYTES}-byte keys")
    return [key for (key,) in _KEY.iter_unpack(packed)]

"""What an object must be to be believed: the header of this very object, and bytes that match its checksum.

Made for one namespace, shard and group. The same check that engines make where bytes arrive; a tier makes it
before anybody else can see them.
"""

from collections.abc import Callable

from kvcellar.identity import ChunkKey, Namespace
from kvcellar.tiers.engine import Buffer
from kvcellar.transfer import Stamp, digest_maker


class Seal:
    def __init__(self, namespace: Namespace, shard: int, group: int) -> None:
        """Raises BadRequest for a checksum that this server does not know."""
        self.size = namespace.object_bytes[group][namespace.parallel.stage_of(shard)]
        self._stamp = Stamp(namespace, shard, group)
        self._new_digest = digest_maker(namespace.checksum)

    def is_labelled(self, buffer: Buffer, key: ChunkKey) -> bool:
        """The header alone: cheap, and enough before a write."""
        return self._stamp.promised(buffer.header, key) is not None

    def checker(self, key: ChunkKey) -> Callable[[Buffer], bool]:
        def is_intact(buffer: Buffer) -> bool:
            promised = self._stamp.promised(buffer.header, key)
            if promised is None:
                return False
            digest = self._new_digest()
            digest.update(buffer.payload)
            return digest.intdigest() == promised

        return is_intact

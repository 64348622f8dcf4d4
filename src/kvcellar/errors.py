"""Every error KVCellar raises on purpose, in one tree.

    CellarError
      Rejected              the caller's fault; trying again will not help
        BadRequest          a value out of range, a shape that does not fit
        VersionMismatch     the other side speaks another protocol version
        UnknownNamespace    nobody registered this identity
        NotAttached         the connection has not said who it is
        WrongOwner          the lease, session or slab belongs to somebody else
        RankTaken           another live process holds this rank of the session
        Forbidden           this uid may not do that
      Unavailable           nobody's fault; go on without the cache
        Disconnected        no server at the other end right now
        DeadlineExceeded    no answer in time
        Draining            the server is shutting down
        Overloaded          too much outstanding on this connection, or too many of one process
        EngineError         a tier's storage engine cannot do it now
      Corrupt               bytes do not match their checksum or header
      StartupError          the server cannot start; the message says what to do
        ConfigError         a setting is wrong

A `code` travels on the wire and comes back as the same class on the other side.
"""


class CellarError(Exception):
    code = "internal"


class Rejected(CellarError):
    code = "rejected"


class BadRequest(Rejected):
    code = "bad_request"


class VersionMismatch(Rejected):
    code = "version_mismatch"


class UnknownNamespace(Rejected):
    code = "unknown_namespace"


class NotAttached(Rejected):
    code = "not_attached"


class WrongOwner(Rejected):
    code = "wrong_owner"


class RankTaken(Rejected):
    code = "rank_taken"


class Forbidden(Rejected):
    code = "forbidden"


class Unavailable(CellarError):
    code = "unavailable"


class Disconnected(Unavailable):
    code = "disconnected"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class Draining(Unavailable):
    code = "draining"


class Overloaded(Unavailable):
    code = "overloaded"


class EngineError(Unavailable):
    """The message says why, without credentials."""

    code = "tier"


class Corrupt(CellarError):
    code = "corrupt"


class StartupError(CellarError):
    code = "startup"


class ConfigError(StartupError):
    code = "config"


def _tree(root: type[CellarError]) -> dict[str, type[CellarError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE = _tree(CellarError)


def from_code(code: str, message: str) -> CellarError:
    """The error a peer meant; an unknown code is still an error, never a success."""
    return BY_CODE.get(code, CellarError)(message)

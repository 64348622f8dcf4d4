"""Breaks the connections of this process while it lives on: what a fault from outside cannot do."""

import contextlib
import socket
import weakref

from kvcellar.client.link import Link

_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def remember_links() -> None:
    """Call it before the first client is made."""
    plain = Link.__init__

    def remembering(self: Link, sock: socket.socket) -> None:
        plain(self, sock)
        _links.add(self)

    Link.__init__ = remembering  # type: ignore[method-assign]


def cut_links() -> None:
    for link in list(_links):
        with contextlib.suppress(OSError):
            link.sock.shutdown(socket.SHUT_RDWR)

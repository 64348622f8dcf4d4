"""A door in front of a real server: counts connections, cuts them in mid-value, speaks TLS to clients."""

import contextlib
import socket
import ssl
import struct
import threading


class Gate:
    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = ("127.0.0.1", port)
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cut_after: int | None = None
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.requests = 0  # pieces that came from clients
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def cut_after(self, count: int) -> None:
        """The next connection that has passed so many bytes to the client is closed; once."""
        self._cut_after = count

    def hold(self) -> None:
        """Replies wait here until release()."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.pop(0).join()  # nobody comes in any more
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop(0).join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _run(self, work, *arguments) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(client)
            self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
                self._sockets.append(client)
            server = socket.create_connection(self._target)
            self._sockets.append(server)
            requests = self._run(self._pass, client, server, False)
            self._pass(server, client, True)
            requests.join()
            # Reset it: a client that is still sending would wait for room that it is never told of.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for one in (client, server):
                one.close()

    def _pass(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                if is_reply:
                    self._open.wait()
                else:
                    self.requests += 1
                if is_reply and self._cut_after is not None:
                    self._cut_after -= len(data)
                    if self._cut_after < 0:
                        self._cut_after = None
                        break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

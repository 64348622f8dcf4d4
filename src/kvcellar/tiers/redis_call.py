"""One operation on Redis or Valkey: commands to the nodes that have their keys, sent ahead of their replies.

Follows redirects, and says whose fault it is when something goes wrong. Knows nothing of values.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvcellar.tiers.engine import EngineError, PartlyAway
from kvcellar.tiers.redis_nodes import Node, NodeAway, Nodes, explain
from kvcellar.tiers.redis_wire import Redirect, Wire
from kvcellar.tiers.remote import Address

_IN_FLIGHT = 3  # parts on their way at once; more did not help
SMALL_IN_FLIGHT = 1000  # the same for commands without a value
_MAX_REDIRECTS = 5


class Command(NamedTuple):
    key: bytes
    send: Callable[[Wire], None]
    receive: Callable[[Wire], Any]


class Call:
    """One operation: a connection to each node it meets, and a deadline for all of it."""

    def __init__(self, nodes: Nodes, timeout_s: float) -> None:
        self._nodes = nodes
        self._deadline = time.monotonic() + timeout_s
        self._wires: dict[Node, Wire] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Each node's connection sees the exception: its own becomes an EngineError, unclean ones are closed.
        if kind is not None:
            self._nodes.fetch_soon()
        self._stack.__exit__(kind, error, trace)
        if isinstance(error, NodeAway) and self._nodes.some_answer:
            raise PartlyAway(str(error)) from None

    def run(self, commands: Iterable[Command], in_flight: int = _IN_FLIGHT) -> list[Any]:
        """Send them ahead of their replies, which come in the same order."""
        results: list[Any] = []
        waiting: deque[tuple[Command, Node]] = deque()
        redirected: list[tuple[int, Command, Redirect]] = []

        def receive() -> None:
            command, node = waiting.popleft()
            try:
                results.append(self._receive(command, node))
            except Redirect as redirect:
                redirected.append((len(results), command, redirect))
                results.append(None)

        for command in commands:
            node = self._nodes.of_key(command.key, self._deadline)
            self._send(command, node)
            waiting.append((command, node))
            if len(waiting) >= in_flight:
                self._flush()
                receive()
        self._flush()
        while waiting:
            receive()
        for index, command, redirect in redirected:
            results[index] = self._follow(command, redirect)
        return results

    def run_apart(self, commands: Sequence[Command]) -> list[Any]:
        """The same for small commands, but a node that fails costs its own alone: they have the result None.
        Raises if every node failed that was asked.
        """
        results: list[Any] = [None] * len(commands)
        failures: list[EngineError] = []
        for first in range(0, len(commands), SMALL_IN_FLIGHT):
            numbers = range(first, min(first + SMALL_IN_FLIGHT, len(commands)))
            self._run_apart(commands, numbers, results, failures)
        if failures:
            self._nodes.fetch_soon()
            if all(result is None for result in results):
                raise failures[0]
        return results

    def _run_apart(
        self, commands: Sequence[Command], numbers: range, results: list[Any], failures: list[EngineError]
    ) -> None:
        by_node: dict[Node, list[int]] = {}
        redirected: list[tuple[int, Redirect]] = []
        for number in numbers:
            with self._noted(failures):
                node = self._nodes.of_key(commands[number].key, self._deadline)
                by_node.setdefault(node, []).append(number)
        asked = []
        for place, (node, its) in enumerate(by_node.items()):
            with self._noted(failures), self._share(node, len(by_node) - place):
                for number in its:
                    self._send(commands[number], node)
                self._flush(node)
                asked.append(node)
        for place, node in enumerate(asked):
            with self._noted(failures), self._share(node, len(asked) - place):
                for number in by_node[node]:
                    try:
                        results[number] = self._receive(commands[number], node)
                    except Redirect as elsewhere:
                        redirected.append((number, elsewhere))
        for number, redirect in redirected:
            with self._noted(failures):
                results[number] = self._follow(commands[number], redirect)

    @contextmanager
    def _noted(self, failures: list[EngineError]) -> Iterator[None]:
        """What fails is no more than a note."""
        try:
            yield
        except EngineError as error:
            failures.append(error)

    @contextmanager
    def _share(self, node: Node, parts: int) -> Iterator[None]:
        """The first to be silent must not use up the time in which the others are heard."""
        wire, now = self._wire(node), time.monotonic()
        wire.deadline = now + (self._deadline - now) / parts
        yield
        wire.deadline = self._deadline

    def ask(self, node: Node, receive: Callable[[Wire], Any], *words: bytes) -> Any:
        """Something that is not about a key."""
        command = Command(b"", sender(*words), receive)
        self._send(command, node)
        return self._receive(command, node)

    def _wire(self, node: Node) -> Wire:
        if node not in self._wires:
            self._wires[node] = self._stack.enter_context(node.connection(self._deadline))
        return self._wires[node]

    @contextmanager
    def _at(self, node: Node) -> Iterator[Wire]:
        wire = self._wire(node)
        try:
            with node.guard():
                yield wire
        except EngineError:
            del self._wires[node]  # late replies would be taken for those to what is asked next
            raise

    def _send(self, command: Command, node: Node) -> None:
        with self._at(node) as wire:
            command.send(wire)

    def _receive(self, command: Command, node: Node) -> Any:
        with self._at(node) as wire:
            found = command.receive(wire)
        node.heard_at = time.monotonic()
        return found

    def _flush(self, *nodes: Node) -> None:
        for node in nodes or list(self._wires):
            with self._at(node) as wire:
                wire.flush()

    def _follow(self, command: Command, redirect: Redirect) -> Any:
        if not self._nodes.is_cluster:
            raise EngineError(explain(str(redirect)))
        for _ in range(_MAX_REDIRECTS):
            self._nodes.fetch_soon()
            host, port = redirect.address
            asked = self._nodes.of_key(command.key, self._deadline)
            node = self._nodes.at(Address(host or asked.address.host, port))
            if redirect.code == "ASK":
                self.ask(node, Wire.status, b"ASKING")
            self._send(command, node)
            try:
                return self._receive(command, node)
            except Redirect as next_one:
                redirect = next_one
        raise EngineError("the cluster sends us in circles; is it being resharded?")


def sender(*words: bytes) -> Callable[[Wire], None]:
    return lambda wire: wire.send(*words)

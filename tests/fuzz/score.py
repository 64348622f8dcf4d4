"""What a fuzz run has found so far, and the closing tables."""

from collections import Counter, defaultdict

from rich.table import Table

from tests.fuzz.words import PROPER

GROWTH_LIMIT = 20 << 20


class Score:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []  # of the fuzzers: not answered, or not as promised
        self.unhealthy: list[str] = []  # of the client that behaves
        self.broken: list[str] = []  # crashes, leaks
        self.slowest_ms = 0.0
        self.seconds = self.cpu_seconds = 0.0  # of the run, and of the server
        self.memory: list[tuple[str, int]] = []  # when, bytes
        self.files: list[tuple[str, int]] = []

    @property
    def frames(self) -> int:
        return sum(count for (kind, _), count in self.outcomes.items() if kind not in PROPER)

    @property
    def growth(self) -> int:
        """From the second sample on: the first is of a server that has seen nothing yet."""
        sizes = [size for _, size in self.memory[1:]]
        return max(sizes) - sizes[0] if sizes else 0

    def violations(self) -> list[str]:
        found = self.complaints + self.unhealthy + self.broken
        if self.growth > GROWTH_LIMIT:
            found.append(f"memory grew by {self.growth >> 20} MiB: {self.memory}")
        if self.files and self.files[-1][1] > self.files[0][1]:
            found.append(f"descriptors leaked: {self.files}")
        return found

    def tables(self) -> list[Table]:
        return [self._kinds(), self._sums()]

    def _kinds(self) -> Table:
        table = Table(title=f"fuzz run, seed {self.seed}", title_justify="left")
        table.add_column("kind of frame")
        table.add_column("frames", justify="right")
        table.add_column("what became of them")
        by_kind: dict[str, Counter[str]] = defaultdict(Counter)
        for (kind, outcome), count in self.outcomes.items():
            by_kind[kind][outcome] += count
        for kind, outcomes in sorted(by_kind.items()):
            text = ", ".join(f"{outcome} {count:,}" for outcome, count in outcomes.most_common())
            table.add_row(kind, f"{outcomes.total():,}", text)
        table.add_section()
        table.add_row("all", f"{self.frames:,}", f"{self.counts['connections']:,} connections")
        return table

    def _sums(self) -> Table:
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("time", f"{self.seconds:.0f} s, {self.frames / max(1.0, self.seconds):,.0f} frames/s")
        table.add_row("time the server computed", f"{self.cpu_seconds:.0f} s")
        table.add_row("namespaces at the end", f"{self.counts['namespaces']:,}")
        table.add_row("silent connections ended by the server", f"{self.counts['silent']:,}")
        table.add_row("neither a typed error, a result nor a closed connection", str(len(self.complaints)))
        table.add_row("crashes, internal errors, leaks", str(len(self.broken)))
        for when, size in self.memory:
            table.add_row(f"server memory {when}", f"{size / 2**20:.1f} MiB")
        for when, count in self.files:
            table.add_row(f"server descriptors {when}", str(count))
        table.add_section()
        table.add_row("healthy client: lookups", f"{self.counts['lookups']:,}")
        table.add_row("healthy client: stores", f"{self.counts['stores']:,}")
        table.add_row("healthy client: objects compared", f"{self.counts['objects']:,}")
        table.add_row("healthy client: crowded out", f"{self.counts['crowded_out']:,}")
        table.add_row("healthy client: slowest answer", f"{self.slowest_ms:.0f} ms")
        table.add_row("healthy client: wrong or late", str(len(self.unhealthy)))
        return table

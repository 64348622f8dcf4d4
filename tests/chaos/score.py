"""What a fault run has found so far, and the closing table."""

from collections import Counter

from rich.table import Table

from tests.chaos.report import News

RECOVERY = 0.95


class Score:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.left: Counter[str] = Counter()  # how stripes left, as servers said at their end
        self.stored: set[str] = set()  # ever, and confirmed
        self.wrong: list[str] = []
        self.late: list[str] = []
        self.leaks: list[str] = []
        self.broken: list[str] = []
        self.torn: list[str] = []
        self.expected = self.found = self.at_rest = 0
        self.restarts: list[float] = []  # the share that was found again, each time
        self.slowest_start = 0.0

    def add(self, name: str, news: News) -> None:
        self.counts.update(news.counts)
        self.wrong += [f"{name}: {what}" for what in news.wrong]
        self.broken += [f"{name}: {what}" for what in news.broken]
        self.stored.update(news.stored)

    def recovered(self, before: set[str], after: set[str]) -> None:
        """What lookups found when the server was killed, as far as engines knew it to be stored, and right
        after.
        """
        expected = before & self.stored
        found = expected & after
        self.expected += len(expected)
        self.found += len(found)
        if expected:
            self.restarts.append(len(found) / len(expected))

    @property
    def recovery(self) -> float:
        return self.found / self.expected if self.expected else 1.0

    def counted_faults(self, extra: tuple[str, ...]) -> int:
        return sum(number for kind, number in self.faults.items() if kind not in extra)

    def progress(self, faults: int, extra: tuple[str, ...]) -> str:
        return (
            f"{self.counted_faults(extra)} of {faults} faults, {self.counts['requests']:,} requests, "
            f"{self.counts['objects_loaded']:,} objects compared, "
            f"{len(self.wrong)} wrong, {len(self.late)} late"
        )

    def violations(self) -> list[str]:
        found = [f"wrong bytes: {what}" for what in self.wrong]
        found += [f"late: {what}" for what in self.late]
        found += [f"leak: {what}" for what in self.leaks]
        found += [f"torn: {what}" for what in self.torn]
        if bad := self.counts["bad_checksums"]:
            # Not wrong bytes yet: the last line of defence held. But nobody should have been let in that far.
            found.append(f"{bad} objects failed their checksum")
        found += self.broken
        if self.recovery < RECOVERY:
            found.append(
                f"only {self.recovery:.1%} of what was stored before a server kill was found after it"
            )
        return found

    def tables(self) -> list[Table]:
        table = Table(title=f"fault run, seed {self.seed}", title_justify="left")
        table.add_column("what")
        table.add_column("count", justify="right")
        for kind, number in sorted(self.faults.items()):
            table.add_row(kind, f"{number:,}")
        table.add_section()
        for name in (
            "requests",
            "lookups",
            "stores",
            "hit_chunks",
            "brought_chunks",
            "objects_loaded",
            "gave_up",
        ):
            table.add_row(name.replace("_", " "), f"{self.counts[name]:,}")
        for name in sorted(name for name in self.counts if name.startswith("miss: ") and self.counts[name]):
            table.add_row(name.replace("_", " "), f"{self.counts[name]:,}")
        for way in sorted(self.left):
            table.add_row(f"stripes {way}", f"{self.left[way]:,}")
        table.add_row("objects compared at rest", f"{self.at_rest:,}")
        table.add_row("slowest server start", f"{self.slowest_start:.2f} s")
        table.add_section()
        table.add_row("wrong objects", str(len(self.wrong)))
        table.add_row("objects that failed their checksum", str(self.counts["bad_checksums"]))
        table.add_row("late answers", str(len(self.late)))
        table.add_row("leaked slots, shares, sessions", str(len(self.leaks)))
        table.add_row("broken promises, crashes", str(len(self.broken) + len(self.torn)))
        worst = f", worst {min(self.restarts):.1%}" if self.restarts else ""
        table.add_row(f"found again after {len(self.restarts)} server kills", f"{self.recovery:.2%}{worst}")
        return [table]

"""Size budget: how long a module or function may be, and how much state a class may hold.

Prints what is over a soft limit and fails on what is over a hard one; tests have hard limits only.
A module counts all its lines. A function counts code lines: no docstring, blanks or comments, but
functions nested in it. A class counts its annotated fields and every self.x assigned in it.
Does not judge complexity: ruff does that.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOTS = ("src/kvcellar", "tools", "bench", "demo", "tests")


class Limit(NamedTuple):
    soft: int
    hard: int
    unit: str


MODULE = Limit(300, 500, "lines")
FUNCTION = Limit(30, 60, "code lines")
STATE = Limit(12, 16, "attributes")


class Item(NamedTuple):
    """One measured module, function or class."""

    limit: Limit
    place: str  # file:line
    name: str
    size: int


class Report(NamedTuple):
    notes: list[Item]  # over a soft limit
    failures: list[Item]  # over a hard limit
    totals: Counter[str]  # lines by root
    longest: Item | None  # function


def check(roots: Iterable[Path]) -> Report:
    """Measure every .py file under each root; a root named "tests" gives no notes."""
    items: list[Item] = []
    notes: list[Item] = []
    totals: Counter[str] = Counter()
    for root in roots:
        found = [item for path in sorted(root.rglob("*.py")) for item in measure(path)]
        items += found
        totals[root.name] += sum(item.size for item in found if item.limit is MODULE)
        if root.name != "tests":
            notes += [item for item in found if item.limit.soft < item.size <= item.limit.hard]
    failures = [item for item in items if item.size > item.limit.hard]
    functions = [item for item in items if item.limit is FUNCTION]
    return Report(notes, failures, totals, max(functions, key=lambda item: item.size, default=None))


def measure(path: Path) -> Iterator[Item]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    yield Item(MODULE, f"{path}:1", path.stem, len(lines))
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Item(FUNCTION, f"{path}:{node.lineno}", node.name, code_lines(node, lines))
        elif isinstance(node, ast.ClassDef):
            yield Item(STATE, f"{path}:{node.lineno}", node.name, len(attributes(node)))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    numbers = line_numbers(function)
    if ast.get_docstring(function) is not None:
        numbers -= line_numbers(function.body[0])
    texts = (lines[number - 1].strip() for number in numbers)
    return sum(1 for text in texts if text and not text.startswith("#"))


def line_numbers(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def attributes(node: ast.AST) -> set[str]:
    """Names of fields and of assigned self.x in a class body, not looking into nested classes."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if isinstance(node, ast.ClassDef):
                names |= set() if "ClassVar" in ast.unparse(kind) else {name}
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.ClassDef():
                continue
        names |= attributes(child)
    return names


def main() -> int:
    report = check(root for root in map(Path, ROOTS) if root.exists())
    for item in report.notes:
        print(f"note: {item.place} {item.name} {item.size} {item.limit.unit}")
    for item in report.failures:
        print(f"{item.place} {item.name} has {item.size} {item.limit.unit}; the limit is {item.limit.hard}.")
    totals = "  ".join(f"{root} {lines}" for root, lines in report.totals.items())
    print(f"lines: {totals}")
    if report.longest:
        print(f"longest function: {report.longest.place} {report.longest.name} {report.longest.size}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

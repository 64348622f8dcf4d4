"""What the project says about itself is true."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcellar

PROJECT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def test_changelog_covers_this_version():
    changelog = read("CHANGELOG.md")
    assert f"## [{kvcellar.__version__}]" in changelog or "## [Unreleased]" in changelog


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_gives_the_command_on_its_first_screen(command):
    assert command in "\n".join(read("README.md").splitlines()[:40])


@pytest.mark.parametrize("module", ["kvcellar", "kvcellar.server"])
def test_import_does_not_pull_in_torch(module, tmp_path):
    (tmp_path / "torch.py").touch()  # so that an import guarded by try/except is seen as well
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


# Who may import whom: a room is a package, or a module beside them. What is not here imports no other.
ROOMS = {
    "__main__": "cli",
    "arena": "errors folders identity slab",
    "bench": "client errors identity slab tiers transfer wire",
    "cli": "arena bench client config errors server simulate slab tiers wire",
    "client": "config epoch errors identity sketch slab wire",
    "config": "errors",
    "folders": "errors",
    "identity": "errors slab",
    "ledger": "epoch errors identity sketch slab",
    "server": "arena config epoch errors folders identity ledger sketch slab tiers wire",
    "simulate": "errors identity ledger slab tiers",
    "sketch": "errors identity",
    "slab": "errors",
    "tiers": "config errors identity ledger slab transfer",
    "transfer": "errors identity slab",
    "vllm": "client config errors identity slab transfer",
    "wire": "errors identity",
}
# What waits, or talks to files, sockets and processes. Time itself is passed in.
WORLD = {"asyncio", "os", "pathlib", "select", "socket", "subprocess", "threading", "time"}
# What uses the package besides itself.
OTHERS = ("bench", "demo", "docs/examples", "tests", "tools")


def modules() -> dict[str, ast.Module]:
    """The package's, by name; a face by that of its package."""
    found = {}
    for path in sorted((PROJECT / "src/kvcellar").rglob("*.py")):
        parts = path.relative_to(PROJECT / "src").with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each, wherever it stands; no name where it is the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


MODULES = modules()


def imported(module: str) -> set[str]:
    """The package's modules that this one imports: of a face's names, the face."""
    wanted = {f"{whole}.{name}".rstrip(".") for whole, name in imports(MODULES[module])}
    known = {name if name in MODULES else name.rpartition(".")[0] for name in wanted}
    return known & MODULES.keys() - {"kvcellar"}


def test_rooms_import_only_the_rooms_below_them():
    found: dict[str, set[str]] = {}
    for module in MODULES.keys() - {"kvcellar"}:
        mine = module.split(".")[1]
        found.setdefault(mine, set()).update({other.split(".")[1] for other in imported(module)} - {mine})
    assert {room: " ".join(sorted(others)) for room, others in found.items() if others} == ROOMS


def test_no_module_imports_itself_by_way_of_others():
    left = {module: imported(module) for module in MODULES}
    while below := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in below}
    assert not left


@pytest.mark.parametrize("room", ["identity", "ledger"])
def test_pure_rooms_leave_the_world_alone(room):
    used = {
        (module, name.split(".")[0])
        for module, tree in MODULES.items()
        if module.startswith(f"kvcellar.{room}")
        for name, _ in imports(tree)
    }
    assert not {(module, name) for module, name in used if name in WORLD}


def test_faces_show_what_others_use():
    faces = {
        module: set(ast.literal_eval(node.value))
        for module, tree in MODULES.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    del faces["kvcellar.vllm"]  # of which a setting of vLLM's says the name
    others = [path for folder in OTHERS for path in sorted((PROJECT / folder).rglob("*.py"))]
    for tree in (*MODULES.values(), *(ast.parse(path.read_text(encoding="utf-8")) for path in others)):
        for module, name in imports(tree):
            faces.get(module, set()).discard(name)
            for node in ast.walk(tree) if f"{module}.{name}" in faces else ():
                if isinstance(node, ast.Attribute):
                    faces[f"{module}.{name}"].discard(node.attr)
    assert {module: names for module, names in faces.items() if names} == {}


def test_make_gpu_says_what_its_interpreter_lacks():
    made = subprocess.run(
        ["make", "gpu", "PYTHON=false"], cwd=PROJECT, capture_output=True, text=True, timeout=60
    )
    assert made.returncode != 0
    assert "false has no torch, Triton or cuda-bindings; PYTHON=..." in made.stdout

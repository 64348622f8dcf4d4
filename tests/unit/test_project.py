"""What the project says about itself is true."""

import subprocess
import sys
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

"""What the docs claim is what the code does."""

import re
from pathlib import Path

import pytest

from kvcellar.config import HELP, load_settings
from kvcellar.errors import BY_CODE
from tools.protocol_table import SECTIONS, rows

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_protocol_page_lists_the_messages_of_the_code(section):
    page = (ROOT / "docs/protocol.md").read_text()
    assert "\n".join([f"### {section}", "", *rows(section)]) in page, "run: python tools/protocol_table.py"


@pytest.mark.parametrize("setting", HELP)
def test_every_setting_is_documented(setting):
    row = f"| `--{setting.replace('_', '-')}` | `KVCELLAR_{setting.upper()}` | `{setting}` |"
    assert row in (ROOT / "docs/operations.md").read_text()


def test_no_setting_is_documented_that_does_not_exist():
    documented = re.findall(
        r"^\| `--[a-z-]+` \| `\w+` \| `(\w+)` \|", (ROOT / "docs/operations.md").read_text(), re.M
    )
    assert sorted(documented) == sorted(HELP)


def test_the_example_of_a_settings_file_is_one(tmp_path):
    found = re.search(r"^```toml\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.M | re.S)
    assert found
    (tmp_path / "kvcellar.toml").write_text(found[1])
    assert load_settings({}, str(tmp_path / "kvcellar.toml")).allow_uids == (1000, 1001)


def test_every_error_is_in_the_tree_that_opens_its_module():
    tree = (ROOT / "src/kvcellar/errors.py").read_text().split('"""')[1]
    assert all(re.search(rf"^ +{error.__name__}\b", tree, re.M) for error in BY_CODE.values())


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        found = (ROOT / page).parent / target if target else ROOT / page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_connector_option_is_documented():
    source = (ROOT / "src/kvcellar/vllm/options.py").read_text()
    known = re.search(r"_KNOWN = \{(.*?)\}", source, re.S)
    assert known
    page = (ROOT / "docs/vllm.md").read_text()
    assert all(f"| `{option}` |" in page for option in re.findall(r'"(\w+)"', known[1]))

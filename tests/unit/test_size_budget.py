"""The size budget catches what it should, and the project keeps it."""

from pathlib import Path

import pytest

from tools.size import ROOTS, Report, check

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def measured(tmp_path):
    def measure(source: str, root: str = "pkg") -> Report:
        folder = tmp_path / root
        folder.mkdir()
        (folder / "made_up.py").write_text(source)
        return check([folder])

    return measure


def function(code_lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (code_lines - 1)


def sizes(items) -> list[tuple[str, int]]:
    return [(item.name, item.size) for item in items]


def test_long_function_is_noted_and_a_longer_one_fails(measured):
    report = measured(function(60) + function(61))
    assert sizes(report.notes) == [("long", 60)]
    assert sizes(report.failures) == [("long", 61)]
    assert report.longest == report.failures[0]
    assert report.failures[0].place.endswith("made_up.py:61")


def test_docstring_comments_and_blanks_are_not_code(measured):
    source = 'def short():\n    """Two\n    lines."""\n    # why\n\n    return 1\n'
    assert measured(source).longest.size == 2


def test_too_long_module_fails(measured):
    report = measured("x = 1\n" * 501)
    assert sizes(report.failures) == [("made_up", 501)]
    assert report.totals == {"pkg": 501}


def test_class_state_is_every_assigned_attribute_once(measured):
    body = "".join(f"        self.a{n} = self.a{n} = {n}\n" for n in range(17))
    report = measured(f"class Big:\n    def fill(self):\n{body}")
    assert sizes(report.failures) == [("Big", 17)]


def test_class_state_includes_fields_but_not_class_variables(measured):
    fields = "".join(f"    a{n}: int\n" for n in range(17))
    report = measured(f"class Big(Struct):\n    kind: ClassVar[int] = 1\n{fields}")
    assert sizes(report.failures) == [("Big", 17)]


def test_nested_class_keeps_its_state_to_itself(measured):
    fields = "".join(f"        a{n}: int\n" for n in range(17))
    report = measured(f"class Outer:\n    class Inner:\n{fields}")
    assert sizes(report.failures) == [("Inner", 17)]


def test_tests_have_hard_limits_only(measured):
    report = measured(function(60) + function(61), root="tests")
    assert report.notes == []
    assert sizes(report.failures) == [("long", 61)]


def test_project_keeps_its_own_budget():
    roots = [PROJECT / root for root in ROOTS]
    assert check(root for root in roots if root.exists()).failures == []

"""docs/map.md names every module there is, and none that isn't."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from headway.config.schema import QueueConfig
from headway.records import errors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
MODULES = {
    str(file.relative_to(ROOT / "headway"))
    for file in (ROOT / "headway").rglob("*.py")
    if file.name not in ("__init__.py", "api.py") and ROOT / "headway" / "templates" not in file.parents
}
LINES = Counter(re.findall(r"^- `([\w/]+\.py)`: \S", PAGE, re.M))


def test_every_module_has_one_line():
    assert MODULES - LINES.keys() == set(), "give each a line in docs/map.md"
    assert [name for name, count in LINES.items() if count > 1] == []


def test_nothing_named_is_missing():
    packages = {name.split("/")[0] for name in MODULES}
    mentioned = {name for name in re.findall(r"`(\w+/[\w/]+\.py)`", PAGE) if name.split("/")[0] in packages}
    assert mentioned - MODULES == set()
    folders = re.findall(r"`((?:headway|examples|tests|docs)/[\w/]*)`", PAGE)
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def test_each_line_stands_under_its_package():
    for part in PAGE.split("\n## ")[1:]:
        heading = re.match(r"`headway/(\w+)/`", part)
        if heading:
            lines = re.findall(r"^- `(\w+)/", part, re.M)
            assert lines, part.splitlines()[0]
            assert set(lines) == {heading[1]}


def test_empty_packages_are_told_as_such():
    told = re.search(r"^(`headway/.*) (?:is|are) empty", PAGE, re.M)
    named = set(re.findall(r"`headway/(\w+)/`", told[1])) if told else set()
    packages = {folder.parent.name for folder in (ROOT / "headway").glob("*/__init__.py")}
    assert packages - {name.split("/")[0] for name in MODULES} == named


@pytest.mark.parametrize(
    "error", [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HeadwayError)]
)
def test_exit_codes_are_as_told(error: type[errors.HeadwayError]):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{error.__name__}`" in line)
    assert row.split("|")[1].strip() == str(error.exit_code)


def test_every_rule_has_a_place():
    part = PAGE.split("## Where the twelve rules live")[1]
    assert [int(n) for n in re.findall(r"^\| (\d+) ", part, re.M)] == list(range(1, 13))
    budget = next(line for line in part.splitlines() if line.startswith("| 2 "))
    policies = get_args(QueueConfig.model_fields["overdue"].annotation)
    assert [policy for policy in policies if f"`{policy}`" not in budget] == []

"""docs/map.md is written from the docstrings; its hand-written part names modules, errors and rules that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from docs import write_map
from headway.config.schema import QueueConfig
from headway.records import errors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
MODULES = {
    str(file.relative_to(ROOT / "headway"))
    for file in (ROOT / "headway").rglob("*.py")
    if file.name not in ("__init__.py", "api.py") and ROOT / "headway" / "templates" not in file.parents
}


@pytest.mark.slow
def test_the_page_is_written_from_the_docstrings():
    assert write_map.page(write_map.rest_of_page()) == PAGE, "python -m docs.write_map > docs/map.md"
    assert re.findall(r"^- `([\w/]+)\.py`: *$", PAGE, re.M) == []
    assert re.findall(r"^(#+ `headway/.*/`)\n\n\n", PAGE, re.M) == []


def test_an_init_says_what_its_package_owns_and_imports_nothing():
    for file in (ROOT / "headway").rglob("__init__.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{file}: a paragraph is missing"
        assert file.parent.name == "headway" or len(tree.body) == 1, f"{file} holds more than a docstring"
        named = re.findall(r"`([\w/]+\.py)", ast.get_docstring(tree) or "")
        assert [
            name for name in named if not any((root / name).is_file() for root in (file.parent, ROOT / "headway"))
        ] == []


def test_nothing_named_is_missing():
    packages = {name.split("/")[0] for name in MODULES}
    mentioned = {name for name in re.findall(r"`(\w+/[\w/]+\.py)`", PAGE) if name.split("/")[0] in packages}
    assert mentioned - MODULES == set()
    folders = re.findall(r"`((?:headway|examples|tests|docs)/[\w/]*)`", PAGE)
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


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

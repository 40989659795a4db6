"""Outputs on the pages that are marked as regenerated are what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.blocks import PAGES, blocks_of
from docs.write_outputs import is_regenerated, regenerated

MARKED = [page for page in PAGES if any(map(is_regenerated, blocks_of(page)))]


def test_some_are_marked() -> None:
    assert {"README.md", "quickstart.md", "planning.md", "new.md"} <= {page.name for page in MARKED}


@pytest.mark.real
@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_outputs_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == regenerated(page), f"run: python -m docs.write_outputs {page.name}"

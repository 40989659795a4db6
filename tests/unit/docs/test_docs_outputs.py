"""Outputs on the pages that are marked as regenerated are what the commands print. Those that take longer are compared
by tests/slow/test_docs_site.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.blocks import PAGES, blocks_of
from docs.write_outputs import is_regenerated, main, regenerated

MARKED = [page for page in PAGES if any(map(is_regenerated, blocks_of(page)))]
QUICK = ("alerts.md", "kernels-commands.md", "new.md", "style.md")


def test_some_are_marked() -> None:
    assert {*QUICK, "models.md", "planning.md", "quickstart.md", "simulation.md"} <= {page.name for page in MARKED}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in MARKED if page.name in QUICK], ids=lambda page: page.name)
def test_outputs_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == regenerated(page), f"run: python -m docs.write_outputs {page.name}"


def test_commands_share_a_folder_and_first_ones_are_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    text = (
        "<!-- regenerated; first: echo unseen > a -->\n```console\n$ cat a | tr u U\nold\n\n$ ls b\n```\n$ not this\n"
    )
    page.write_text(text)
    monkeypatch.setattr("docs.write_outputs.PAGES", [page])
    monkeypatch.setattr("docs.write_outputs.ROOT", tmp_path)
    (tmp_path / "examples" / "arithmetic").mkdir(parents=True)
    (tmp_path / "examples" / "arithmetic" / "experiment.toml").write_text("")
    main(["page.md"])
    assert page.read_text() == text.replace("old", "Unseen").replace(
        "ls b\n", "ls b\nls: cannot access 'b': No such file or directory\n"
    )

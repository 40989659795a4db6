"""`headway report --html`: the page of a run as one file, in a real Chromium, from file:// and without network.

Skipped where Debian's chromium or playwright isn't there. What the file says: tests/unit/watch/test_page_file.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watch_browser
import watch_runs
from watch_browser import open_page

from headway.services.watch.page_file import write_compared_page, write_run_page

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(watch_browser.lacking()), reason=watch_browser.lacking()),
]
VIEWS = ("now", "run", "rollouts", "tasks", "devices")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run in which all that others wrote is an attack."""
    tokenizer = watch_runs.write_tokenizer(folder / "tokenizer")
    return watch_runs.write_hostile_run(folder / "hostile", folder / "tokenizer", tokenizer)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with watch_browser.browser() as started:
        yield started


@pytest.mark.slow
def test_a_file_shows_every_view_of_a_run_without_a_server(run: Path, folder: Path, chromium: Any) -> None:
    page = open_page(chromium, write_run_page(run, folder / "page.html"))
    try:
        for view in VIEWS:
            page.require_sound(page.open(view, run="hostile"))
            assert page.accessibility() == [], view
        page.open("rollouts", run="hostile")
        page.page.locator("a.hit").first.click()
        text = page.settled("rollout")
        page.require_sound(text)
        assert "Group" in text
        assert page.accessibility() == []
        assert page.page.locator(".tokens .tok").count() > 0
        text = page.open("rollout", run="hostile", row=10_000)
        assert "isn't in this file" in text
    finally:
        page.close()


def test_a_file_finds_rollouts_by_text_and_ending(run: Path, folder: Path, chromium: Any) -> None:
    page = open_page(chromium, write_run_page(run, folder / "page.html"))
    try:
        page.open("rollouts", run="hostile")
        every = page.page.locator("a.hit").count()
        page.open("rollouts", run="hostile", ending="failed")
        failed = page.page.locator("a.hit").count()
        assert 0 < failed < every
        page.open("rollouts", run="hostile", text="no such words anywhere")
        assert page.page.locator("a.hit").count() == 0
    finally:
        page.close()


def test_hostile_names_and_configurations_are_shown_over_each_other_and_inert(
    run: Path, folder: Path, chromium: Any
) -> None:
    attack = "<img src=x onerror='window.__pwned=1'>"
    other = folder / "more" / attack
    watch_runs.copy_recorded("other", other)
    write_compared_page([run, other], folder / "hostile.html")
    page = open_page(chromium, folder / "hostile.html")
    try:
        text = page.open("compare", runs=f"hostile,{attack}")
        page.require_sound(text)
        found = page.page.evaluate(watch_browser.INERT)
        assert {name: found[name] for name in ("pwned", "made", "handlers")} == {
            "pwned": None,
            "made": 0,
            "handlers": 0,
        }
        assert text.count("window.__pwned") > 1, "the run's name and the configuration are to be read"
    finally:
        page.close()


def test_a_file_shows_runs_over_each_other(folder: Path, chromium: Any) -> None:
    runs = [folder / "runs" / name for name in ("ended", "other")]
    for path in runs:
        watch_runs.copy_recorded(path.name, path)
    assert write_compared_page([*runs, folder / "none"], folder / "compare.html").keys() == {str(folder / "none")}
    page = open_page(chromium, folder / "compare.html")
    try:
        text = page.open("compare", runs="ended,other")
        page.require_sound(text)
        assert "Last numbers" in text
        assert "Differences of their configurations" in text
        assert "Left out" in text
        assert page.accessibility() == []
    finally:
        page.close()

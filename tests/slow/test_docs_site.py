"""The site builds without a warning, every link on it leads somewhere, nothing is fetched from another server, and what
commands print on the pages is what they print."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from docs.build_site import ROOT, stage
from docs.write_outputs import regenerated
from tests.unit.docs.test_docs_outputs import MARKED, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SITE = ROOT / "site"
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Anchors, links and fetched addresses of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get("rel") != "canonical" and FETCHED.get(tag, "") in given:
            self.fetched.append(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    built = subprocess.run([sys.executable, "-m", "docs.build_site"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return {file.resolve(): Page(file) for file in SITE.rglob("*.html")}


def test_every_page_is_built(pages: dict[Path, Page]) -> None:
    names = {file.relative_to(SITE).as_posix() for file in pages}
    wanted = {f"{page.stem}.html" for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("C[HO]*.md")]}
    assert wanted - names == set()


def test_no_link_is_dead(pages: dict[Path, Page]) -> None:
    dead = []
    for file, page in pages.items():
        if file.name == "404.html":
            continue  # its links are those of the server's root
        for link in [*page.links, *page.fetched]:
            address, anchor = urldefrag(link)
            if urlsplit(address).scheme:
                continue
            target = (file.parent / unquote(urlsplit(address).path)).resolve() if address else file
            found = pages.get(target / "index.html" if target.is_dir() else target)
            if not target.exists() or (anchor and found is not None and unquote(anchor) not in found.anchors):
                dead.append(f"{file.name}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Page]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert {address for address in fetched if urlsplit(address).netloc} == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in SITE.rglob("*.css"))
    assert "url(http" not in styles
    assert "@import" not in styles


def test_site_can_be_searched(pages: dict[Path, Page]) -> None:
    [index] = SITE.rglob("search*.json")
    assert "groups_per_step" in index.read_text(encoding="utf-8")


def test_a_link_to_a_file_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[gone](../examples/gone.py)\n")
    monkeypatch.setattr("docs.build_site.ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="gone"):
        stage(tmp_path / "pages")


@pytest.mark.parametrize("page", [page for page in MARKED if page.name not in QUICK], ids=lambda page: page.name)
@pytest.mark.long
def test_outputs_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == regenerated(page), f"run: python -m docs.write_outputs {page.name}"

"""The site: the pages, the front pages beside README.md, and the repository's files that they link to.

python -m docs.build_site    builds it strictly into site/, for any server (python -m http.server -d site)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"  # docs_dir of mkdocs.yml
FRONT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_ASSETS = (".md", ".svg", ".png", ".json", ".txt", ".css")
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def stage(pages: Path = PAGES) -> None:
    """Lay out all that the site has in ``pages``. A link out of docs/ leads to a copy of the file: nobody who reads the
    site has the repository beside it. Raises FileNotFoundError for one that leads nowhere."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for asset in (ROOT / "docs").rglob("*"):
        if asset.suffix in _ASSETS:
            _put(asset, pages / asset.relative_to(ROOT / "docs"), pages)
    for name in FRONT:
        _put(ROOT / name, pages / name, pages)


def _put(source: Path, target: Path, pages: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copyfile(source, target)
        return

    def moved(link: re.Match[str]) -> str:
        found = (source.parent / link[2]).resolve()
        if found.is_relative_to(ROOT / "docs"):
            return f"{link[1]}{found.relative_to(ROOT / 'docs')}{link[3] or ''}"
        if found.parent == ROOT and found.name in FRONT:
            return f"{link[1]}{found.name}{link[3] or ''}"
        copy = pages / "files" / found.relative_to(ROOT)
        if found.is_dir():
            raise IsADirectoryError(
                f"{source.name}: {link[2]} is a folder, which the site can't show: link a file of it"
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, copy)
        return f"{link[1]}files/{found.relative_to(ROOT)}{link[3] or ''}"

    target.write_text(_LINK.sub(moved, source.read_text(encoding="utf-8")), encoding="utf-8")


def build() -> int:
    """Build the site as mkdocs.yml says; a warning is an error. Returns the builder's exit code."""
    stage()
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", "mkdocs.yml"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(build())

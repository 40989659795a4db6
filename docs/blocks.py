"""Fenced blocks of the pages, and what a comment on the line above one says of it.

``<!-- not run: WHY -->``: an excerpt, or it needs what a test hasn't got. ``<!-- regenerated -->``: what its commands
print is written by ``python -m docs.write_outputs``; ``<!-- regenerated; first: COMMAND -->`` runs one before, unseen.
``<!-- file NAME -->``, ``<!-- change NAME -->``: a test that does what the page says writes or changes that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n+)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of its fence
    language: str
    text: str
    mark: str  # what the comment above it says; "": none
    start: int  # of its text in the page's
    end: int

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def run(self) -> bool:
        """Whether it must be complete and right by itself."""
        return not self.mark.startswith(("not run: ", "file ", "change "))


def blocks_of(page: Path, *languages: str) -> Iterator[Block]:
    """The page's blocks in their order, or those in these languages."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        if not languages or found["language"] in languages:
            start, end = found.span("text")
            line = text.count("\n", 0, start)
            yield Block(
                page=page,
                line=line,
                language=found["language"],
                text=found["text"],
                mark=found["mark"] or "",
                start=start,
                end=end,
            )


def commands_in(block: Block) -> Iterator[tuple[str, str]]:
    """Each command that a person would type, and what the page says that it prints: all lines of a shell block, in
    others those that begin with ``$``. A line that ends with a backslash goes on."""
    text = block.text.replace("\\\n", "")
    if block.language in ("sh", "bash"):
        yield from ((line, "") for line in text.splitlines() if line.strip())
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output

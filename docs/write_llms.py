"""Writes docs/llms.txt, the list of pages in llmstxt.org's format: the menu's names, the index's lines, or a page's
first sentence where the index only repeats the name.

python -m docs.write_llms > docs/llms.txt
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
OPENING = """\
# Headway

> Headway trains language models by reinforcement learning, asynchronously, and treats efficiency as queue health: a \
generator puts samples into a queue, a trainer takes them out, and no sample older than a budget is trained on. Linux, \
Python 3.11 or newer; a GPU is optional.

One TOML file is an experiment: `headway check` it, `headway train` it, `headway report` and `headway doctor` its \
run's folder. Any key can be given as `--section.key=value`. An assistant's guide, whose commands are tested, is \
`.agents/skills/headway/SKILL.md` of the repository.
"""
SECONDARY = "Inside"  # the section of the menu that a reader without room may skip


def lines() -> Iterator[str]:
    """The lines of docs/llms.txt."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| (.+) \|$", index, re.MULTILINE))
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    yield OPENING.rstrip()
    for line in menu.splitlines():
        if section := re.fullmatch(r"  - (.+):", line):
            yield f"\n## {'Optional' if section[1] == SECONDARY else section[1]}\n"
        elif (page := re.fullmatch(r" +- (.+): ([\w-]+\.md)", line)) and page[2] in said:
            what = first_sentence(page[2]) if repeats(page[1], said[page[2]]) else said[page[2]]
            what = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", what)
            yield f"- [{page[1]}]({page[2]}): {what}"


def repeats(name: str, what: str) -> bool:
    """Whether ``what`` begins with the words of ``name``, in whichever order."""
    words, first = (re.findall(r"\w+", text.lower()) for text in (name, what))
    return sorted(words) == sorted(first[: len(words)])


def first_sentence(page: str) -> str:
    """The first sentence of ``page`` that is neither a heading nor code, a table, a picture or a comment."""
    blocks = re.split(r"\n{2,}", re.sub(r"```.*?```", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL))
    prose = next(block for block in map(str.strip, blocks) if re.match(r"[\w`*\[]", block))
    return re.split(r"(?<=[.!?])\s", prose.replace("\n", " "))[0].removesuffix(".")


if __name__ == "__main__":
    print("\n".join(lines()))

"""Writes docs/llms.txt, the list of pages in llmstxt.org's format: the menu's names, the index's lines.

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
            what = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", said[page[2]])
            yield f"- [{page[1]}]({page[2]}): {what}"


if __name__ == "__main__":
    print("\n".join(lines()))

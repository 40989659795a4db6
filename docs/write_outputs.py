"""What commands print on the pages, written by running them: the blocks after ``<!-- regenerated -->``.

python -m docs.write_outputs [PAGE...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.blocks import PAGES, ROOT, Block, blocks_of

_MARK = "regenerated"
_SHIM = f'#!/bin/sh\nexec "{sys.executable}" -m headway.cli.main "$@"\n'


def is_regenerated(block: Block) -> bool:
    return block.mark == _MARK or block.mark.startswith(f"{_MARK}; first: ")


def regenerated(page: Path) -> str:
    """The page's text with what its marked blocks' commands print now. They run one after another in a folder of their
    own, which has the quickstart's experiment.toml and links to the repository's folders."""
    text = page.read_text(encoding="utf-8")
    marked = [block for block in blocks_of(page) if is_regenerated(block)]
    if not marked:
        return text
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("examples", "benchmarks", "docs"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "experiment.toml").write_bytes((ROOT / "examples/arithmetic/experiment.toml").read_bytes())
        (folder / ".bin").mkdir()
        (folder / ".bin" / "headway").write_text(_SHIM)
        (folder / ".bin" / "headway").chmod(0o755)
        printed = [_printed(block, folder) for block in marked]
    for block, output in reversed([*zip(marked, printed, strict=True)]):
        text = text[: block.start] + output + text[block.end :]
    return text


def _printed(block: Block, folder: Path) -> str:
    """The block's commands with what they print, errors included. An empty line before a command stays."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{folder / '.bin'}:{Path(sys.executable).parent}:{environment['PATH']}"

    def run(command: str) -> str:
        # By a shell: pipes and quotes as a person would type them.
        out = subprocess.PIPE
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, text=True, stdout=out, stderr=subprocess.STDOUT
        )
        return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())

    if first := block.mark.partition("; first: ")[2]:
        run(first)
    lines, before = [], ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            lines.append(("\n" if lines and not before else "") + line + "\n" + run(line.removeprefix("$ ")))
        before = line
    return "".join(lines)


def main(names: list[str]) -> None:
    for page in PAGES:
        if not names or page.name in names:
            text = regenerated(page)
            if text != page.read_text(encoding="utf-8"):
                page.write_text(text, encoding="utf-8")
                print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])

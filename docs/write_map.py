"""The modules of ``docs/map.md``, written from their docstrings; what stands after them in the page stays as it is.

python -m docs.write_map > docs/map.md
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "headway"
PAGE = ROOT / "docs" / "map.md"
_INTRODUCTION = """\
# Map

<!-- Written by `python -m docs.write_map > docs/map.md` down to "Beside the package"; edit the docstrings instead. -->

Each package says what it owns, what it may not do, and where to begin. Each module has one line. Packages stand in the
order of design.md's [table](design.md#3-modules-and-who-may-import-whom), which says who may import whom.
"""
_REST = "## Beside the package"
# From the bottom up.
_PACKAGES = [
    "records",
    "config",
    "runtime",
    "telemetry",
    "control",
    "flow",
    "algorithms",
    "tokens",
    "models",
    "tasks",
    "sandbox",
    "weights",
    "kernels",
    "rollout",
    "buffer",
    "trainer",
    "generator",
    "embodied",
    "orchestrator",
    "planner",
    "report",
    "services",
    "cli",
]


def _docstring(file: Path) -> str:
    return inspect.cleandoc(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")


def _plain(text: str) -> str:
    """``text`` on one line, with Markdown's single backticks."""
    return " ".join(text.split()).replace("``", "`")


def _first_sentence(text: str) -> str:
    return _plain(re.split(r"(?<=[.:?])\s*\n\s*\n|(?<=[.])\s+(?=[A-Z`])", text, maxsplit=1)[0]).rstrip(".:")


def _is_template(folder: Path) -> bool:
    return (PACKAGE / "templates") in (folder, *folder.parents)


def _section(folder: Path) -> Iterator[str]:
    """The heading of a package, its paragraph, its modules, and the same of its sub-packages."""
    name = folder.relative_to(ROOT).as_posix()
    yield f"{'##' if folder.parent == PACKAGE else '###'} `{name}/`\n"
    yield _plain(_docstring(folder / "__init__.py").split("\n\n")[0]) + "\n"
    modules = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
    for file in modules:
        yield f"- `{file.relative_to(PACKAGE).as_posix()}`: {_first_sentence(_docstring(file))}"
    yield ""
    for child in sorted(folder.iterdir()):
        if (child / "__init__.py").exists() and not _is_template(child):
            yield from _section(child)


def page(rest: str) -> str:
    """The whole page, whose part after the modules is ``rest``."""
    lines = [_INTRODUCTION, *(line for name in _PACKAGES for line in _section(PACKAGE / name))]
    lines += ["## `headway/api.py`\n", _plain(_docstring(PACKAGE / "api.py").split("\n\n")[0]) + "\n"]
    return "\n".join(lines) + "\n" + rest


def rest_of_page() -> str:
    """The hand-written part of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(_REST) :]


if __name__ == "__main__":
    print(page(rest_of_page()), end="")

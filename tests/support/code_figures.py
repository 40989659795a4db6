"""Figures of the package's source: lines of code, sizes of files and functions, public classes, docstrings.

``python tests/support/code_figures.py`` (`make house`) prints what the house's limits are about, and one JSON object.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "headway"
TEMPLATES = PACKAGE / "templates"  # projects that `headway new` copies: files of its users, not modules
FILES = {
    file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py")) if TEMPLATES not in file.parents
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The syntax trees of all files, parsed when they are first asked for: five seconds of a core."""
    return {file: ast.parse(text) for file, text in FILES.items()}


def docstrings(tree: ast.Module) -> Iterator[tuple[Documented, ast.Constant]]:
    """Every module, class and function of ``tree`` that has a docstring, with it."""
    for node in ast.walk(tree):
        if not isinstance(node, Documented) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield node, first.value


@functools.cache
def lines_of_code() -> int:
    """Lines of the package that hold code: blank lines, comments and docstrings don't count; C++ counts alike."""
    total = 0
    for file, text in FILES.items():
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _SILENT:
                lines.update(range(token.start[0], token.end[0] + 1))
        for _, text_node in docstrings(trees()[file]):
            lines.difference_update(range(text_node.lineno, (text_node.end_lineno or text_node.lineno) + 1))
        total += len(lines)
    for file in [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]:
        code = re.sub(r"/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.S)
        total += sum(bool(line.split("//")[0].strip()) for line in code.splitlines())
    return total


def class_homes() -> dict[str, list[str]]:
    """The files that define each public class, by its name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(PACKAGE)))
    return homes


def modules_at_the_door() -> dict[str, int]:
    """Modules directly in each package, ``__init__.py`` not counted."""
    doors: dict[str, int] = defaultdict(int)
    for file in FILES:
        if file.name != "__init__.py":
            doors[str(file.parent.relative_to(PACKAGE.parent))] += 1
    return doors


def longest_functions() -> list[tuple[int, str]]:
    """(lines, where) of every function, the longest first."""
    found = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{file.relative_to(PACKAGE)}:{node.name}")
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted(found, reverse=True)


_ELLIPTIC = re.compile(r"(What|Whom|Who|Whose|One|So many|Of|It|Those|The same)\b")


def elliptic_docstrings() -> list[str]:
    """Places of docstrings that can't be read alone: their first word stands for something that isn't named."""
    return [
        f"{file.relative_to(PACKAGE)}:{text.lineno} {str(text.value).splitlines()[0]}"
        for file, tree in trees().items()
        for _, text in docstrings(tree)
        if _ELLIPTIC.match(str(text.value))
    ]


def lines_of_page_and_templates() -> int:
    """Lines that aren't blank of the page's own JavaScript, CSS and HTML and of the templates' files."""
    static = PACKAGE / "services" / "watch" / "static"
    page = [
        file for file in static.rglob("*") if file.suffix in (".js", ".css", ".html") and "vendor" not in file.parts
    ]
    texts = [file for file in TEMPLATES.rglob("*") if file.is_file() and file.suffix not in (".pyc", ".png")]
    return sum(bool(line.strip()) for file in [*page, *texts] for line in file.read_text(encoding="utf-8").splitlines())


def protocols() -> list[str]:
    """Names of the classes that are protocols."""
    return sorted(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    )


def words_not_used() -> tuple[set[str], set[str]]:
    """The locals, and the words of any name, that docs/style.md says aren't used."""
    style = (PACKAGE.parent / "docs" / "style.md").read_text(encoding="utf-8")
    locals_, words = re.findall(r"<!-- (?:locals|words) -->\n(.*?)\n\n", style, re.S)
    return set(re.findall(r"`(\w+)`", locals_)), {
        word for row in re.findall(r"^\| ([a-z, ]+) \|", words, re.M)[1:] for word in row.split(", ")
    }


@functools.cache
def defined_names() -> list[tuple[Path, str, bool]]:
    """(file, name, whether it is a local or a parameter) of everything that the package gives a name, each time."""
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append((file, node.name, False))
            elif isinstance(node, ast.arg):
                found.append((file, node.arg, True))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.append((file, node.id, True))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.append((file, node.attr, False))
    return found


def vague_locals() -> list[tuple[Path, str]]:
    """Locals and parameters that docs/style.md lists, each time one is bound."""
    listed, _ = words_not_used()
    return [(file, name) for file, name, is_local in defined_names() if is_local and name in listed]


def household_names() -> list[tuple[Path, str]]:
    """Names with a word that docs/style.md lists as not of this trade."""
    _, words = words_not_used()
    return [
        (file, name)
        for file, name, _ in defined_names()
        if words & {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)}
    ]


_GENERIC = {"result", "item", "value", "data", "thing", "obj", "tmp", "entry"}


def generic_per_thousand_lines() -> float:
    """Locals and parameters called ``result``, ``item`` and the like, in 1,000 lines of code."""
    return 1000 * sum(is_local and name in _GENERIC for _, name, is_local in defined_names()) / lines_of_code()


def figures() -> dict[str, float]:
    """The counts that `make house` prints."""
    docs = PACKAGE.parent / "docs"
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "lines": lines_of_code(),
        "page_and_templates": lines_of_page_and_templates(),
        "keys": len(re.findall(r"^\| `", (docs / "configuration.md").read_text(encoding="utf-8"), re.M)),
        "options": len(re.findall(r"^\| `--", (docs / "cli.md").read_text(encoding="utf-8"), re.M)),
        "dependencies": len(project["dependencies"]),
        "protocols": len(protocols()),
        "vague_locals": len(vague_locals()),
        "household_names": len(household_names()),
        "generic_locals_per_1000_lines": round(generic_per_thousand_lines(), 2),
    }


if __name__ == "__main__":
    for name, count in figures().items():
        print(f"{name.replace('_', ' '):30} {count:7,}")
    print(json.dumps(figures()))

"""``docs/renames.md``, written from two commits: what files, keys, options and names of before are called now.

python -m docs.write_renames [COMMIT] > docs/renames.md

COMMIT is the one before (`BEFORE`); now is the working tree. What can't be read from the two, a new name for an old one
say, stands in ``docs/renames.json``: table -> old name -> new name, or why it went.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from headway.config.removed import replacement_of

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "59553bb85096b08528862fefbb002271ef440fe3"  # the last commit whose names texts of November 2026 use
NOTES = Path(__file__).with_suffix("").with_name("renames.json")
_FOLDERS = ("headway", "benchmarks", "docs", "examples")
_INTRODUCTION = """\
# Renames

<!-- Written by `python -m docs.write_renames > docs/renames.md`; edit docs/renames.json instead. -->

Texts from before December 2026 name files, keys, options and names as they stood then. This is what they are called
now. `headway check` says the same of a key in an experiment file.
"""
_ROW = re.compile(r"^\| `([\w.*-]+)`", re.M)
_METRIC = re.compile(r"\"([a-z_]+/[a-z_]+)\"")
_OPTION = re.compile(r"^\| `(--[\w-]+)", re.M)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _then(commit: str, path: str) -> str:
    return _git("show", f"{commit}:{path}")


def _now(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _moved_files(commit: str) -> dict[str, str]:
    """Old path -> new path of each file that moved; "" for one that went."""
    found: dict[str, str] = {}
    for line in _git("diff", "--find-renames=40%", "--name-status", commit, "--", *_FOLDERS).splitlines():
        status, old, *new = line.split("\t")
        if status[0] in "RD":
            found[old] = new[0] if new else ""
    return found


def _keys(page: str) -> set[str]:
    """``section.key`` of all rows of docs/configuration.md."""
    found: set[str] = set()
    for part in page.split("\n## ")[1:]:
        sections = re.findall(r"`\[([\w.]+)\]`", part.splitlines()[0])
        found |= {f"{section}.{key}" for section in sections for key in _ROW.findall(part)}
    return found


def _instead(key: str) -> str:
    """What stands in a key's place; keys of tables with names are rows without the name."""
    *sections, name = key.split(".")
    return replacement_of([*sections, name]) or replacement_of([*sections, "NAME", name])


def _options(page: str) -> set[str]:
    """``command --option`` of all rows of docs/cli.md."""
    found: set[str] = set()
    for part in page.split("\n## ")[1:]:
        command = part.splitlines()[0].strip("`")
        found |= {f"{command} {option}" for option in _OPTION.findall(part)}
    return found


def _fields(source: str) -> set[str]:
    """``Class.field`` of all records in a module."""
    return {
        f"{node.name}.{item.target.id}"
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _public(source: str) -> set[str]:
    """Public classes and functions of a module."""
    nodes = (node for node in ast.parse(source).body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return {node.name for node in nodes if not node.name.startswith("_")}


def _moved_names(commit: str, files: Mapping[str, str]) -> dict[str, str]:
    """``module:name`` of each public class or function that stands elsewhere now, or nowhere ("")."""
    paths = _git("ls-tree", "-r", "--name-only", commit, "headway").splitlines()
    modules = [path for path in paths if path.endswith(".py")]
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "headway").rglob("*.py")):
        for name in _public(path.read_text(encoding="utf-8")):
            homes.setdefault(name, []).append(_dotted(str(path.relative_to(ROOT))))
    found: dict[str, str] = {}
    for path in modules:
        here = _dotted(files.get(path, path) or path)
        for name in _public(_then(commit, path)) if "/templates/" not in path else ():
            if here not in homes.get(name, []):
                new = [home for home in homes.get(name, []) if home not in map(_dotted, modules)] or homes.get(name, [])
                found[f"{_dotted(path)}:{name}"] = f"{new[0]}:{name}" if len(new) == 1 else ""
    return found


def _dotted(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def _table(title: str, found: Mapping[str, str], notes: Mapping[str, str]) -> Iterator[str]:
    rows = {**found, **notes}
    if rows:
        yield f"\n## {title}\n\n| before | now |\n| --- | --- |"
        yield from (f"| `{old}` | {_shown(new)} |" for old, new in sorted(rows.items()))


def _shown(new: str) -> str:
    if not new:
        return "gone"
    text = new.replace("|", "\\|")
    return f"`{text}`" if " " not in text else text


def renames(commit: str) -> str:
    """The page in Markdown. Raises subprocess.CalledProcessError where ``commit`` isn't known."""
    notes: dict[str, dict[str, str]] = json.loads(NOTES.read_text(encoding="utf-8"))
    then = partial(_then, commit)
    files = _moved_files(commit)
    keys = _keys(then("docs/configuration.md")) - _keys(_now("docs/configuration.md"))
    options = _options(then("docs/cli.md")) - _options(_now("docs/cli.md"))
    records, metrics = "headway/records/ledger.py", "headway/telemetry/metrics.py"
    fields = _fields(then(records)) - _fields(_now(records))
    names = set(_METRIC.findall(then(metrics))) - set(_METRIC.findall(_now(metrics)))
    tables: dict[str, Mapping[str, str]] = {
        "Files": files,
        "Keys": {key: _instead(key) for key in keys},
        "Options": dict.fromkeys(options, ""),
        "Fields of the ledger's lines": dict.fromkeys(fields, ""),
        "Metrics": dict.fromkeys(names, ""),
        "Classes and functions": _moved_names(commit, files),
    }
    tables |= {title: {} for title in notes if title not in tables}
    parts = [line for title, found in tables.items() for line in _table(title, found, notes.get(title, {}))]
    return _INTRODUCTION + "\n".join(parts)


if __name__ == "__main__":
    print(renames(*(sys.argv[1:2] or [BEFORE])))

"""The files, functions, links and make targets that the pages for people name exist."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in FRONT)]
FOREIGN = {  # files of users and of other programs, named as examples
    "my_agent.py",
    "my_hooks.py",
    "demo.py",
    "test_demo.py",
    "letters.py",
    "test_letters.py",
    "sitecustomize.py",
    "instruction.md",
    "train_async.py",
    "model_executor/kernels/linear/scaled_mm/cpu.py",
}
FOLDERS = ("headway", "tests", "docs", "benchmarks", "examples", ".agents")
TREE = [file for part in FOLDERS for file in (ROOT / part).rglob("*.*")]
OURS = {file.relative_to(ROOT).as_posix() for file in [*TREE, *ROOT.glob("*.md")] if "__pycache__" not in file.parts}
ENDINGS = {name.split("/", depth)[-1] for name in OURS for depth in range(name.count("/") + 1)}
NAMED = re.compile(r"(?<![\w./-])([\w./-]*\w\.(?:py|cpp|h|md))(?![\w/])(?::([A-Za-z_][\w.]*))?")
DOTTED = re.compile(r"\b(headway(?:\.\w+)+)(?::([A-Za-z_]\w*))?")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    text = prose(page)
    if page.name == "renames.md":
        text = re.sub(r"^\| `[^`\n]+` ", "", text, flags=re.MULTILINE)  # names of before
    return re.findall(r"`([^`\n]+)`", text)


@functools.cache
def names_in(file: Path) -> set[str]:
    """Functions, classes and variables of a module, and ``Class.member``."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found


def files_called(name: str) -> list[Path]:
    return [ROOT / file for file in OURS if file == name or file.endswith("/" + name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_named_on_a_page_exist(page: Path):
    missing = []
    for code in inline_code(page):
        for name, member in NAMED.findall(code):
            if name in FOREIGN:
                continue
            if name not in ENDINGS:
                missing.append(name)
            elif member and not any(member in names_in(file) for file in files_called(name)):
                missing.append(f"{name}:{member}")
        for module, member in DOTTED.findall(code):
            file = ROOT / (module.replace(".", "/") + ".py")
            if not (file.is_file() or file.with_suffix("").is_dir()) or (member and member not in names_in(file)):
                missing.append(f"{module}:{member}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_of_a_page_lead_somewhere(page: Path):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_make_help_names_every_target_of_readme_and_contributing():
    helped = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^make ([\w-]+)", helped, re.MULTILINE))
    for name in ("CONTRIBUTING.md", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)) - {"help"}
        assert named, name
        assert named - targets == set(), name


def test_install_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## Extras")[2].partition("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`([\w-]+)`", cells)) == set(project["optional-dependencies"])


def test_index_and_menu_list_every_page():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [name for name in sorted(names) if f"({name}" not in index] == []
    assert [name for name in sorted(names) if not re.search(rf": {re.escape(name)}$", menu, re.MULTILINE)] == []
    assert "(docs/index.md)" in readme

"""A user's own functions by name: what can't be had is named, and looking for a module imports nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_class, import_function, require_module

KNOWN = ("alpha", "beta")


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Modules in the working directory, which is not on the path: as for an installed command."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "functions.py").write_text("def double(x):\n    return 2 * x\nasync def later(x):\n    return x\n")
    (package / "quits.py").write_text("import sys\nsys.exit(3)\n")
    (package / "broken.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    yield
    for name in [name for name in sys.modules if name == "mine" or name.startswith("mine.")]:
        del sys.modules[name]


def test_a_function_in_the_working_directory(own_modules: None) -> None:
    assert import_function("mine.functions:double", "section.key", KNOWN)(21) == 42
    assert import_function("pathlib:Path.cwd", "section.key", KNOWN)() == Path.cwd()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alfa", "is unknown; did you mean 'alpha'? valid: alpha, beta or module:function"),
        (":f", "expected module:function; valid: alpha, beta or module:function"),
        ("mine:", "expected module:function"),
        ("nowhere.at_all:f", "nowhere.at_all can't be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("mine.quits:f", "mine.quits can't be imported: SystemExit: 3"),
        ("mine.broken:f", "mine.broken can't be imported: SyntaxError"),
        ("mine.functions:doubel", "mine.functions has no 'doubel'; did you mean 'double'? valid: alpha"),
        ("mine.functions:later", "must be a plain function"),
    ],
)
def test_what_cannot_be_had_is_named(own_modules: None, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        import_function(name, "section.key", KNOWN)
    assert str(caught.value).startswith(f"section.key = {name!r}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere:Class",
            r"No module named 'nowhere' \(nor in the working directory: .* the folder that has nowhere.py",
        ),
        ("mine.functions:Class", "mine.functions has no 'Class'; valid: module:Class$"),
        ("mine", "is unknown; valid: module:Class$"),
        ("mine:", "expected module:Class; "),
    ],
)
def test_a_class_is_asked_for_where_one_is_needed(own_modules: None, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        import_class(name, "section.key", object)


@pytest.mark.parametrize("name", ["mine.broken:f", "mine:f", "json.decoder:f", "sys:f"])
def test_a_module_that_is_there(own_modules: None, name: str) -> None:
    require_module(name, "section.key", KNOWN)


@pytest.mark.parametrize("name", ["mine.missing:f", "nowhere:f", "nowhere.at_all:f", "mine.functions.deeper:f"])
def test_a_module_that_is_not(own_modules: None, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"section.key = '{name}': there is no module"):
        require_module(name, "section.key", KNOWN)


def test_looking_for_a_module_imports_not_even_its_package() -> None:
    code = (
        "import sys; from headway.runtime.imports import require_module; "
        "require_module('xml.dom.minidom:parse', 'k', ()); print([m for m in sys.modules if m.startswith('xml')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_every_installation_gets_is_imported_somewhere() -> None:
    root = Path(__file__).parents[3]
    wanted = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    code = "\n".join(file.read_text(encoding="utf-8") for file in (root / "headway").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.M))
    modules = {re.split(r"[^\w.-]", name)[0].replace("-", "_") for name in wanted}
    assert modules - imported == set(), "imported nowhere in headway: move it to an extra"

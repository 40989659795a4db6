"""Faults in one module's text, planted in copies of the checkout and run against its tests.

A fault is caught when a test fails with it, fails with it again on its own, and passes without it: a test that is
broken or fails at times catches nothing. Checks of the text of the sources (their style, their docs) don't count.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 22
LIMIT_S = 900.0  # of one run of tests; a hanging test ends before, by its own limit

FAST = ("tests/unit", "tests/golden")
OF_TEXT = ("tests/unit/house", "tests/unit/docs")  # they see that a line has changed, not what it does
ENGINES = ("test_vllm_*", "test_mini_swe_agent*")  # need environments of their own


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one module's text."""

    module: str
    start: int  # characters of the module's text before the change
    line: int
    before: str  # the text that is replaced
    after: str
    what: str
    function: str = ""  # the qualified name of the innermost function or class around it

    def planted(self, text: str) -> str:
        """``text`` of the module with the fault in it. Raises ValueError where ``before`` isn't there."""
        if not text.startswith(self.before, self.start):
            raise ValueError(f"{self.module}:{self.line} has no {self.before!r}")
        return text[: self.start] + self.after + text[self.start + len(self.before) :]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.what}: {self.before!r} -> {self.after!r}"


_OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.And: "or",
    ast.Or: "and",
}


def drawable(module: str, root: Path = ROOT) -> Iterator[Fault]:
    """Every fault that can be drawn from ``module``: another comparison, operator or connective, or a negation less."""
    text = (root / module).read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.split("\n")
    around = dict(_around(tree, ""))

    def position(line: int, column: int) -> int:
        return sum(len(one) + 1 for one in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())

    def source(node: ast.expr) -> tuple[int, str]:
        start = position(node.lineno, node.col_offset)
        return start, text[start : position(node.end_lineno or node.lineno, node.end_col_offset or 0)]

    def fault(node: ast.expr, after: str, what: str) -> Fault:
        start, before = source(node)
        if not _holds(before, node):
            raise ValueError(f"{module}:{node.lineno} isn't where the parser says: {before!r}")
        return Fault(
            module=module,
            start=start,
            line=node.lineno,
            before=before,
            after=after,
            what=what,
            function=around[node],
        )

    inside_text = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if node in inside_text and isinstance(node, ast.expr) and not _holds(source(node)[1], node):
            continue  # Python 3.11 doesn't always say where in an f-string an expression stands
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield fault(node, f"({left} {_OTHER[type(node.ops[0])]} {right})", "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER and not _is_text(node):
            yield fault(
                node, f"({ast.unparse(node.left)} {_OTHER[type(node.op)]} {ast.unparse(node.right)})", "operator"
            )
        elif isinstance(node, ast.BoolOp):
            other = f" {_OTHER[type(node.op)]} "
            yield fault(node, f"({other.join(f'({ast.unparse(value)})' for value in node.values)})", "connective")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield fault(node, f"({ast.unparse(node.operand)})", "negation")


def found_once(module: str, before: str, after: str, what: str, root: Path = ROOT) -> Fault:
    """The fault that puts ``after`` for ``before``. Raises ValueError where that has no place, or several."""
    text = (root / module).read_text(encoding="utf-8")
    if text.count(before) != 1:
        raise ValueError(f"{module} has {before!r} {text.count(before)} times; once is needed")
    start = text.index(before)
    return Fault(module=module, start=start, line=text[:start].count("\n") + 1, before=before, after=after, what=what)


def _holds(text: str, node: ast.expr) -> bool:
    try:
        return ast.dump(ast.parse(f"({text})", mode="eval").body) == ast.dump(node)
    except SyntaxError:
        return False


def _around(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """Every node below ``node`` with the qualified name of the innermost function or class around it."""
    for child in ast.iter_child_nodes(node):
        yield child, name
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}" if name else child.name
        yield from _around(child, inner)


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a string or a type: joined texts and unions of types aren't arithmetic."""
    return any(isinstance(part, (ast.Constant, ast.JoinedStr)) and not _is_number(part) for part in ast.walk(node))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One run of tests."""

    code: int | None  # of pytest; None: over the limit
    failed: list[str]  # names of tests, as pytest takes them; empty where pytest itself didn't end
    said: str


class NoTests(Exception):
    """Tests can't be run: this is neither a caught fault nor a survivor."""


def run_tests(
    copy: Path, tests: Sequence[str], *, without: Sequence[str] = (), stop: bool = True, limit_s: float = LIMIT_S
) -> Ended:
    """Run ``tests`` of the checkout ``copy`` (up to the first failure), with its ``headway`` in every process."""
    remembered = copy / ".pytest_cache/v/cache/lastfailed"
    remembered.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:xdist", f"--hypothesis-seed={SEED}"]
    command += ["-x"] if stop else []
    command += [part for test in without for part in ("--deselect", test)]
    env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = started.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # and what its tests have left
        started.wait()
        output.seek(0)
        said = output.read()[-2000:]
    if code in (4, 5):  # usage; no tests
        raise NoTests(f"pytest {' '.join(tests[:3])} ... ended with {code}: {said}")
    failed = list(json.loads(remembered.read_text())) if code and remembered.exists() else []
    return Ended(code=code, failed=failed, said=said)


@dataclass
class Clean:
    """A checkout without a fault, and which tests are known to pass in it."""

    folder: Path
    known: dict[str, bool] = field(default_factory=dict)
    passed: Callable[[str], bool] = lambda test: False  # in another run; False: not known

    def passes(self, test: str) -> bool:
        if test not in self.known:
            self.known[test] = self.passed(test) or run_tests(self.folder, [test]).code == 0
        return self.known[test]


def copied(folder: Path, source: Path = ROOT) -> Path:
    """A copy of the checkout ``source`` in ``folder``. Raises NoTests where another ``headway`` would be imported."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", ".*_cache", ".hypothesis")
    shutil.copytree(source, folder, ignore=ignored, symlinks=True)
    asked = [sys.executable, "-c", "import headway; print(headway.__file__)"]
    place = subprocess.run(
        asked, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    if Path(place.stdout.strip()) != folder / "headway/__init__.py":
        raise NoTests(f"headway of {folder} isn't imported, but {place.stdout}{place.stderr}")
    return folder


def files_for(module: str, folders: Sequence[str], root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Files of tests for a fault in ``module``: those in ``folders``, and the other fast ones. In both, those that name
    the module come first."""
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    named = re.compile(rf"{re.escape(package)}\.{name}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    files: list[Path] = []
    for path in sorted(path for folder in FAST for path in (root / folder).rglob("test_*.py")):
        of_text = any(path.is_relative_to(root / folder) for folder in OF_TEXT)
        if not of_text and not any(path.match(pattern) for pattern in ENGINES):
            files.append(path)
    files.sort(key=lambda path: named.search(path.read_text(encoding="utf-8")) is None)
    own = [path for path in files if any(path.is_relative_to(root / folder) for folder in folders)]
    rest = [path for path in files if path not in own]
    return [str(path.relative_to(root)) for path in own], [str(path.relative_to(root)) for path in rest]


def catcher(faulty: Path, clean: Clean, tests: Sequence[str]) -> str | None:
    """The first of ``tests`` that fails in ``faulty``, each time, and passes in ``clean``; None: all pass."""
    first: int | None = None
    discounted = [test for test, passed in clean.known.items() if not passed]
    while (ended := run_tests(faulty, tests, without=discounted)).code != 0:
        if not ended.failed:  # pytest died, or was over the limit: once may be the machine's doing
            first, ended = ended.code, run_tests(faulty, tests, without=discounted)
            if ended.code == 0:
                print(f"doesn't count: pytest ended with {first}, and not again", flush=True)
                return None
        if not ended.failed:
            if ended.code != first or run_tests(clean.folder, tests, without=discounted).code != 0:
                raise NoTests(f"pytest ended with {first} and {ended.code}, or without the fault too: {ended.said}")
            return f"pytest's end with {first}" if first is not None else f"the limit of {LIMIT_S:.0f} s"
        test = ended.failed[0]
        if clean.passes(test) and run_tests(faulty, [test]).code != 0:
            return test
        if test in discounted:
            raise NoTests(f"{test} fails with the fault and without it: {ended.said}")
        print(f"doesn't count: {test} fails without the fault too, or at times", flush=True)
        discounted.append(test)
    return None


def catcher_of(fault: Fault, clean: Clean, tests: Sequence[Sequence[str]]) -> str | None:
    """The first test that catches ``fault``, planted in a copy of ``clean``; one list of ``tests`` after another."""
    with tempfile.TemporaryDirectory(prefix="headway-mutation-") as folder:
        faulty = copied(Path(folder) / "headway", clean.folder)
        target = faulty / fault.module
        target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        return next((test for some in tests if some and (test := catcher(faulty, clean, some)) is not None), None)

"""Faults planted one at a time in the rules that must hold, and whether the tests catch them.

``python tests/support/mutations.py`` plants 15 chosen and 15 drawn faults in copies of the checkout. Each runs against
the unit tests of its package, those that name its module first; what survives runs against the rest of the fast tests.
A fault is caught when a test fails with it, fails with it again on its own, and passes without it: a test that is
broken or fails at times catches nothing. Checks of the text of the sources (their style, their docs) don't count.

Prints a line for each and, last, one JSON object: ``caught``, ``planted``, ``survivors``, ``minutes`` and
``cpu_minutes``, those of the tests. ``--list`` shows the faults without running them, ``--only TEXT`` runs those whose
place holds the text. Exit code: 1 where more than one of 15 survives, 2 where tests can't be run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 22
DRAWN = 15
LIMIT_S = 900.0  # of one run of tests; a hanging test ends before, by its own limit

FAST = ("tests/unit", "tests/golden")
OF_TEXT = ("tests/unit/house", "tests/unit/docs")  # they see that a line has changed, not what it does
ENGINES = ("test_vllm_*", "test_mini_swe_agent*")  # need environments of their own

# Modules that faults are drawn from, with the folders of tests that a fault in each runs against first.
MODULES = {
    "headway/control/admission.py": "tests/unit/control",
    "headway/control/staleness.py": "tests/unit/control",
    "headway/buffer/store.py": "tests/unit/buffer",
    "headway/buffer/rows.py": "tests/unit/buffer",
    "headway/orchestrator/recovery.py": "tests/unit/orchestrator",
    "headway/algorithms/packing.py": "tests/unit/algorithms",
    "headway/algorithms/samples.py": "tests/unit/algorithms",
    "headway/algorithms/aggregation.py": "tests/unit/algorithms",
    "headway/trainer/losses.py": "tests/unit/trainer tests/golden",
    "headway/generator/recording/recorder.py": "tests/unit/generator",
    "headway/generator/recording/answer_tree.py": "tests/unit/generator",
    "headway/sandbox/linux/cgroups.py": "tests/unit/sandbox",
    "headway/sandbox/pool.py": "tests/unit/sandbox",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one module's text."""

    module: str
    start: int  # characters of the module's text before the change
    line: int
    before: str  # the text that is replaced
    after: str
    what: str

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


def drawable(module: str) -> Iterator[Fault]:
    """Every fault that can be drawn from ``module``: another comparison, operator or connective, or a negation less."""
    text = (ROOT / module).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)

    def fault(node: ast.expr, after: str, what: str) -> Fault:
        before = ast.get_source_segment(text, node) or ""
        if ast.dump(ast.parse(f"({before})", mode="eval").body) != ast.dump(node):
            raise ValueError(f"{module}:{node.lineno} isn't where the parser says: {before!r}")
        column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
        start = sum(map(len, lines[: node.lineno - 1])) + column
        return Fault(module=module, start=start, line=node.lineno, before=before, after=after, what=what)

    for node in ast.walk(ast.parse(text)):
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


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a string or a type: joined texts and unions of types aren't arithmetic."""
    return any(isinstance(part, (ast.Constant, ast.JoinedStr)) and not _is_number(part) for part in ast.walk(node))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def drawn() -> list[Fault]:
    """`DRAWN` faults, the modules in turn, by a fixed seed."""
    chance, modules, found = random.Random(SEED), sorted(MODULES), list[Fault]()
    chance.shuffle(modules)
    while len(found) < DRAWN:
        module = modules[len(found) % len(modules)]
        candidates = [fault for fault in drawable(module) if fault not in found]
        found.append(chance.choice(candidates))
    return found


def chosen() -> list[Fault]:
    """Faults that somebody might really make, by module. Raises ValueError where one has no place, or several."""
    faults: list[Fault] = []
    for module, before, after, what in CHOSEN:
        text = (ROOT / module).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"{module} has {before!r} {text.count(before)} times; once is needed")
        start = text.index(before)
        line = text[:start].count("\n") + 1
        faults.append(Fault(module=module, start=start, line=line, before=before, after=after, what=what))
    return faults


CHOSEN: tuple[tuple[str, str, str, str], ...] = (
    (
        "headway/control/admission.py",
        "(applied_version + budget + 1 - completed_steps)",
        "(applied_version + budget + 2 - completed_steps)",
        "admits one step's groups too many",
    ),
    (
        "headway/control/admission.py",
        "room + surplus_groups - open_groups",
        "room - open_groups",
        "surplus is never admitted",
    ),
    ("headway/control/staleness.py", "if staleness > budget:", "if staleness > budget + 1:", "trains over the budget"),
    (
        "headway/control/staleness.py",
        "version - environment_version <= limit",
        "version - environment_version < limit",
        "an environment state ends one version early",
    ),
    (
        "headway/buffer/store.py",
        """        if outcome == "trained":
            self._completed_steps = step + 1""",
        """        if outcome:
            self._completed_steps = step + 1""",
        "a skipped step makes a version",
    ),
    (
        "headway/buffer/store.py",
        "step >= ? AND step < ? AND outcome = 'trained'",
        "step >= ? AND step <= ? AND outcome = 'trained'",
        "releases a step that no checkpoint covers",
    ),
    (
        "headway/buffer/store.py",
        """            if entry.parked:
                delete_partials(connection, index)""",
        """            if not entry.parked:
                delete_partials(connection, index)""",
        "partial rollouts outlive their group",
    ),
    (
        "headway/orchestrator/recovery.py",
        "for logged in run.buffer.batches_since(version):",
        "for logged in run.buffer.batches_since(version + 1):",
        "the replay leaves a step out",
    ),
    (
        "headway/orchestrator/run.py",
        "state.version = run.buffer.completed_steps",
        "state.version = run.buffer.completed_steps + 1",
        "a resumed run counts a version too many",
    ),
    (
        "headway/algorithms/packing.py",
        "room = [b for b, load in enumerate(loads) if load + length <= budget]",
        "room = [b for b, load in enumerate(loads) if load <= budget]",
        "a micro-batch holds more tokens than the budget",
    ),
    (
        "headway/algorithms/aggregation.py",
        "max_response_tokens)\n    return",
        "tokens_s.max())\n    return",
        "the fixed divisor depends on sampled lengths",
    ),
    (
        "headway/trainer/losses.py",
        "torch.maximum(free_m, bounded_m)",
        "torch.minimum(free_m, bounded_m)",
        "clipping takes the wrong side",
    ),
    (
        "headway/trainer/losses.py",
        "weight_m.clamp(max=settings.behaviour_weight_cap)",
        "weight_m.clamp(min=settings.behaviour_weight_cap)",
        "the importance weight isn't truncated",
    ),
    (
        "headway/generator/recording/answer_tree.py",
        "learned=turn.received",
        "learned=True",
        "tokens that no client got carry loss",
    ),
    (
        "headway/sandbox/linux/cgroups.py",
        'V2: {"memory.max": memory_bytes, "memory.swap.max": 0,',
        'V2: {"memory.max": "max", "memory.swap.max": "max",',
        "a sandbox has all of the machine's memory",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One run of tests."""

    code: int | None  # of pytest; None: over the limit
    failed: list[str]  # names of tests, as pytest takes them; empty where pytest itself didn't end
    said: str


class NoTests(Exception):
    """Tests can't be run: this is neither a caught fault nor a survivor."""


def run_tests(copy: Path, tests: Sequence[str], *, without: Sequence[str] = ()) -> Ended:
    """Run ``tests`` of the checkout ``copy`` up to the first failure, with its ``headway`` in every process."""
    remembered = copy / ".pytest_cache/v/cache/lastfailed"
    remembered.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:xdist", f"--hypothesis-seed={SEED}"]
    command += [part for test in without for part in ("--deselect", test)]
    env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = started.wait(LIMIT_S)
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


def copied(folder: Path) -> Path:
    """A copy of the checkout in ``folder``. Raises NoTests where its processes would import another ``headway``."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
    asked = [sys.executable, "-c", "import headway; print(headway.__file__)"]
    place = subprocess.run(
        asked, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    if Path(place.stdout.strip()) != folder / "headway/__init__.py":
        raise NoTests(f"headway of {folder} isn't imported, but {place.stdout}{place.stderr}")
    return folder


def files_for(module: str) -> tuple[list[str], list[str]]:
    """Files of tests for a fault in ``module``: those of its package, and the other fast ones. In both, those that name
    the module come first."""
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    named = re.compile(rf"{re.escape(package)}\.{name}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    files: list[Path] = []
    for path in sorted(path for folder in FAST for path in (ROOT / folder).rglob("test_*.py")):
        of_text = any(path.is_relative_to(ROOT / folder) for folder in OF_TEXT)
        if not of_text and not any(path.match(pattern) for pattern in ENGINES):
            files.append(path)
    files.sort(key=lambda path: named.search(path.read_text(encoding="utf-8")) is None)
    own = [path for path in files if any(path.is_relative_to(ROOT / folder) for folder in MODULES[module].split())]
    rest = [path for path in files if path not in own]
    return [str(path.relative_to(ROOT)) for path in own], [str(path.relative_to(ROOT)) for path in rest]


def catcher(faulty: Path, clean: Path, tests: Sequence[str]) -> str | None:
    """The first of ``tests`` that fails in ``faulty``, each time, and passes in ``clean``; None: all pass."""
    first: int | None = None
    discounted: list[str] = []
    while (ended := run_tests(faulty, tests, without=discounted)).code != 0:
        if not ended.failed:  # pytest died, or was over the limit: once may be the machine's doing
            first, ended = ended.code, run_tests(faulty, tests, without=discounted)
            if ended.code == 0:
                print(f"doesn't count: pytest ended with {first}, and not again", flush=True)
                return None
        if not ended.failed:
            if ended.code != first or run_tests(clean, tests, without=discounted).code != 0:
                raise NoTests(f"pytest ended with {first} and {ended.code}, or without the fault too: {ended.said}")
            return f"pytest's end with {first}" if first is not None else f"the limit of {LIMIT_S:.0f} s"
        test = ended.failed[0]
        if run_tests(clean, [test]).code == 0 and run_tests(faulty, [test]).code != 0:
            return test
        if test in discounted:
            raise NoTests(f"{test} fails with the fault and without it: {ended.said}")
        print(f"doesn't count: {test} fails without the fault too, or at times", flush=True)
        discounted.append(test)
    return None


def verdict(fault: Fault, clean: Path) -> tuple[bool, str]:
    """Whether the tests catch ``fault``, and the line that says so."""
    with tempfile.TemporaryDirectory(prefix="headway-mutation-") as folder:
        faulty = copied(Path(folder) / "headway")
        target = faulty / fault.module
        target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        for tests in files_for(fault.module):
            test = catcher(faulty, clean, tests)
            if test is not None:
                return True, f"caught: {fault} by {test}"
    return False, f"SURVIVED: {fault}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--list", action="store_true", help="show the faults and stop")
    options.add_argument("--only", default="", metavar="TEXT", help="run those whose module:line holds the text")
    options.add_argument("--at-once", type=int, default=2, help="faults that are tried at a time, a core for each")
    arguments = options.parse_args()
    faults = [fault for fault in [*chosen(), *drawn()] if arguments.only in f"{fault.module}:{fault.line}"]
    if arguments.list:
        print("\n".join(map(str, faults)))
        return 0
    began = time.monotonic()
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-no-mutation-") as folder:
        clean = copied(Path(folder) / "headway")
        with ThreadPoolExecutor(arguments.at_once) as several:
            try:
                for fault, (died, line) in zip(
                    faults, several.map(lambda fault: verdict(fault, clean), faults), strict=True
                ):
                    print(line, flush=True)
                    if not died:
                        survivors.append(f"{fault.module}:{fault.line}")
            except NoTests as error:
                several.shutdown(cancel_futures=True)
                print(f"error: {error}", file=sys.stderr)
                return 2
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "caught": len(faults) - len(survivors),
        "planted": len(faults),
        "survivors": survivors,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "cpu_minutes": round((used.ru_utime + used.ru_stime) / 60, 1),
    }
    print(json.dumps(figures))
    return 1 if len(survivors) > len(faults) // 15 else 0


if __name__ == "__main__":
    sys.exit(main())

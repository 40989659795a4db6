"""Faults planted one at a time in the rules that must hold, and whether the tests catch them.

``python tests/support/mutations.py`` plants 15 chosen and 15 drawn faults in copies of the checkout. Each runs against
the unit tests of its package; what survives them runs against all fast tests. A copy without a fault has to pass
first. Prints a line for each and, last, one JSON object: ``caught``, ``planted``, ``survivors``, ``minutes``,
``cpu_minutes``. ``--list`` shows the faults without running them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 22
DRAWN = 15
LIMIT_S = 900.0  # of one run of tests: a fault that hangs them is caught

# Modules that faults are drawn from, with the tests that a fault in each runs against first.
MODULES = {
    "headway/control/admission.py": "tests/unit/control",
    "headway/control/staleness.py": "tests/unit/control",
    "headway/buffer/store.py": "tests/unit/buffer",
    "headway/buffer/rows.py": "tests/unit/buffer",
    "headway/orchestrator/recovery.py": "tests/unit/orchestrator",
    "headway/algorithms/packing.py": "tests/unit/algorithms",
    "headway/algorithms/samples.py": "tests/unit/algorithms",
    "headway/algorithms/aggregation.py": "tests/unit/algorithms",
    "headway/trainer/losses.py": "tests/golden",
    "headway/generator/recording/recorder.py": "tests/unit/generator",
    "headway/generator/recording/answer_tree.py": "tests/unit/generator",
    "headway/sandbox/linux/cgroups.py": "tests/unit/sandbox",
    "headway/sandbox/pool.py": "tests/unit/sandbox",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one module's text."""

    module: str
    line: int
    before: str  # the text that is replaced, once
    after: str
    what: str

    def planted(self, text: str) -> str:
        """``text`` of the module with the fault in it. Raises ValueError where ``before`` isn't there."""
        lines = text.split("\n")
        start = sum(len(line) + 1 for line in lines[: self.line - 1])
        position = text.find(self.before, start)
        if position < 0:
            raise ValueError(f"{self.module}:{self.line} has no {self.before!r}")
        return text[:position] + self.after + text[position + len(self.before) :]


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
    """Every fault that can be drawn from ``module``: another comparison, operator, connective or integer."""
    text = (ROOT / module).read_text(encoding="utf-8")

    def fault(node: ast.expr, after: str, what: str) -> Fault:
        return Fault(
            module=module, line=node.lineno, before=ast.get_source_segment(text, node) or "", after=after, what=what
        )

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
    """Faults that somebody might really make, by module."""
    return [
        Fault(module=module, line=_line_of(module, before), before=before, after=after, what=what)
        for module, before, after, what in CHOSEN
    ]


def _line_of(module: str, before: str) -> int:
    text = (ROOT / module).read_text(encoding="utf-8")
    if text.count(before) != 1:
        raise ValueError(f"{module} has {before!r} {text.count(before)} times; once is needed")
    return text[: text.index(before)].count("\n") + 1


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
                self._delete_partials(connection, index)""",
        """            if not entry.parked:
                self._delete_partials(connection, index)""",
        "partial rollouts outlive their group",
    ),
    (
        "headway/orchestrator/recovery.py",
        "for logged in run.buffer.batches_since(version):",
        "for logged in run.buffer.batches_since(version + 1):",
        "the replay leaves a step out",
    ),
    (
        "headway/orchestrator/recovery.py",
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
        '_put(group + "memory.max", str(memory_bytes))',
        '_put(group + "memory.max", "max")',
        "a sandbox has all of the machine's memory",
    ),
)


def caught(fault: Fault | None, tests: list[str], processes: int) -> bool:
    """Whether ``tests`` fail on a copy of the checkout with ``fault`` in it; None: without any."""
    with tempfile.TemporaryDirectory(prefix="headway-mutation-") as folder:
        copy = Path(folder) / "headway"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv*", "runs", ".*_cache", ".hypothesis"),
            symlinks=True,
        )
        if fault is not None:
            target = copy / fault.module
            target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--numprocesses", str(processes), "--dist", "loadfile"] if processes > 1 else ["-p", "no:xdist"]
        try:
            ended = subprocess.run(
                command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return True
        return ended.returncode != 0


def _cpu_s() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--list", action="store_true", help="show the faults and stop")
    arguments = options.parse_args()
    faults = [*chosen(), *drawn()]
    if arguments.list:
        for fault in faults:
            print(f"{fault.module}:{fault.line} {fault.what}: {fault.before!r} -> {fault.after!r}")
        return 0
    if caught(None, ["tests/unit", "tests/golden"], 2):
        print("the fast tests fail without any fault: mend them first (make test-fast)", file=sys.stderr)
        return 2
    began, cpu_s = time.monotonic(), _cpu_s()
    survivors: list[str] = []
    with ThreadPoolExecutor(2) as two:  # one for each core
        found = list(two.map(lambda fault: caught(fault, [MODULES[fault.module]], 1), faults))
    for fault, died in zip(faults, found, strict=True):
        where = "its package's tests"
        if not died:
            died, where = caught(fault, ["tests/unit", "tests/golden"], 2), "the fast tests"
        if not died:
            survivors.append(f"{fault.module}:{fault.line}")
        verdict = f"caught by {where}" if died else "SURVIVED"
        print(f"{verdict}: {fault.module}:{fault.line} {fault.what}: {fault.before!r} -> {fault.after!r}", flush=True)
    minutes = (time.monotonic() - began) / 60
    figures = {"caught": len(faults) - len(survivors), "planted": len(faults), "survivors": survivors}
    spent = {"minutes": round(minutes, 1), "cpu_minutes": round((_cpu_s() - cpu_s) / 60, 1)}
    print(json.dumps(figures | spent))
    return 1 if len(survivors) > len(faults) // 15 else 0


if __name__ == "__main__":
    sys.exit(main())

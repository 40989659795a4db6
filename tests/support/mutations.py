"""Faults planted one at a time in the rules that must hold, and whether the tests catch them.

``python tests/support/mutations.py`` plants 15 chosen and 15 drawn faults in copies of the checkout. Each runs against
the unit tests of its package, those that name its module first; what survives runs against the rest of the fast tests.
``planted_faults.py`` says when a fault is caught.

Prints a line for each and, last, one JSON object: ``caught``, ``planted``, ``survivors``, ``minutes`` and
``cpu_minutes``, those of the tests. ``--list`` shows the faults without running them, ``--only TEXT`` runs those whose
place holds the text. Exit code: 1 where more than one of 15 survives, 2 where tests can't be run.

For a rewrite that must lose no test: ``--all-packages 120 --at COMMIT --results OLD`` draws faults over all packages at
the commit before and runs them; ``--carry OLD`` shows where they live now, and with ``--results NEW`` runs those that
were caught there and writes benchmarks/results/faults-120.txt (``carried_faults.py``). Exit code: 1 where more than two
are caught no more, 2 where some have no place yet or can't be run. Both go on where they were interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from carried_faults import carry, try_drawn
from planted_faults import SEED, Clean, Fault, NoTests, catcher_of, copied, drawable, files_for, found_once

DRAWN = 15

# Modules that faults are drawn from, with the folders of tests that a fault in each runs against first.
MODULES = {
    "headway/control/admission.py": "tests/unit/control",
    "headway/control/staleness.py": "tests/unit/control",
    "headway/buffer/store.py": "tests/unit/buffer",
    "headway/buffer/row_encoding.py": "tests/unit/buffer",
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
    return [found_once(*parts) for parts in CHOSEN]


CHOSEN: tuple[tuple[str, str, str, str], ...] = (
    (
        "headway/control/admission.py",
        "(applied_version + budget + 1 - completed_steps)",
        "(applied_version + budget + 2 - completed_steps)",
        "admits one step's groups too many",
    ),
    (
        "headway/control/admission.py",
        "capacity_groups + surplus_groups - open_groups",
        "capacity_groups - open_groups",
        "surplus is never admitted",
    ),
    ("headway/control/staleness.py", "if staleness > budget", "if staleness > budget + 1", "trains over the budget"),
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
        """            if group_state.parked:
                delete_partials(connection, index)""",
        """            if not group_state.parked:
                delete_partials(connection, index)""",
        "partial rollouts outlive their group",
    ),
    (
        "headway/orchestrator/recovery.py",
        "for replay in run.buffer.batches_since(version):",
        "for replay in run.buffer.batches_since(version + 1):",
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
        "fitting_indices = [b for b, load in enumerate(loads) if load + length <= budget]",
        "fitting_indices = [b for b, load in enumerate(loads) if load <= budget]",
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
        'V2: {\n            "memory.max": memory_bytes,\n            "memory.swap.max": 0,',
        'V2: {\n            "memory.max": "max",\n            "memory.swap.max": "max",',
        "a sandbox has all of the machine's memory",
    ),
)


def verdict(fault: Fault, clean: Clean) -> tuple[bool, str]:
    """Whether the tests catch ``fault``, and the line that says so."""
    test = catcher_of(fault, clean, files_for(fault.module, MODULES[fault.module].split()))
    return (False, f"SURVIVED: {fault}") if test is None else (True, f"caught: {fault} by {test}")


def over_all_packages(arguments: argparse.Namespace) -> int:
    """Draw faults at an older commit, or carry such to the present checkout. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="headway-no-mutation-") as folder:
        try:
            if arguments.carry is None:
                done = try_drawn(
                    arguments.all_packages, arguments.at, arguments.results, Path(folder), arguments.at_once
                )
                return 0 if done else 2
            clean = Clean(copied(Path(folder) / "headway"))
            return carry(
                arguments.all_packages, arguments.carry, arguments.results, Path(folder), clean, arguments.at_once
            )
        except (NoTests, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--list", action="store_true", help="show the faults and stop")
    options.add_argument("--only", default="", metavar="TEXT", help="run those whose module:line holds the text")
    options.add_argument("--at-once", type=int, default=2, help="faults that are tried at a time, a core for each")
    options.add_argument("--all-packages", type=int, metavar="N", help="draw N over all packages, at the commit --at")
    options.add_argument("--at", default="HEAD", metavar="COMMIT", help="its hash is the seed")
    options.add_argument("--carry", type=Path, metavar="FILE", help="carry N (120) that --all-packages tried")
    options.add_argument("--results", type=Path, metavar="FILE", help="JSON lines: what is in it isn't run again")
    arguments = options.parse_args()
    if arguments.carry is not None or arguments.all_packages is not None:
        arguments.all_packages = arguments.all_packages or 120
        if arguments.carry is None and arguments.results is None:
            options.error("--all-packages needs --results FILE")
        return over_all_packages(arguments)
    faults = [fault for fault in [*chosen(), *drawn()] if arguments.only in f"{fault.module}:{fault.line}"]
    if arguments.list:
        print("\n".join(map(str, faults)))
        return 0
    began = time.monotonic()
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-no-mutation-") as folder:
        clean = Clean(copied(Path(folder) / "headway"))
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

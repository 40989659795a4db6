"""Placement: whether its plans are the best there are, and how long the search takes on large pools.

    python benchmarks/planner.py                          # all parts, some minutes
    python benchmarks/planner.py --parts large --repeats 9
    python benchmarks/planner.py --keep planner.json      # resumes what is in the file, and adds to it

Parts, each of which can be run alone:

- `small`: random workflows of at most 6 stages on at most 8 devices of one or two classes, with loops inside loops,
  memory limits, switch costs and transfers, two thirds planned for time and a third for cost. `brute_force_equal`: how
  many plans are as good as the best of all plans (`tests/support/placement_brute_force.py`) to 1e-9 *and* take as
  long as the run of its chunks, and those that both refuse. `brute_force_modes`: what the plans were.
- `large`: `placement_128x6_s` and `placement_1024x12_s`, seconds of one search on 128 devices and 6 stages, 1,024 and
  12 (`tests/support/placement_cases.py:large_case`: one class, branches, a loop, six chunk sizes and the whole step,
  device counts with four sizes between two powers of two), and `..._gap`, what is left unproven. Several workflows are
  planned, `--repeats` times each; the figure is the slowest workflow's least time, since other processes only ever add
  to it; `..._cpu_s` is the processor time of the same run, `..._seconds` has each workflow's times.
- `two_classes`: 128 devices and 6 stages with two classes of devices (3/4 and 1/4 of them).
- `published`: what published runs found, asked of the rate models (`parts/published_findings.py`), with the deviation
  of each. `findings`, `findings_hold`: rows, and those whose direction comes out; `findings_deviate`: rows of which a
  number is more than 0.15 beyond the published range.
- `live`: a profile of this machine predicts settings that it doesn't hold (`parts/plan_live.py`), each beside the
  median of three live runs. `prediction_median_error`, `prediction_worst_error`, and `predictions`: relative errors.
- `grid`: `plan_over_best_of_grid`, the live rate of the plan that the profile leads to over the best of all placements
  and slots, each run live. Both want a machine without other work.

Prints a line as each workflow is done, what remains, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from parts.plan_live import grid, live
from parts.published_findings import findings
from parts.resumed import run_parts
from placement_brute_force import BruteForce
from placement_cases import large_case, small_case
from plan_timeline import run_plan

from headway.control.placement.search import place
from headway.records.errors import ConfigurationError
from headway.records.plan import DevicePool, Objective, Workflow

Report = dict[str, Any]
EQUAL = 1e-9  # relative
DEVIATES = 0.15
LARGE = {"128x6": (128, 6), "1024x12": (1024, 12)}  # devices, stages


def small(arguments: argparse.Namespace) -> Report:
    """Compare plans of small workflows with brute force."""
    equal, modes = 0, Counter[str]()
    for seed in range(arguments.graphs):
        objective: Objective = "cost" if seed % 3 == 2 else "time"
        workflow, pool = small_case(seed)
        found, mode, sound = _planned(workflow, pool, objective)
        best = BruteForce(workflow, pool).best(objective)
        same = found == best or abs(found - best) <= EQUAL * best
        equal += same and sound
        modes[mode] += 1
        if not (same and sound):
            print(f"small: seed {seed}, {objective}: plan {found}, best {best}, run of its chunks equal: {sound}")
        if (seed + 1) % 50 == 0:
            print(f"small: {seed + 1} of {arguments.graphs} graphs, {equal} equal", flush=True)
    return {"brute_force_equal": equal, "brute_force_graphs": arguments.graphs, "brute_force_modes": dict(modes)}


def _planned(workflow: Workflow, pool: DevicePool, objective: Objective) -> tuple[float, str, bool]:
    """The plan's value, its mode, and whether the run of its chunks takes its seconds and nothing is left unproven."""
    try:
        plan = place(workflow, pool, objective)
    except ConfigurationError:
        return math.inf, "none", True
    value = plan.seconds if objective == "time" else plan.cost_usd
    assert value is not None
    sound = abs(run_plan(plan, spans=False).end_s - plan.seconds) <= EQUAL * plan.seconds and plan.gap == 0
    return value, plan.mode, sound


def large(
    arguments: argparse.Namespace, sizes: Sequence[str] = tuple(LARGE), classes: int = 1, suffix: str = ""
) -> Report:
    """Time the search on large pools."""
    report: Report = {}
    for name in sizes:
        devices, stages = LARGE[name]
        seconds: list[float] = []
        cpu: list[float] = []
        gaps: list[float] = []
        for seed in range(arguments.workflows):
            workflow, pool = large_case(devices, stages, classes=classes, seed=seed)
            runs: list[tuple[float, float]] = []
            for _ in range(arguments.repeats):
                wall, used = time.perf_counter(), time.process_time()
                plan = place(workflow, pool)
                runs.append((time.perf_counter() - wall, time.process_time() - used))
            seconds.append(min(wall for wall, _ in runs))
            cpu.append(min(used for _, used in runs))
            gaps.append(plan.gap)
            print(
                f"large{suffix}: {name}, workflow {seed}: {seconds[-1]:.3f} s (processor {cpu[-1]:.3f} s), gap "
                f"{plan.gap:.4f}, {plan.mode}, {plan.expansions} expansions",
                flush=True,
            )
        key = f"placement_{name}{suffix}"
        report |= {f"{key}_s": max(seconds), f"{key}_gap": max(gaps), f"{key}_cpu_s": max(cpu)}
        report[f"{key}_seconds"] = [round(each, 4) for each in seconds]
    return report


def two_classes(arguments: argparse.Namespace) -> Report:
    """Time the search on pools of two classes."""
    return large(arguments, ["128x6"], classes=2, suffix="_two_classes")


def published(arguments: argparse.Namespace) -> Report:
    """Ask the rate models for published findings."""
    rows = list(findings())
    for row in rows:
        beyond = "" if row.deviation is None else f", {row.deviation:.2f} beyond the range"
        mark = "holds" if row.holds else "DOES NOT HOLD"
        print(f"published: {row.name}: {mark}{beyond}\n    published: {row.published}\n    found:     {row.computed}")
    deviate = [row.name for row in rows if (row.deviation or 0.0) > DEVIATES]
    return {"findings": len(rows), "findings_hold": sum(row.holds for row in rows), "findings_deviate": deviate}


PARTS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "small": small,
    "large": large,
    "two_classes": two_classes,
    "published": published,
    "live": lambda arguments: live(arguments.directory),
    "grid": lambda arguments: grid(arguments.directory),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--graphs", type=int, default=500, help="of the part small")
    parser.add_argument("--workflows", type=int, default=4, help="of each size of the part large")
    parser.add_argument("--repeats", type=int, default=5, help="of each workflow of the part large")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-planner"), help="of live runs")
    parser.add_argument("--keep", type=Path, help="a JSON file of finished parts: they are not run again")
    arguments = parser.parse_args()
    done = run_parts(PARTS, arguments)
    print(json.dumps({key: value for one in done.values() for key, value in one.items()}))


if __name__ == "__main__":
    main()

"""Workflows under plans: does the automatic plan find the best one, and what do channels, locks and links cost?

    python benchmarks/flow.py                           # all parts, 30 to 50 minutes on two quiet cores
    python benchmarks/flow.py --parts chunks links
    python benchmarks/flow.py --keep flow.json          # resumes what is in the file, and adds to it

Parts, each of which can be run alone:

- `reasoning`, `simulator`: chains of timed workers on eight virtual devices, with real channels and processes:
  long-tailed generation and training; a simulator that is hardly faster with a smaller share, a policy, training.
- `long_tail`, `judge`: tiny models on this machine's two cores: generation of forced, long-tailed lengths and training;
  the same with a judge model between them.
  Each of the four runs every mode x split x m in {1, 2, 4, whole}, three steps each after one that isn't counted, then
  the automatic plan. `auto_over_best`: its throughput over the best median's, of the worst workload. `distinct_bests`:
  modes that are best somewhere, with the second mode's best at least 5 % slower (`best_modes`, `second_modes` show it).
- `chunks`: `chunk_model_error`, the worst relative error of T_critical + (M/m - 1) T_bottleneck.
- `lock`: `lock_overhead`, the worst share of a step in which nobody holds a device that somebody waits for, without on-
  and offloading. A holder that waits itself still holds until its release has arrived, so beside it stands
  `lock_and_channels_at_most`: the median share in which no device computes, loads or offloads, for whatever reason.
- `builtin`: `flow_over_builtin`, samples/s of examples/flow_grpo.py over `headway train`, same placement, budget 0.
- `offload`: on- and offloading of a trainer and an engine beside the disk's own limit (parts/flow_offload.py).
- `links`: `direct_over_relayed` and `many_over_flat` (parts/flow_links.py).

Prints a line for each placement, what remains, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from parts.flow_models import trained
from parts.flow_offload import offload_seconds
from parts.flow_workloads import (
    Placement,
    Scripted,
    StageTime,
    VirtualDevices,
    long_tail,
    placements,
    timed,
)
from parts.pipeline_load import Shape, apart, experiment, prepare
from parts.resumed import run_parts

from headway.flow.placement import mode_of
from headway.flow.run import run
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement

Report = dict[str, Any]
Steps = list[FlowStep]
RunPlan = Callable[[Any, int, dict[str, Any]], tuple[Steps, ExecutionPlan]]  # plan, steps, options
VIRTUAL = [f"cuda:{number}" for number in range(8)]
CORES = ["cpu:0", "cpu:1"]
COUNTED = 3
CHUNKS = (None, 4, 2, 1)
AUTO_STEPS = 9  # three of profile, then those that count
REASONING = {  # long contexts: sharing costs loading, and training can begin while the tail is generated
    "generate": StageTime(fixed_s=0.02, item_s=0.08, switch_s=0.15),
    "train": StageTime(fixed_s=0.02, item_s=0.03, switch_s=0.15),
}
SIMULATOR = {
    "simulate": StageTime(fixed_s=0.10, item_s=0.010, switch_s=0.0),
    "policy": StageTime(fixed_s=0.01, item_s=0.004, switch_s=0.01),
    "train": StageTime(fixed_s=0.02, item_s=0.012, switch_s=0.02),
}


def measure(name: str, devices: Sequence[str], items: int, most: dict[str, int | None], execute: RunPlan) -> Report:
    """Every placement and chunk, then the automatic plan."""
    best: dict[str, tuple[float, str]] = {}  # mode -> seconds of a step, plan
    every = list(placements(devices, list(most), most))
    chunks = [chunk for chunk in CHUNKS if chunk is None or chunk < items]
    for number, placement in enumerate(every, start=1):
        steps, _ = execute(Scripted(placement, chunks, items, COUNTED + 1), len(chunks) * (COUNTED + 1), {})
        mode = mode_of(ExecutionPlan(stages={s: StagePlacement(devices=d) for s, d in placement.items()}))
        found: list[str] = []
        for place, chunk in enumerate(chunks):
            first = place * (COUNTED + 1) + 1
            seconds = statistics.median(step.seconds for step in steps[first : first + COUNTED])
            found.append(f"m {chunk or 'whole'}: {seconds:.3f} s")
            if mode not in best or seconds < best[mode][0]:
                best[mode] = seconds, f"{_split(placement)}, m = {chunk or 'whole'}"
        print(f"{name}: {number} of {len(every)}: {mode}, {_split(placement)}: {', '.join(found)}", flush=True)
    steps, plan = execute("auto", AUTO_STEPS, {"devices": devices, "items": items})
    auto_s = statistics.median(step.seconds for step in steps[-COUNTED:])
    order = sorted(best, key=lambda mode: best[mode][0])
    fastest_s = best[order[0]][0]
    split = _split({stage: placed.devices for stage, placed in plan.stages.items()})
    chunk = {stage: placed.chunk or "whole" for stage, placed in plan.stages.items()}
    print(
        f"{name}: best {best[order[0]][0]:.3f} s ({order[0]}, {best[order[0]][1]}); auto {auto_s:.3f} s "
        f"({mode_of(plan)}, {split}, m = {chunk}, expected {plan.expected_s or 0:.3f} s)",
        flush=True,
    )
    return {
        "auto_over_best": fastest_s / auto_s,
        "best_mode": order[0],
        "second_slower": best[order[1]][0] / fastest_s - 1 if len(order) > 1 else 0.0,
        "best": {mode: {"seconds": seconds, "plan": text} for mode, (seconds, text) in best.items()},
        "auto": {"seconds": auto_s, "mode": mode_of(plan), "plan": split, "expected_s": plan.expected_s},
    }


def _split(placement: Placement) -> str:
    return " | ".join(f"{stage} {len(devices)}" for stage, devices in placement.items())


def timed_workload(name: str, stages: dict[str, StageTime], items: int, spread: float) -> Report:
    lengths = long_tail(items, spread)

    def execute(plan: Any, steps: int, options: dict[str, Any]) -> tuple[Steps, ExecutionPlan]:
        return run(timed, plan, stages, lengths, steps, launcher=VirtualDevices, **({"items": items} | options))

    return measure(name, VIRTUAL, items, {stage: times.most for stage, times in stages.items()}, execute)


def model_workload(name: str, arguments: argparse.Namespace, shape: Shape, *, judged: bool) -> Report:
    folder = arguments.directory / name
    if not (folder / "model").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, shape)
    settings = experiment(folder, "run", shape, placement=apart(64), budget=0, steps=1)
    stages = ["generate", "judge", "train"] if judged else ["generate", "train"]

    def execute(plan: Any, steps: int, options: dict[str, Any]) -> tuple[Steps, ExecutionPlan]:
        items = {"items": settings.queue.groups_per_step}
        return run(trained, plan, settings, shape, steps, judged, **(items | options))

    most: dict[str, int | None] = {stage: 1 if stage == "train" else None for stage in stages}
    return measure(name, CORES, settings.queue.groups_per_step, most, execute)


SHAPE = Shape(
    layers=4, width=160, heads=4, intermediate=448, prompt_tokens=16, median_tokens=64, spread=0.8, longest_tokens=384
)


def chunks(arguments: argparse.Namespace) -> Report:
    """Chunks through stages on devices of their own: the formula against the run."""
    stages = {name: StageTime(fixed_s=0.02, item_s=s) for name, s in (("a", 0.025), ("b", 0.040), ("c", 0.015))}
    items, worst, shown = 24, 0.0, []
    placement: Placement = {name: (VIRTUAL[place],) for place, name in enumerate(stages)}
    sizes = (24, 12, 6, 4, 2, 1)
    plan = Scripted(placement, sizes, items, COUNTED)
    steps, _ = run(
        timed, plan, stages, lambda step: [1.0] * items, len(sizes) * COUNTED, launcher=VirtualDevices, items=items
    )
    for place, size in enumerate(sizes):
        turns = [times.fixed_s + times.item_s * size for times in stages.values()]
        expected = sum(turns) + (items / size - 1) * max(turns)
        found = statistics.median(step.seconds for step in steps[place * COUNTED : (place + 1) * COUNTED])
        worst = max(worst, abs(found / expected - 1))
        shown.append(f"m {size}: {found:.3f} s, formula {expected:.3f} s")
    print(f"chunks: {'; '.join(shown)}", flush=True)
    return {"chunk_model_error": worst}


def lock(arguments: argparse.Namespace) -> Report:
    """All stages of the simulator workload on the same devices, in small chunks: the most hand-overs there are."""
    placement: Placement = {stage: tuple(VIRTUAL[:2]) for stage in SIMULATOR}
    sizes = (32, 16, 8)
    plan = Scripted(placement, sizes, 32, COUNTED)
    steps, _ = run(
        timed, plan, SIMULATOR, lambda step: [1.0] * 32, len(sizes) * COUNTED, launcher=VirtualDevices, items=32
    )
    shares = [step.lock_idle_s / 2 / step.seconds for step in steps]
    used = [sum(one.busy_s + one.switch_s for one in step.stages.values()) / 2 / step.seconds for step in steps]
    print(
        f"lock: idle although wanted {', '.join(f'{share:.4f}' for share in shares)} of a step; devices computed, "
        f"loaded or offloaded {', '.join(f'{share:.2f}' for share in used)} of it",
        flush=True,
    )
    return {"lock_overhead": max(shares), "lock_and_channels_at_most": 1 - statistics.median(used)}


def builtin(arguments: argparse.Namespace) -> Report:
    """examples/flow_grpo.py and `headway train` in turns."""
    from parts.flow_builtin import flow_over_builtin

    return flow_over_builtin(arguments.directory / "builtin")


def links(arguments: argparse.Namespace) -> Report:
    import asyncio

    from parts.flow_links import direct_over_relayed, many_over_flat

    direct, many = asyncio.run(direct_over_relayed()), asyncio.run(many_over_flat())
    print(f"links: direct over relayed {direct}; many over flat {many}", flush=True)
    return {"direct_over_relayed": direct["ratio"], "many_over_flat": many["ratio"]}


PARTS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "reasoning": lambda arguments: timed_workload("reasoning", REASONING, 32, 0.7),
    "simulator": lambda arguments: timed_workload("simulator", SIMULATOR, 32, 0.1),
    "long_tail": lambda arguments: model_workload("long_tail", arguments, SHAPE, judged=False),
    "judge": lambda arguments: model_workload("judge", arguments, SHAPE, judged=True),
    "chunks": chunks,
    "lock": lock,
    "builtin": builtin,
    "links": links,
    "offload": lambda arguments: offload_seconds(arguments.directory),
}
WORKLOADS = ("reasoning", "simulator", "long_tail", "judge")


def summary(done: dict[str, Report]) -> Report:
    found = {name: done[name] for name in WORKLOADS if name in done}
    report: Report = {}
    if found:
        report["auto_over_best"] = min(one["auto_over_best"] for one in found.values())
        report["distinct_bests"] = len({one["best_mode"] for one in found.values() if one["second_slower"] >= 0.05})
        report["best_modes"] = {name: one["best_mode"] for name, one in found.items()}
        report["second_modes_slower"] = {name: one["second_slower"] for name, one in found.items()}
    for name, one in done.items():
        if name not in WORKLOADS:
            report |= one
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "headway-benchmark-flow")
    parser.add_argument("--keep", type=Path, help="a JSON file of finished parts: they are not run again")
    arguments = parser.parse_args()
    print(json.dumps(summary(run_parts(PARTS, arguments))))


if __name__ == "__main__":
    main()

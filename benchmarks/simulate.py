"""How fast is `headway simulate` on one core, and does it say what a live run does?

    python benchmarks/simulate.py [--live] [--rounds 5]

Runs the two scenarios of examples/scenarios/ in turn, several times, and counts what was simulated per minute of this
process's CPU time: rollouts that ended, and events (a prefill or a model call ends, a sandbox is up, a sandbox has
replied). Start-up, ledger, buffer and summary count. Last line, one JSON object: median, least and most of
`single_turn_rollouts_per_min` and `multi_turn_events_per_min`, and `ledgers_equal` (every run of a scenario wrote the
same ledger to the byte).

``--live``: live runs on this machine beside their simulations instead (parts/simulate_live.py), ``--rounds`` times.
Last line, one JSON object: `simulated_to_live`, the median over the rounds of simulated / live trained samples/s, with
least and most, for each row, `self` (its own ledger simulated) and `cross` (predicted from the ledgers of two other
rows), and in how many of the predicted rows it is within 10 %. ``--directory`` keeps the runs, and goes on with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from parts import simulate_live

from headway.planner.outcome import SimulationOutcome
from headway.planner.scenario import load_scenario
from headway.planner.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "examples" / "scenarios"


def events(outcome: SimulationOutcome) -> int:
    counts = outcome.environment
    return 2 * outcome.model_calls + int(counts["started"] + counts["tool_calls"])


def once(name: str, steps: int) -> tuple[SimulationOutcome, float, bytes]:
    """(outcome, CPU seconds, ledger) of one run in a folder of its own, which is always called alike."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            scenario = load_scenario(SCENARIOS / f"{name}.toml", [f"run.steps={steps}", "run.directory=run"])
            began_s = time.process_time()
            outcome = simulate(scenario)
            return outcome, time.process_time() - began_s, Path("run/ledger.jsonl").read_bytes()
        finally:
            os.chdir(here)


def spread(rates: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(rates)), "least": round(min(rates)), "most": round(max(rates))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live", action="store_true", help="live runs beside their simulations instead")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-simulate"), help="of --live")
    parser.add_argument("--steps", type=int, default=36, help="of --live, 128 samples each")
    arguments = parser.parse_args()
    if arguments.live:
        simulate_live.live(arguments.directory, arguments.rounds, arguments.steps)
        print(json.dumps(simulate_live.compare(arguments.directory, arguments.rounds)))
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rollouts: list[float] = []
    happened: list[float] = []
    ledgers: dict[str, set[bytes]] = {"long_tail": set(), "tools": set()}
    for _ in range(arguments.rounds):
        for name, steps in (("long_tail", 100), ("tools", 20)):
            outcome, cpu_s, ledger = once(name, steps)
            ledgers[name].add(ledger)
            ended = sum(outcome.summary.endings.values())
            print(
                f"{name:9}  {ended:6,} rollouts, {events(outcome):7,} events, {outcome.summary.duration_s:8,.0f} s "
                f"simulated in {cpu_s:5.2f} s: {60 * ended / cpu_s:9,.0f} rollouts/min, "
                f"{60 * events(outcome) / cpu_s:9,.0f} events/min",
                flush=True,
            )
            if name == "long_tail":
                rollouts.append(60 * ended / cpu_s)
            else:
                happened.append(60 * events(outcome) / cpu_s)
    result = {
        "single_turn_rollouts_per_min": spread(rollouts),
        "multi_turn_events_per_min": spread(happened),
        "ledgers_equal": all(len(found) == 1 for found in ledgers.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

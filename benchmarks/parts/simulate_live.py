"""Live runs on this machine and their simulations (the ``--live`` part of simulate.py).

The quickstart's task and cold start, with a learning rate of 0 so that the load stays what it is; a core for the
generator and one for the trainer. Each round runs every row once, the next round in reverse order. Rows during which
others kept more than BUSY_CORES busy are left out, and what would be predicted from them. Then, round by round:

- *self*: a row's own ledger as a scenario, simulated. No prediction: it shows that the simulation is consistent.
- *cross*: a row that is simulated from the ledgers of other rows of its round alone: of BASE, with the keys the row
  differs in, and of BESIDE, which tells what generator and trainer cost each other.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from headway.control.tuning.run_figures import RunFigures
from headway.planner.from_run import RecordedRun, read_run, scenario_from, window
from headway.planner.live_comparison import agreement
from headway.planner.simulate import simulate
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from parts.pipeline_machine import load
from parts.trained_run import SAME_LOAD, headway, train_alone

BASE, BESIDE = "asynchronous", "synchronous"
ROWS: dict[str, tuple[str, ...]] = {  # the two that predict stand between those that are predicted
    "small budget": ("queue.budget=1",),
    BASE: ("queue.budget=4",),
    "few slots": ("queue.budget=4", "generator.slots=8"),
    "half the slots": ("queue.budget=4", "generator.slots=32"),
    BESIDE: ("queue.budget=0",),
    "synchronous, discard": ("queue.budget=0", "queue.oversampling=2.0", "queue.surplus=discard"),
}
COMMON = (
    "queue.groups_per_step=16",
    "generator.slots=64",
    "algorithm.loss=decoupled_ppo",
    "run.time_limit_s=100000",
    *SAME_LOAD,
)
WARM_STEPS = 6  # beside those that fill the queue: a fresh process is slow at first
BUSY_CORES = 0.2
SIMULATED_STEPS = 70
OTHERS = "others"  # file in a row's folder: cores that others kept busy meanwhile
RIGHT = 0.1


@dataclass(frozen=True)
class Ratio:
    """Simulated / live trained samples/s, and the waits of both."""

    live: RunFigures
    simulated: RunFigures

    @property
    def rate(self) -> float:
        return self.simulated.samples_per_s / self.live.samples_per_s


def train(folder: Path, start: Path, row: str, seed: int, steps: int) -> None:
    """Run ``row``; its folder stays."""
    options = (f"run.seed={seed}", f"run.steps={steps}", *COMMON, *ROWS[row])
    others = train_alone(folder, start, row, [f"--{option}" for option in options])
    (folder / OTHERS).write_text(f"{others:.3f}\n")


def undisturbed(rounds: Path, *rows: str) -> bool:
    """Whether others left the machine alone during all of these rows."""
    return all(float((rounds / row / OTHERS).read_text()) <= BUSY_CORES for row in rows)


def looked_at(run: RecordedRun) -> list[StepRecord]:
    """Its steps in steady state."""
    budget = run.experiment.queue.budget
    return window(run, (budget + WARM_STEPS, run.experiment.run.steps - budget - 1))


def simulated(folder: Path, row: str, seed: int, rounds: Path, base: str, beside: str | None) -> RunFigures:
    """``row`` as the ledgers of ``base`` and ``beside`` in the folder ``rounds`` predict it."""
    run = read_run(rounds / base)
    other = None
    if beside is not None:
        second = read_run(rounds / beside)
        other = second, looked_at(second)
    keys = (*COMMON[:2], *ROWS[row]) if base != row else ()
    own = (f"run.directory={folder}", f"run.steps={SIMULATED_STEPS}", f"run.seed={seed}")
    found = scenario_from(run, looked_at(run), [*own, *keys], beside=other)
    simulate(found.scenario, name=row)
    return agreement(found, read_ledger(folder), keys).simulated


def compare(directory: Path, rounds: int) -> dict[str, object]:
    """The tables of self and cross, and what they say as JSON types."""
    folder = directory / "simulated"
    found: dict[str, dict[str, list[Ratio]]] = {"self": {}, "cross": {}}
    for number in range(rounds):
        place = directory / f"round-{number}"
        for row in ROWS:
            run = read_run(place / row)
            own = scenario_from(run, looked_at(run), [f"run.directory={folder}"]).live
            if undisturbed(place, row):
                alone = simulated(folder, row, number, place, row, None)
                found["self"].setdefault(row, []).append(Ratio(own, alone))
            if row not in (BASE, BESIDE) and undisturbed(place, row, BASE, BESIDE):
                crossed = simulated(folder, row, number, place, BASE, BESIDE)
                found["cross"].setdefault(row, []).append(Ratio(own, crossed))
    for kind, what in (
        ("self", "a row's own ledger, simulated (a consistency check)"),
        ("cross", f"predicted from the ledgers of {BASE} and {BESIDE} in the same round"),
    ):
        print(f"\n{kind}: {what}; rounds: {', '.join(str(len(ratios)) for ratios in found[kind].values())}")
        for row, ratios in found[kind].items():
            show(row, ratios)
    result: dict[str, object] = {
        kind: {row: _as_json(ratios) for row, ratios in rows.items()} for kind, rows in found.items()
    }
    result["rows_within_10_percent"] = sum(abs(_middle(ratios) - 1) <= RIGHT for ratios in found["cross"].values())
    result["predicted_rows"] = len(found["cross"])
    return result


def _middle(ratios: list[Ratio]) -> float:
    return statistics.median(one.rate for one in ratios)


def _as_json(ratios: list[Ratio]) -> dict[str, object]:
    rates = [one.rate for one in ratios]
    return {
        "simulated_to_live": round(_middle(ratios), 3),
        "least": round(min(rates), 3),
        "most": round(max(rates), 3),
        "live_per_s": [round(one.live.samples_per_s, 1) for one in ratios],
        "simulated_per_s": [round(one.simulated.samples_per_s, 1) for one in ratios],
    }


def show(row: str, ratios: list[Ratio]) -> None:
    """Medians over the rounds, and the range of the ratio."""

    def middle(side: str, name: str) -> float:
        return statistics.median(getattr(getattr(one, side), name) for one in ratios)

    rates = [one.rate for one in ratios]
    print(
        f"{row:22} live {middle('live', 'samples_per_s'):5.0f}/s  simulated "
        f"{middle('simulated', 'samples_per_s'):5.0f}/s",
        f"ratio {_middle(ratios):.2f} [{min(rates):.2f}-{max(rates):.2f}]",
        f"trainer waits {middle('live', 'trainer_wait'):4.0%} {middle('simulated', 'trainer_wait'):4.0%}",
        f"generator {middle('live', 'generator_wait'):4.0%} {middle('simulated', 'generator_wait'):4.0%}",
        f"stale {middle('live', 'staleness_mean'):.1f} {middle('simulated', 'staleness_mean'):.1f}",
        f"length {middle('live', 'length_mean'):.0f} {middle('simulated', 'length_mean'):.0f}",
        f"accepted {middle('live', 'acceptance'):.0%} {middle('simulated', 'acceptance'):.0%}",
        sep="  ",
        flush=True,
    )


def live(directory: Path, rounds: int, steps: int) -> None:
    """Train every row ``rounds`` times; rounds that are there already stay."""
    start = directory / "start"
    headway("quickstart", str(start), "--cold-start-only", quiet=True)
    print(f"load averages at the start: {load()}", flush=True)
    for number in range(rounds):
        done = directory / f"round-{number}" / "done"
        if done.exists():
            continue
        order = list(ROWS) if number % 2 == 0 else list(ROWS)[::-1]
        for row in order:
            train(directory / f"round-{number}" / row, start, row, number, steps)
        done.touch()
        print(f"round {number + 1} of {rounds} is trained", flush=True)

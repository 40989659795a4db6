"""How much of two matched machines' rate the asynchronous system keeps.

    python benchmarks/pipeline.py [--quick]
    python benchmarks/pipeline.py --matched --rounds 8 --steps 12     # the first four alone: paired within a minute

A generator pinned to one core and a trainer pinned to another, both able to handle about equally many samples per
second alone (``balance``). Measured alternately, in one run, several times:

    production    the generator alone, a closed loop at the system's concurrency
    consumption   the trainer alone, on batches recorded from that generation
    together      both of these at once, with no orchestrator: what two busy cores of this machine can give
    asynchronous  the whole system: orchestrator, buffer on disk, verifier processes, ledger; wait, budget 8
    drained       the same, but an update waits until what is in flight has finished (generator.update_mode = "drain")
    synchronous   the same at budget 0, at the best of two concurrencies
    colocated     budget 0 without a core idle by placement: both cores generate, then both train, in turns; the best
                  of two concurrencies and of one process a core or one on both
    flexible      the same placement at budget 8: both cores generate until a batch is full, then both train while
                  what is in flight waits; no core is ever the other side's

Response lengths are forced by the request's seed, so every variant generates the same ones; they are log-normal. All
attempts at a share of the tasks (``--uniform``; 0.55, as in a published run) are solved: their groups are generated,
verified and filtered. Rates count trained samples.
The last line is one JSON object; ``efficiency`` = trained samples/s of *asynchronous* / min(production, consumption);
``asynchronous_of_together`` = the same / min of *together*; ``async_over_colocated_sync`` = *asynchronous* /
*colocated*, the honest baseline of asynchrony; ``interrupted_over_drain`` = *asynchronous* / *drained*, what updates in
flight are worth (published: 1.12 to 1.17). All are ratios within a round; shown are their medians over the rounds.
Steady state: the first budget + 1 steps and the drain at the end are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from parts.pipeline_load import (
    BATCH,
    GROUPS_PER_STEP,
    Placement,
    Rate,
    Shape,
    alone_consumption,
    alone_production,
    apart,
    experiment,
    prepare,
    together,
)
from parts.pipeline_machine import Usage, load, wait_until_quiet
from parts.pipeline_system import Steady, measure, serialisation_ms

from headway.config.schema import Experiment
from headway.records.training import TrainBatch
from headway.runtime.devices import machine_cores

SLOTS = (4, 6, 8, 12, 16, 24, 32)  # the one is taken at which both sides are most nearly equally fast alone
SYNCHRONOUS = (apart(32), apart(64))
_TURNS = ("cpu:0", "cpu:1")
FLEXIBLE = (Placement(_TURNS, _TURNS, 16), Placement(_TURNS, _TURNS, 32))
COLOCATED = (*FLEXIBLE, Placement(("cpu:0-1",), ("cpu:0-1",), 64))
BALANCED = (0.8, 1.25)
QUIET_CORES = 0.05  # more CPU than this used by others spoils a measurement

ROLES_SHOWN = ("generator", "trainer", "orchestrator", "verifier")

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How long everything is measured."""

    rounds: int
    steps: int  # of the asynchronous system, and batches of each side alone
    synchronous_steps: int
    budget: int = 8  # of the asynchronous and the flexible system
    placements: int = 3  # of each variant, at most, tried in the first round
    matched: bool = False  # without the drained, the synchronous, the colocated and the flexible system

    def groups(self, shape: Shape) -> range:
        """What each side alone works on: about what the system generates in its steady state."""
        per_step = GROUPS_PER_STEP / (1 - shape.uniform)
        return range(round(per_step * (self.budget + 1)), round(per_step * (self.budget + 1 + self.steps)))


@dataclass
class Round:
    """One pass over all variants."""

    production: Rate | None = None
    consumption: Rate | None = None
    asynchronous: Steady | None = None
    drained: Steady | None = None
    synchronous: dict[Placement, Steady] = field(default_factory=dict)
    colocated: dict[Placement, Steady] = field(default_factory=dict)
    flexible: dict[Placement, Steady] = field(default_factory=dict)
    together: tuple[float, float] | None = None  # production, consumption

    def efficiency(self) -> float:
        assert self.asynchronous
        return self.asynchronous.per_s / self.slower()

    def slower(self) -> float:
        assert self.production
        assert self.consumption
        return min(self.production.per_s, self.consumption.per_s)

    def balance(self) -> float:
        assert self.production
        assert self.consumption
        return self.production.per_s / self.consumption.per_s

    def together_ceiling(self) -> float:
        assert self.together
        return min(self.together) / self.slower()

    def asynchronous_of_together(self) -> float:
        assert self.asynchronous
        assert self.together
        return self.asynchronous.per_s / min(self.together)

    def async_over_sync(self) -> float:
        assert self.asynchronous
        return self.asynchronous.per_s / best(self.synchronous)

    def async_over_colocated_sync(self) -> float:
        assert self.asynchronous
        return self.asynchronous.per_s / best(self.colocated)

    def interrupted_over_drain(self) -> float:
        assert self.asynchronous
        assert self.drained
        return self.asynchronous.per_s / self.drained.per_s

    def flexible_over_colocated_sync(self) -> float:
        return best(self.flexible) / best(self.colocated)


def best(measured: dict[Placement, Steady]) -> float:
    return max(steady.per_s for steady in measured.values())


class Benchmark:
    """Measures the variants, each into the round it belongs to."""

    def __init__(self, folder: Path, shape: Shape, plan: Plan, slots: int | None, patience_s: float = 0.0) -> None:
        self.folder = folder
        self.shape = shape
        self.plan = plan
        self.slots = slots or 0  # of the generator where each side has its core
        self.patience_s = patience_s  # left to wait for a quiet machine and to repeat what was disturbed
        self.batches: list[TrainBatch] = []
        self.peak_flops_per_s = 0.0
        self.rounds: list[Round] = []
        self.foreign_cores = 0.0  # most that others used during any measurement
        self._runs = itertools.count()

    def run(self) -> None:
        """All rounds: every other one in the opposite order."""
        self.slots = self.slots or self._balanced_slots()
        for number in range(self.plan.rounds):
            self.rounds.append(round_ := Round())
            variants = [
                self._production,
                self._consumption,
                self._asynchronous,
                *(() if self.plan.matched else (self._drained, self._flexible, self._colocated, self._synchronous)),
                self._together,
            ]
            for variant in variants if number % 2 == 0 else reversed(variants):
                variant(round_)

    def _balanced_slots(self) -> int:
        """A short look at each of `SLOTS`, and at the trainer."""
        every, produced = self.plan.groups(self.shape), dict[int, float]()
        groups = range(every.start, every.start + len(every) // 3)
        batches: list[TrainBatch] = []
        for slots in SLOTS:

            async def generate(slots: int = slots) -> Rate:
                rate, made = await alone_production(self._settings(apart(slots), 0), self.shape, groups)
                batches[:] = batches or made
                return rate

            rate = self._timed(f"production, {slots} slots", generate, lambda rate: (rate.per_s, rate.usage))
            produced[slots] = rate.per_s

        async def train() -> Rate:
            return (await alone_consumption(self._settings(apart(SLOTS[0]), 0), batches))[0]

        consumed = self._timed("consumption", train, lambda rate: (rate.per_s, rate.usage)).per_s
        return min(SLOTS, key=lambda slots: abs(math.log(produced[slots] / consumed)))

    def _production(self, round_: Round) -> None:
        async def job() -> Rate:
            groups = self.plan.groups(self.shape)
            rate, batches = await alone_production(self._settings(apart(self.slots), 0), self.shape, groups)
            self.batches = self.batches or batches
            return rate

        round_.production = self._timed("production", job, lambda rate: (rate.per_s, rate.usage))

    def _consumption(self, round_: Round) -> None:
        async def job() -> Rate:
            rate, self.peak_flops_per_s = await alone_consumption(self._settings(apart(self.slots), 0), self.batches)
            return rate

        round_.consumption = self._timed("consumption", job, lambda rate: (rate.per_s, rate.usage))

    def _asynchronous(self, round_: Round) -> None:
        round_.asynchronous = self._system("asynchronous", apart(self.slots), self.plan.budget, self.plan.steps)

    def _drained(self, round_: Round) -> None:
        placement = apart(self.slots)
        round_.drained = self._system("drained", placement, self.plan.budget, self.plan.steps, update_mode="drain")

    def _synchronous(self, round_: Round) -> None:
        self._placements("synchronous", SYNCHRONOUS, round_, 0)

    def _colocated(self, round_: Round) -> None:
        self._placements("colocated", COLOCATED, round_, 0)

    def _flexible(self, round_: Round) -> None:
        self._placements("flexible", FLEXIBLE, round_, self.plan.budget)

    def _placements(self, name: str, placements: tuple[Placement, ...], round_: Round, budget: int) -> None:
        """All of them in the first round, then only the best of it."""
        placements = placements[: self.plan.placements]
        if round_ is not self.rounds[0]:
            first: dict[Placement, Steady] = getattr(self.rounds[0], name)
            placements = (max(first, key=lambda each: first[each].per_s),)
        steps = self.plan.steps if budget else self.plan.synchronous_steps
        for each in placements:
            getattr(round_, name)[each] = self._system(f"{name}, {each}", each, budget, steps)

    def _together(self, round_: Round) -> None:
        rates = self._timed(
            "together",
            lambda: together(self._settings(apart(self.slots), 0), self.shape, self.batches),
            lambda result: (min(result[:2]), result[2]),
        )
        round_.together = rates[:2]

    def _system(self, name: str, placement: Placement, budget: int, steps: int, *, update_mode: str = "keep") -> Steady:
        steady = self._timed(
            name,
            lambda: measure(self._settings(placement, budget, update_mode), self.shape, steps),
            lambda steady: (steady.per_s, steady.usage),
        )
        print(f"         {steady.outline()}", flush=True)
        return steady

    def _settings(self, placement: Placement, budget: int, update_mode: str = "keep") -> Experiment:
        return experiment(
            self.folder,
            f"run-{next(self._runs)}",
            self.shape,
            placement=placement,
            budget=budget,
            steps=100_000,
            update_mode=update_mode,
        )

    def _timed(self, name: str, job: Callable[[], Awaitable[T]], rate: Callable[[T], tuple[float, Usage]]) -> T:
        """Measure; again when somebody else used the machine meanwhile, as long as patience lasts."""
        while True:
            if self.patience_s > 0:
                self.patience_s -= wait_until_quiet(QUIET_CORES, self.patience_s)
            started, before = time.monotonic(), load()
            result = asyncio.run(awaited(job))
            per_s, usage = rate(result)
            disturbed = usage.foreign_cores > QUIET_CORES
            again = disturbed and self.patience_s > 0
            mark = "  <- disturbed" + (", again" if again else "") if disturbed else ""
            print(
                f"round {len(self.rounds)}  {name:34} {per_s:7.1f} samples/s in {usage.seconds:5.1f} s   "
                f"CPU used by others {usage.foreign_cores:.3f} cores; load {before} before, {load()} after{mark}",
                flush=True,
            )
            if not again:
                self.foreign_cores = max(self.foreign_cores, usage.foreign_cores)
                return result
            self.patience_s -= time.monotonic() - started


async def awaited(job: Callable[[], Awaitable[T]]) -> T:
    return await job()


def middle(values: list[float]) -> float:
    return statistics.median(values)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The median and the extremes over the rounds, as keys of the result."""
    return {
        name: round(middle(values), 4),
        f"{name}_min": round(min(values), 4),
        f"{name}_max": round(max(values), 4),
    }


def report(bench: Benchmark, parameters: float) -> dict[str, float | int | bool]:
    """Print the limits, the table and where the rest goes; return the result."""
    rounds = bench.rounds
    print_limits(bench, parameters)
    print_table(bench)
    print_rest(bench)
    balance = [each.balance() for each in rounds]
    balanced = BALANCED[0] <= middle(balance) <= BALANCED[1]
    result: dict[str, float | int | bool] = {}
    if balanced:
        result |= spread("efficiency", [each.efficiency() for each in rounds])
        result |= spread("asynchronous_of_together", [each.asynchronous_of_together() for each in rounds])
    else:
        print(f"\nNo efficiency is claimed: balance {middle(balance):.2f} is outside {BALANCED}.")
    if not bench.plan.matched:
        result |= spread("interrupted_over_drain", [each.interrupted_over_drain() for each in rounds])
        result |= spread("async_over_sync", [each.async_over_sync() for each in rounds])
        result |= spread("async_over_colocated_sync", [each.async_over_colocated_sync() for each in rounds])
        result |= spread("flexible_over_colocated_sync", [each.flexible_over_colocated_sync() for each in rounds])
    result |= spread("balance", balance)
    result |= spread("together_ceiling", [each.together_ceiling() for each in rounds])
    result |= spread("orchestrator_cpu_ms_per_sample", [systems(each).cpu_ms("orchestrator") for each in rounds])
    result["length_p99_over_median"] = round(bench.shape.p99_over_median(), 2)
    result["max_trajectory_staleness"] = max(systems(each).max_staleness() for each in rounds)
    result["foreign_cores_max"] = round(bench.foreign_cores, 3)
    result["rounds"] = len(rounds)
    return result


def systems(each: Round) -> Steady:
    assert each.asynchronous
    return each.asynchronous


def print_limits(bench: Benchmark, parameters: float) -> None:
    rounds, shape = bench.rounds, bench.shape
    lengths = bench.shape.lengths(0, bench.plan.groups(bench.shape))
    print(
        f"\nLimits: {len(machine_cores())} cores; matrix products {bench.peak_flops_per_s / 1e9:.0f} GFLOP/s on one; "
        f"model of {parameters:.2f} M parameters, {shape.prompt_tokens} prompt tokens, responses of mean "
        f"{statistics.mean(lengths):.0f}, median {shape.median_tokens}, cap {shape.longest_tokens} tokens "
        f"(p99 = {shape.p99_over_median():.1f} x median); {shape.uniform:.0%} of the groups are filtered; "
        f"{bench.slots} slots, {BATCH} samples a step"
    )
    production = [each.production.per_s for each in rounds if each.production]
    consumption = [each.consumption.per_s for each in rounds if each.consumption]
    print(f"        production alone {middle(production):.1f}, consumption alone {middle(consumption):.1f} samples/s")


def print_table(bench: Benchmark) -> None:
    rounds = bench.rounds
    rows: dict[str, list[float]] = {
        "production alone": [each.production.per_s for each in rounds if each.production],
        "consumption alone": [each.consumption.per_s for each in rounds if each.consumption],
        "together, production": [each.together[0] for each in rounds if each.together],
        "together, consumption": [each.together[1] for each in rounds if each.together],
        f"asynchronous (budget {bench.plan.budget})": [systems(each).per_s for each in rounds],
        "drained, the same budget": [each.drained.per_s for each in rounds if each.drained],
    }
    rows = {name: values for name, values in rows.items() if values}
    for name, placements in (("flexible", FLEXIBLE), ("colocated", COLOCATED), ("synchronous", SYNCHRONOUS)):
        for placement in placements:
            found: list[dict[Placement, Steady]] = [getattr(each, name) for each in rounds]
            values = [each[placement].per_s for each in found if placement in each]
            rows |= {f"{name}, {placement}": values} if values else {}
    slower = middle([each.slower() for each in rounds])
    print(f"\n{'samples/s':36} {'median':>8} {'min':>8} {'max':>8}   of the slower side alone")
    for name, values in rows.items():
        print(f"{name:36} {middle(values):8.1f} {min(values):8.1f} {max(values):8.1f}   {middle(values) / slower:.3f}")


def print_rest(bench: Benchmark) -> None:
    """Where the time of the asynchronous system goes: means over the rounds."""
    rounds, batches = bench.rounds, bench.batches
    steady = [systems(each) for each in rounds]

    def mean(value: Callable[[Steady], float]) -> float:
        return statistics.mean(value(each) for each in steady)

    def of_step(name: str) -> float:
        return mean(lambda each: each.total(name) / len(each.records))

    def of_sample_ms(name: str) -> float:
        return mean(lambda each: each.per_sample_ms(name))

    def cpu_ms(role: str) -> float:
        return mean(lambda each: each.cpu_ms(role))

    alone = statistics.mean(1000 / each.consumption.per_s for each in rounds if each.consumption)
    produced = statistics.mean(1000 / each.production.per_s for each in rounds if each.production)
    every_ms = mean(lambda each: 1000 / each.per_s)
    lines = {
        "one sample every": f"{every_ms:8.3f} ms (production alone {produced:.3f}, consumption alone {alone:.3f})",
        "trainer computes": f"{of_sample_ms('trainer_compute_s'):8.3f} ms",
        "trainer waits for samples": f"{of_sample_ms('trainer_wait_s'):8.3f} ms",
        "trainer publishes": f"{of_sample_ms('publish_s'):8.3f} ms",
        "trainer writes checkpoints": f"{of_sample_ms('checkpoint_s'):8.3f} ms",
        "trainer is handed a batch, logs": f"{mean(between_steps_ms):8.3f} ms",
        "generator has nothing to do": f"{every_ms * of_step('generator_wait_ratio'):8.3f} ms",
        "generator pauses for an update": f"{1000 * of_step('apply_pause_s') / BATCH:8.3f} ms",
    }
    lines |= {f"CPU of the {role}": f"{cpu_ms(role):8.3f} ms" for role in ROLES_SHOWN}
    lines["inside the verifier's functions"] = f"{of_sample_ms('verify_s'):8.4f} ms"
    lines |= {name: f"{value:8.4f} ms" for name, value in serialisation_ms(batches).items()}
    print("\nWhere the rest goes (asynchronous, per sample)")
    for name, text in lines.items():
        print(f"  {name:34} {text}")
    staleness = mean(lambda each: each.records[-1].trajectory_staleness.mean)
    print(
        f"  trained responses' mean length {mean(lambda each: each.mean_length):.1f} tokens; trajectory staleness mean "
        f"{staleness:.1f}, max {max(each.max_staleness() for each in steady)}; "
        f"{of_step('buffered_groups'):.1f} groups buffered, {of_step('engines.running_rollouts'):.1f} of {bench.slots} "
        "slots in use"
    )


def between_steps_ms(steady: Steady) -> float:
    known = ("trainer_compute_s", "trainer_wait_s", "publish_s", "checkpoint_s")
    return 1000 * (steady.seconds - sum(steady.total(name) for name in known)) / steady.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round of a small load: does it work at all?")
    parser.add_argument(
        "--matched", action="store_true", help="two matched sides, alone and together: efficiency alone"
    )
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--steps", type=int, help="measured of the asynchronous system; default: 24")
    parser.add_argument("--slots", type=int, help=f"of the generator; default: of {SLOTS} those that match the sides")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="may wait and repeat this long for a quiet machine"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this (new) folder")
    for name, value in (
        ("layers", 5),
        ("width", 160),
        ("heads", 4),
        ("intermediate", 448),
        ("prompt", 24),
        ("median", 40),
        ("longest", 512),
        ("uniform", 0.55),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"of the load; default: {value}")
    arguments = parser.parse_args()
    shape = Shape(
        arguments.layers,
        arguments.width,
        arguments.heads,
        arguments.intermediate,
        arguments.prompt,
        arguments.median,
        0.95,
        arguments.longest,
        arguments.uniform,
    )
    steps = arguments.steps or 24
    synchronous_steps = max(1, steps // 2)
    plan = Plan(arguments.rounds or 3, steps, synchronous_steps, matched=arguments.matched)
    if arguments.quick:
        shape = Shape(2, 64, 2, 128, 12, 8, 0.95, 128, 0.5)
        plan = Plan(
            rounds=arguments.rounds or 1,
            steps=3,
            synchronous_steps=2,
            budget=2,
            placements=1,
            matched=arguments.matched,
        )
        arguments.slots = arguments.slots or 16
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="headway-pipeline-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        parameters = prepare(folder, shape)
        bench = Benchmark(folder, shape, plan, arguments.slots, arguments.patience)
        bench.run()
        print(json.dumps(report(bench, parameters)))
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

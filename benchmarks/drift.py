"""How fast the controller finds its way back when the run drifts.

    python benchmarks/drift.py [--quick] [--seeds 3]

The real loops, buffer and controller on the virtual clock; generator, trainer and verifier are fakes with described
latencies. At a training step something changes for good: responses three times as long, tools 2.5 times as slow (they
hold a request's slot), 55 % of the tasks solved by every attempt (their groups are filtered), a trainer 2.5 times as
slow or four times as fast, a verifier 15 times as slow (and, one line, 25 times, for six steps). What fixed knobs reach
after it is searched on a grid (open groups x concurrent rollouts; at the best point steps per publish), each point a
run of its own with the same change.

``recovered``: from ``steps_to_recover`` steps after the change on, the useful samples/s (advantage not 0) of the next
steps are at least 95 % of the best grid point's over the same steps; the limit is max(10, 2 (eta + 1)) steps. Means
over the seeds; all runs of a seed draw the same random lengths. ``left alone``: what the knobs that the controller had
set before the change reach without it. ``staleness``: mean of the trained trajectories after the limit, beside the best
grid point's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.fake import FakeGenerator
from headway.orchestrator.assembly import Actors, assemble
from headway.records.control import Knobs
from headway.records.generation import GenerationRequest
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer

BUDGET, GROUPS_PER_STEP, GROUP, SLOTS = 4, 8, 4, 64
LIMIT_STEPS = max(10, 2 * (BUDGET + 1))
ENOUGH = 0.95


@dataclass(frozen=True)
class Load:
    """What the actors are like."""

    length: float = 1.0  # factor of the response lengths
    tool_s: float = 0.1  # a request holds its slot so long before its first token
    solved: float = 0.0  # share of the tasks that every attempt solves
    train_token_s: float = 8e-4
    verify_s: float = 0.002  # a response


@dataclass(frozen=True)
class Scenario:
    """A load, and the one it changes into."""

    name: str
    after: Load
    before: Load = Load()
    back_after: int | None = None  # steps after which the change ends again


SCENARIOS = (
    Scenario("lengths x 3", Load(length=3.0)),
    Scenario("tools x 2.5", Load(tool_s=1.25), before=Load(tool_s=0.5)),
    Scenario("55 % all solved", Load(solved=0.55)),
    Scenario("slow trainer", Load(), before=Load(train_token_s=3.2e-4)),
    Scenario("fast trainer", Load(train_token_s=2e-4)),
    Scenario("slow verifier", Load(verify_s=0.03)),
    Scenario("verifier spike", Load(), before=Load(), back_after=6),
)


@dataclass
class Result:
    """What one run left behind."""

    steps: list[StepRecord]
    actions: list[EventRecord] = field(default_factory=list)

    def rate(self, first: int, count: int) -> float:
        """Useful samples/s over ``count`` steps from ``first`` on."""
        kept = self.steps[first : first + count]
        return sum(r.flow.useful_samples for r in kept) / sum(r.step_s for r in kept)

    def staleness(self, first: int, count: int) -> float:
        kept = self.steps[first : first + count]
        return sum(r.trajectory_staleness.mean * r.samples for r in kept) / sum(r.samples for r in kept)


class _Text:
    """Two-token prompts; a response decodes to its length."""

    stop_ids = (1,)

    def render(self, prompt: str, template: str) -> tuple[int, ...]:
        return (2, 3)

    def decode(self, ids: Sequence[int]) -> str:
        return str(len(ids))


def settings(folder: str, steps: int, mode: str) -> Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": folder, "steps": steps},
        "model": {"path": "none"},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"group_size": GROUP, "max_response_tokens": 1500},
        "generator": {"slots": SLOTS},
        "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": BUDGET},
        "control": {"mode": mode},
        "evaluation": {"before": False, "after": False},
        "checkpoint": {"every_steps": 10_000},
    }
    return validate_experiment(raw, "benchmark")


def run(
    load_at: Callable[[int], Load], *, steps: int, seed: int, knobs: Knobs | None = None, mode: str = "off"
) -> Result:
    """One run to its end; ``load_at`` gives the load at each version. ``knobs``: held all the time."""
    with tempfile.TemporaryDirectory() as folder:
        return run_virtual(lambda clock: _run(clock, settings(folder, steps, mode), load_at, seed, knobs))


async def _run(
    clock: Clock, experiment: Experiment, load_at: Callable[[int], Load], seed: int, knobs: Knobs | None
) -> Result:
    lines: list[LedgerLine] = []

    def load() -> Load:
        return load_at(trainer.version)

    def length_of(request: GenerationRequest) -> int:
        drawn = random.Random(f"{seed}-{request.sampling.seed}").lognormvariate(3.4, 0.8)
        return max(1, round(drawn * load().length))

    def step_s(batch: TrainBatch) -> float:
        tokens = sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)
        return 0.05 + tokens * load().train_token_s

    def reward(task: Task, response: str) -> float:
        easy = random.Random(f"{seed}-{task.task_id}").random() < load().solved
        return 1.0 if easy else float(int(response) % 2)

    trainer = FakeTrainer(clock, step_s, publish_s=0.01)
    actors = Actors(
        generator=FakeGenerator(
            clock,
            slots=experiment.generator.slots,
            token_s=lambda running: 0.006 + 0.0002 * running,
            length_of=length_of,
            prefill_s=lambda _: load().tool_s,
            update_s=0.005,
        ),
        trainer=trainer,
        verifier=FakeVerifier(reward, clock, latency_s=lambda *_: load().verify_s),
        tokenizer=_Text(),  # type: ignore[arg-type]  (stands in for a tokenizer folder)
        train_tasks=[Task(task_id=str(index), prompt=str(index)) for index in range(200)],
        record=lines.append,
    )
    with ExitStack() as stack:
        one = assemble(experiment, actors, clock, Path(experiment.run.directory) / "buffer.db", stack)
        if knobs is not None:
            one.context.state.knobs = knobs
        for actor in (actors.generator, actors.trainer, actors.verifier):
            await actor.start()  # type: ignore[attr-defined]
        await one.begin()
        await one.train()
        await one.conclude()
    steps = [line for line in lines if isinstance(line, StepRecord)]
    return Result(steps, [line for line in lines if isinstance(line, EventRecord) and line.event == "control"])


def grid(quick: bool) -> list[Knobs]:
    """Fixed knobs to compare with."""
    most = GROUPS_PER_STEP * (BUDGET + 1)
    opens = (None, most // 2) if quick else (None, most * 2 // 3, most * 4 // 10)
    concurrent = (72, 36) if quick else (72, 48, 28)
    return [
        Knobs(open_groups=a, concurrent_rollouts=b, steps_per_publish=1)
        for a, b in itertools.product(opens, concurrent)
    ]


@dataclass(frozen=True)
class Recovery:
    """A scenario's outcome."""

    name: str
    optimum_per_s: float
    knobs: Knobs
    recovered: bool
    steps_to_recover: int | None  # None: never
    share: float  # of the optimum, from the limit on
    staleness: float
    optimum_staleness: float
    unchanged_share: float  # of the optimum, with the knobs as the controller had them before the change


def measure(scenario: Scenario, *, seeds: int, settle: int, count: int, quick: bool) -> tuple[Recovery, Result]:
    """``settle``: steps before the change. ``count``: steps that a rate is measured over."""
    change_at = settle

    def drifting(version: int) -> Load:
        spike = scenario.back_after
        if spike is not None:
            return replace(scenario.before, verify_s=0.05) if 0 <= version - change_at < spike else scenario.before
        return scenario.before if version < change_at else scenario.after

    start = change_at + (scenario.back_after or 0)
    steps = start + 2 * LIMIT_STEPS + count + 2 * (BUDGET + 1)  # the last ones drain the queue
    late = start + LIMIT_STEPS

    def fixed(knobs: Knobs) -> list[Result]:
        return [run(drifting, steps=steps, seed=seed, knobs=knobs) for seed in range(seeds)]

    tried = {knobs: fixed(knobs) for knobs in grid(quick)}
    seldom = [msgspec.structs.replace(_best(tried, late, count), steps_per_publish=k) for k in (2, 3)]
    tried |= {knobs: fixed(knobs) for knobs in seldom}
    best = _best(tried, late, count)
    runs = [run(drifting, steps=steps, seed=seed, mode="act") for seed in range(seeds)]
    shares = [_rate(runs, start + s, count) / _rate(tried[best], start + s, count) for s in range(2 * LIMIT_STEPS)]
    reached = next((s for s, share in enumerate(shares) if share >= ENOUGH), None)
    held = [run(drifting, steps=steps, seed=seed, knobs=_knobs_at(one, change_at - 1)) for seed, one in enumerate(runs)]
    recovery = Recovery(
        name=scenario.name,
        optimum_per_s=_rate(tried[best], late, count),
        knobs=best,
        recovered=reached is not None and reached <= LIMIT_STEPS,
        steps_to_recover=reached,
        share=shares[LIMIT_STEPS],
        staleness=statistics.fmean(one.staleness(late, count) for one in runs),
        optimum_staleness=statistics.fmean(one.staleness(late, count) for one in tried[best]),
        unchanged_share=_rate(held, late, count) / _rate(tried[best], late, count),
    )
    return recovery, runs[0]


def _rate(runs: Sequence[Result], first: int, count: int) -> float:
    return statistics.fmean(one.rate(first, count) for one in runs)


def _best(tried: dict[Knobs, list[Result]], first: int, count: int) -> Knobs:
    return max(tried, key=lambda knobs: _rate(tried[knobs], first, count))


def _knobs_at(result: Result, step: int) -> Knobs:
    flow = result.steps[step].flow
    return Knobs(
        open_groups=flow.open_groups or None,
        concurrent_rollouts=flow.concurrent_rollouts,
        steps_per_publish=flow.steps_per_publish,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarse grid, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--log", action="store_true", help="what the controller did, of the first seed")
    options = parser.parse_args()
    seeds, settle, count = (1, 40, 40) if options.quick else (options.seeds, 40, 60)
    results: dict[str, dict[str, object]] = {}
    print("scenario            optimum/s  share  recovered  steps  staleness (optimum's)  left alone  best fixed knobs")
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        found, one = measure(scenario, seeds=seeds, settle=settle, count=count, quick=options.quick)
        best = found.knobs
        print(
            f"{found.name:<20}{found.optimum_per_s:9.1f}{found.share:7.2f}{found.recovered!s:>11}"
            f"{'never' if found.steps_to_recover is None else found.steps_to_recover:>7}"
            f"{found.staleness:11.2f} ({found.optimum_staleness:.2f}){found.unchanged_share:12.2f}"
            f"     {best.open_groups or 'all'}/{best.concurrent_rollouts}/{best.steps_per_publish}",
            flush=True,
        )
        if options.log:
            for action in one.actions:
                print(f"      step {action.step}: {action.detail}")
        results[found.name] = {
            "recovered": found.recovered,
            "steps_to_recover": found.steps_to_recover,
            "share": round(found.share, 4),
            "unchanged_share": round(found.unchanged_share, 4),
        }
    print(json.dumps({"recovered": all(r["recovered"] for r in results.values()), "limit_steps": LIMIT_STEPS,
                      "scenarios": results}))  # fmt: skip
    return 0 if all(r["recovered"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

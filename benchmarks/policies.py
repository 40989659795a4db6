"""What each policy of the queue does to a real run: rates, waits, staleness, waste, length bias, and what was learnt.

    python benchmarks/policies.py [--quick] [--rounds 2] [--pairs 6]

The quickstart's task and cold start (responses: median 16 tokens, p99 nine times that), batches of 32 samples, one core
for the generator and one for the trainer; every policy trains the same number of samples from the same weights. First
a table over all policies, ``--rounds`` times each, in turns; then, because the best of several is the luckiest as well,
``--pairs`` times side by side: the controller, the best of the fixed ones, the asynchronous one whose knobs it begins
with, and the synchronous one. Policies that train shorter samples (length bias by scheduling or pruning above the
controller's own limit, or fewer than 95 % of the asynchronous one's tokens a sample) are shown, but are no rivals.

Columns: trained samples/s [range], waits of trainer and generator, mean trajectory staleness (versions), tokens wasted,
length bias by scheduling, filter and pruning, response tokens of a trained sample, solve rate as sampled in the last
quarter and held out, others' cores, speed of the machine's cores meanwhile (machine_speed.py: it swings).

The last line is one JSON object: ``controller_vs_best_fixed``, ``controller_vs_asynchronous``, ``controller_vs_sync``
are ratios of trained samples/s within a pair at equal speed of the machine, [mean, its lower 95 % bound (one-sided
Student's t)]; ``as_timed`` has them without that correction. Rates count groups with a non-zero advantage alone: the
others are filtered. The first ``--warm`` steps are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from machine_speed import Speedometer
from parts.pipeline_machine import load
from parts.trained_run import headway, train_alone

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import FILE_NAME, read_ledger

SYNCHRONOUS, PLAIN, CONTROLLER = "synchronous", "asynchronous", "controller"
ASYNCHRONOUS = ("--queue.budget=8",)
POLICIES: dict[str, tuple[str, ...]] = {
    SYNCHRONOUS: ("--queue.budget=0",),
    "sync, discard": ("--queue.budget=0", "--queue.oversampling=2.0", "--queue.surplus=discard"),
    PLAIN: ASYNCHRONOUS,
    "async, small budget": ("--queue.budget=2",),
    "oversample, continue": (*ASYNCHRONOUS, "--queue.oversampling=4.0"),
    "oversample, park": (*ASYNCHRONOUS, "--queue.oversampling=4.0", "--queue.surplus=park"),
    "oversample, discard": (*ASYNCHRONOUS, "--queue.oversampling=4.0", "--queue.surplus=discard"),
    "pruning": (*ASYNCHRONOUS, '--pruning.pruners=[{kind="length",tokens=96},{kind="repetition"}]'),
    CONTROLLER: (*ASYNCHRONOUS, "--control.mode=act"),
}
COMMON = (
    "--queue.groups_per_step=4",
    "--generator.slots=8",  # as fast as the trainer: where one side is slower anyway, matching gains less
    "--trainer.learning_rate=1.25e-4",  # learns the same at every age: at 2.5e-4 old samples make it forget
    "--trainer.schedule=constant",
    "--checkpoint.every_steps=100000",
    "--evaluation.every_s=100000",
    "--evaluation.stop_at_solve_rate=1.0",
    "--evaluation.test=after",
    "--run.time_limit_s=100000",
    "--ledger.trackers=[]",
)
BIAS_LIMIT = 0.1  # KS; as the controller's
SHORTER_LIMIT = 0.95  # KS hardly sees a tail that is cut off, and the tail is most of the work
T_95 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.90, 8: 1.86, 9: 1.83}  # one-sided, by freedom


@dataclass(frozen=True)
class Outcome:
    """One run, its warm-up left out."""

    samples_per_s: float  # trained
    trainer_wait: float  # share of the time
    generator_wait: float
    staleness: float  # mean trajectory staleness, versions
    wasted: float  # share of the response tokens that ended untrained
    scheduling_ks: float  # length bias by cause
    filter_ks: float
    pruning_ks: float
    sample_tokens: float  # response tokens of a trained sample
    solve_rate: float  # of the responses sampled in the last quarter
    held_out: float  # of the last weights, on the test tasks
    foreign_cores: float  # kept busy by others meanwhile
    machine: float  # mean speed of its cores in those steps, 1 as usual


def run(folder: Path, start: Path, policy: str, seed: int, steps: int, warm: int, speed: Speedometer) -> Outcome:
    """Train once with ``policy``."""
    own = (f"--run.seed={seed}", f"--run.steps={steps}")
    foreign = train_alone(folder, start, policy, (*own, *COMMON, *POLICIES[policy]))
    return outcome_of(folder, warm, foreign, speed)


def outcome_of(folder: Path, warm: int, foreign: float, speed: Speedometer) -> Outcome:
    lines = list(read_ledger(folder))
    written_s = (folder / FILE_NAME).stat().st_mtime - time.time() + time.monotonic()  # the last line
    began_s = written_s - lines[-1].time_s
    every = [line for line in lines if isinstance(line, StepRecord)]
    steps = every[warm:]
    elapsed_s = sum(step.step_s for step in steps)
    tokens: dict[str, int] = {}
    for step in steps:
        for ending, count in step.tokens.ended.items():
            tokens[ending] = tokens.get(ending, 0) + count
    last = every[-max(1, len(every) // 4) :]
    rewards = [step.rewards for step in last if step.rewards]
    groups = [sum(found.solve_rate_histogram) for found in rewards]
    after = next(line for line in lines if isinstance(line, EvaluationRecord) and line.phase == "after")
    return Outcome(
        samples_per_s=sum(step.samples for step in steps) / elapsed_s,
        trainer_wait=sum(step.trainer_wait_s for step in steps) / elapsed_s,
        generator_wait=sum(step.generator_wait_ratio * step.step_s for step in steps) / elapsed_s,
        staleness=statistics.mean(step.trajectory_staleness.mean for step in steps),
        wasted=1.0 - tokens.get("trained", 0) / max(1, sum(tokens.values())),
        scheduling_ks=every[-1].length_bias.scheduling_ks,
        filter_ks=every[-1].length_bias.filter_ks,
        pruning_ks=every[-1].length_bias.pruning_ks,
        sample_tokens=tokens.get("trained", 0) / sum(step.samples for step in steps),
        solve_rate=sum(s.solve_rate * n for s, n in zip(rewards, groups, strict=True)) / max(1, sum(groups)),
        held_out=after.solve_rate,
        foreign_cores=foreign,
        machine=speed.mean(began_s + every[warm - 1].time_s, began_s + every[-1].time_s),
    )


def show(policy: str, found: list[Outcome]) -> None:
    """One row of the table: medians, and the range of the rate."""

    def middle(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    rates = [one.samples_per_s for one in found]
    print(
        f"{policy:22} {middle('samples_per_s'):6.0f} [{min(rates):.0f}-{max(rates):.0f}]",
        f"waits {middle('trainer_wait'):4.0%} {middle('generator_wait'):4.0%}",
        f"stale {middle('staleness'):4.1f}",
        f"wasted {middle('wasted'):4.0%}",
        f"KS {middle('scheduling_ks'):.3f} {middle('filter_ks'):.3f} {middle('pruning_ks'):.3f}",
        f"tokens {middle('sample_tokens'):4.1f}",
        f"solve {middle('solve_rate'):.3f} {middle('held_out'):.3f}",
        f"others {middle('foreign_cores'):.2f}",
        f"machine {middle('machine'):.2f}",
        sep="  ",
        flush=True,
    )


def all_lengths(found: list[Outcome], plain: list[Outcome]) -> bool:
    """Whether samples are about as long as those of ``plain``: what trains short ones alone is fast, but no rival."""
    bias = statistics.median(max(one.scheduling_ks, one.pruning_ks) for one in found)
    tokens, of_plain = (statistics.median(one.sample_tokens for one in runs) for runs in (found, plain))
    return bias <= BIAS_LIMIT and tokens >= SHORTER_LIMIT * of_plain


def at_usual_speed(one: Outcome) -> float:
    """Samples/s that the machine would have shown had it been as fast as usual."""
    return one.samples_per_s / one.machine


def lower_bound(ratios: list[float]) -> float:
    """Lower 95 % confidence bound of the mean (one-sided Student's t); the least where there are fewer than three."""
    if len(ratios) < 3:
        return min(ratios)
    freedom = len(ratios) - 1
    return statistics.mean(ratios) - T_95.get(freedom, 1.7) * statistics.stdev(ratios) / math.sqrt(len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-policies"))
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400, help="of 32 samples")
    parser.add_argument("--warm", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one short round and pair: to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.pairs, arguments.steps, arguments.warm = 1, 1, 6, 2
    start: Path = arguments.directory / "start"
    headway("quickstart", str(start), "--cold-start-only", quiet=True)
    folder: Path = arguments.directory / "run"
    print(f"load averages at the start: {load()}", flush=True)

    with Speedometer() as speed:
        compare(
            arguments, lambda policy, seed: run(folder, start, policy, seed, arguments.steps, arguments.warm, speed)
        )


def compare(arguments: argparse.Namespace, measure: Callable[[str, int], Outcome]) -> None:
    """The table, then the pairs, then the ratios."""
    table: dict[str, list[Outcome]] = {policy: [] for policy in arguments.policies}
    for number in range(arguments.rounds):
        order = arguments.policies if number % 2 == 0 else arguments.policies[::-1]
        for policy in order:
            table[policy].append(measure(policy, number))
            print(f"  round {number + 1}: ", end="")
            show(policy, table[policy][-1:])
    print()
    for policy, found in table.items():
        show(policy, found)
    plain = table[PLAIN] if PLAIN in table else [one for found in table.values() for one in found]
    fixed = [policy for policy in table if policy != CONTROLLER and all_lengths(table[policy], plain)]
    best = max(fixed, key=lambda policy: statistics.median(map(at_usual_speed, table[policy])))
    rivals = list(dict.fromkeys((CONTROLLER, best, PLAIN, SYNCHRONOUS)))
    print(f"\nagain, side by side ({best} was the best): {', '.join(rivals)}")
    pairs: list[dict[str, Outcome]] = []
    for number in range(arguments.pairs if CONTROLLER in table else 0):
        order = rivals if number % 2 == 0 else rivals[::-1]
        pairs.append({policy: measure(policy, 100 + number) for policy in order})
        for policy, one in pairs[-1].items():
            print(f"  pair {number + 1}: ", end="")
            show(policy, [one])

    def ratio(rival: str, rate: Callable[[Outcome], float] = at_usual_speed) -> list[float]:
        found = [rate(pair[CONTROLLER]) / rate(pair[rival]) for pair in pairs]
        return [statistics.mean(found), lower_bound(found)] if found else []

    result = {
        "policies": {policy: [asdict(one) for one in found] for policy, found in table.items()},
        "best_fixed": best,
        "controller_vs_best_fixed": ratio(best),
        "controller_vs_asynchronous": ratio(PLAIN),
        "controller_vs_sync": ratio(SYNCHRONOUS),
        "as_timed": {rival: ratio(rival, lambda one: one.samples_per_s) for rival in rivals[1:]},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

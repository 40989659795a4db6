"""Run D: partial rollouts in stateful sandboxes."""

from __future__ import annotations

import math
import statistics

from benchmarks.case_studies.a import REPLICA
from benchmarks.case_studies.hardware import H200, QWEN3_235B, trainer_overrides
from benchmarks.case_studies.published import (
    D_BATCH,
    D_DOLLARS_PER_HOUR,
    D_STEPS,
    D_TINKER,
    D_TRAINER_GPUS,
    DOLLARS_PER_GPU_HOUR,
    TINKER_DOLLARS_PER_MTOK,
)
from benchmarks.case_studies.runs import CaseRun, Figure, Policy, figures_table, policies_table, run_case

WAIT = 0.60  # reported share of the time that the trainer waits
SEEDS = (0, 1, 2)
AFTER_UPDATE = (6, 11, 16)  # steps that generate after the updates at 5, 10 and 15
SINGLE_STEP = "rollout time of run D, step"
_GUESS = 0.4


def trainer_fraction() -> float:
    """What the trainer achieves when it waits for the reported share of the mean step."""
    seconds = (1 - WAIT) * statistics.mean(row[2] for row in D_STEPS)
    tokens = D_BATCH * statistics.mean(row[1] for row in D_STEPS)
    return 6 * QWEN3_235B.active_parameters * tokens / (seconds * D_TRAINER_GPUS * H200.flops_per_s["bfloat16"])


def simulate_run(fraction: float, seed: int, *keys: str) -> CaseRun:
    return run_case(
        "d",
        [
            *REPLICA.overrides(fraction),
            *trainer_overrides(QWEN3_235B, H200, D_TRAINER_GPUS, trainer_fraction()),
            f"run.seed={seed}",
            *keys,
        ],
        steps=19,
    )


def mean_over(runs: list[CaseRun], parity: int) -> float:
    """Mean time of the even (0) or odd (1) steps, the first left out."""
    return statistics.mean(run.mean_step_s(lambda step: step % 2 == parity) for run in runs)


def published_mean(parity: int) -> float:
    return statistics.mean(row[2] for step, row in enumerate(D_STEPS) if step > 0 and step % 2 == parity)


def fit(*keys: str, rounds: int = 3) -> float:
    """The generator's achieved fraction at which the even steps take as long as published: a secant in logarithms."""
    target = math.log(published_mean(0))
    points: list[tuple[float, float]] = []
    guess = math.log(_GUESS)
    for _ in range(rounds):
        runs = [simulate_run(math.exp(guess), seed, *keys) for seed in SEEDS]
        points.append((guess, math.log(mean_over(runs, 0))))
        if len(points) == 1:
            guess += points[0][1] - target
            continue
        (x0, y0), (x1, y1) = points[-2:]
        slope = (y1 - y0) / (x1 - x0) if abs(x1 - x0) > 1e-9 else -1.0
        guess = x1 + (target - y1) / min(-0.1, slope)
    return math.exp(guess)


def identities() -> list[Figure]:
    rates = TINKER_DOLLARS_PER_MTOK

    def dollars(response: float, sequence: float) -> float:
        prompt = (sequence - response) * rates["prefill"]
        return D_BATCH * (prompt + response * rates["sample"] + sequence * rates["train"]) / 1e6

    steps = zip(D_TINKER, D_STEPS, strict=True)
    tinker = [(row[3], dollars(response, sequence)) for row, (response, sequence, _) in steps]
    published, computed = max(tinker, key=lambda pair: abs(pair[1] / pair[0] - 1))
    return [
        Figure(name="dollars per hour", published=D_DOLLARS_PER_HOUR, computed=96 * DOLLARS_PER_GPU_HOUR,
               label="identity", unit="$", note="96 GPUs"),
        Figure(name="Tinker's price of a step (worst of 20)", published=published, computed=computed, label="identity",
               unit="$", note="list prices x lengths"),
    ]  # fmt: skip


def after_update(times: list[float]) -> float:
    """Time of the steps after an update against the mean; ``times``: of steps 1, 2, ..."""
    return statistics.mean(times[step - 1] for step in AFTER_UPDATE) / statistics.mean(times)


def section() -> tuple[str, list[Figure]]:
    """(Markdown, all figures)."""
    fraction = fit()
    runs = [simulate_run(fraction, seed) for seed in SEEDS]
    waits = statistics.mean(run.trainer_wait for run in runs)
    times = [[step.step_s for step in run.steps] for run in runs]  # of steps 1 to 19
    odd = mean_over(runs, 1)
    figures = [
        Figure(name="mean rollout time, even steps", published=published_mean(0), computed=mean_over(runs, 0),
               label="fitted", unit="s"),
        Figure(name="mean rollout time, odd steps", published=published_mean(1), computed=odd, label="predicted",
               unit="s"),
        Figure(name="trainer waits", published=WAIT, computed=waits, label="fitted"),
        *(
            Figure(name=f"{SINGLE_STEP} {step}", published=D_STEPS[step][2], computed=odd, label="predicted",
                   unit="s", note="lengths say nothing: the mean")
            for step in range(1, 20, 2)
        ),
    ]  # fmt: skip
    assumed: list[str] = []
    for name, keys in (
        ("tools of 1 s", ['workload.tool_s={kind="lognormal",median=1,p99=12}']),
        ("tools of 15 s", ['workload.tool_s={kind="lognormal",median=15,p99=180}']),
        ("24 groups in flight", ["queue.oversampling=3"]),
    ):
        run = simulate_run(fraction, 0, *keys)
        assumed.append(f"{name}: {run.mean_step_s():.0f} s")
    policies = [Policy(name="as published: a full batch and an update park what runs", run=runs[0])]
    for name, keys in (
        ("updates keep what runs, surplus continues", ("queue.surplus=continue", "generator.update_mode=keep")),
        ("... and KV is kept between turns",
         ("queue.surplus=continue", "generator.update_mode=keep", "environment.keep_kv=true")),
        ("... and every version is published",
         ("queue.surplus=continue", "generator.update_mode=keep", "environment.keep_kv=true",
          "weights.steps_per_publish=1", "queue.budget=5")),
        ("... and four batches in flight",
         ("queue.surplus=continue", "generator.update_mode=keep", "environment.keep_kv=true",
          "weights.steps_per_publish=1", "queue.budget=5", "queue.oversampling=4")),
        ("as published, but sandboxes staler than one version begin anew", ("queue.max_environment_staleness=1",)),
    ):  # fmt: skip
        policies.append(Policy(name=name, run=simulate_run(fraction, 0, *keys)))
    counts = runs[0].outcome.environment
    slow = statistics.pstdev(t for run in times for t in run) / statistics.mean(t for run in times for t in run)
    text = _TEXT.format(
        fraction=fraction,
        trainer=trainer_fraction(),
        figures=figures_table(figures),
        identities=figures_table(identities()),
        assumed="; ".join(assumed),
        policies=policies_table(policies),
        resumed=counts["resumed_states"],
        staleness=counts["state_staleness_sum"] / max(1.0, counts["resumed_states"]),
        worst=counts["state_staleness_max"],
        after=after_update([row[2] for row in D_STEPS[1:]]),
        simulated_after=statistics.mean(map(after_update, times)),
        variation=statistics.pstdev(row[2] for row in D_STEPS) / statistics.mean(row[2] for row in D_STEPS),
        simulated_variation=slow,
        correlation=statistics.correlation([row[0] for row in D_STEPS], [row[2] for row in D_STEPS]),
        correlation_sequence=statistics.correlation([row[1] for row in D_STEPS], [row[2] for row in D_STEPS]),
    )
    return text, [*figures, *identities()]


_TEXT = """\
## D: partial rollouts, stateful sandboxes

64 H200 generate (8 replicas of 8), 32 train; 64 samples a step, weights every 5 steps, about 12 tool calls and
12,232 sampled tokens a rollout. Scenario: `examples/case_studies/d.toml`.

Fitted: **the generator achieves {fraction:.3f} of its bandwidth and FLOP/s** (mean of the even steps) and **the
trainer {trainer:.4f} of its FLOP/s** (from the reported wait). Assumed, because it isn't reported: two batches in
flight, tools of 5 s (p99 60 s), sandboxes up after 30 s, replies of 500 tokens. What else these could be changes
the mean step: {assumed}; the fitted fraction would absorb it, so it means little by itself.

{figures}

**Lengths don't explain the times.** Over the 20 published steps the correlation of rollout time with response
length is {correlation:+.2f}, with sequence length {correlation_sequence:+.2f}, and the times vary by
{variation:.0%} of their mean (simulated, from tails and parkings alone: {simulated_variation:.0%}). A single step
is therefore predicted as the mean. Why single steps are slow can't be told from what is reported. The three steps
after a weight update, when everything that was parked is prefilled again (partials pile up at 5, 10, 15), took
{after:.2f} times the mean, simulated {simulated_after:.2f} times; of three steps that vary so much this is no figure
to count.

{identities}

### With Headway's policies

In the simulation of the published policy {resumed:.0f} of the rollouts' sandboxes were resumed, holding the edits
of a version {staleness:.1f} versions old in the mean and {worst:.0f} at worst, which is what the low resolve rate
is suspected of.

{policies}
"""

"""Run A: long responses, early exploration; oversampling that discards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.case_studies.hardware import H200, QWEN3_235B, ReplicaHardware, trainer_overrides
from benchmarks.case_studies.published import (
    A_BATCH,
    A_COSTS,
    A_DOLLARS_PER_HOUR,
    A_STEPS,
    A_TINKER,
    A_TRAINER_GPUS,
    DOLLARS_PER_GPU_HOUR,
    TINKER_DOLLARS_PER_MTOK,
)
from benchmarks.case_studies.runs import CaseRun, Figure, Policy, figures_table, policies_table, run_case

REPLICA = ReplicaHardware(model=QWEN3_235B, device=H200, devices=8, weight_bytes_per_parameter=1.0, kv_copies=2)
MFU = 0.105  # reported; the fitted fraction of the trainer
CONSUMPTION, DELIVERED, WAIT = 2.75, 1.95, 0.30  # reported: samples/s, samples/s, share
FITTED_STEPS = (0, 2, 4, 6, 8)
_GUESS = 0.4  # generator fraction at which the fit is begun; times are inverse to it while the trainer waits
_SPREAD = 2.2  # p99 / median of response lengths: not reported
_MEDIANS = {1.5: 0.992, 2.2: 0.977, 3.0: 0.955}  # median / reported mean of what is trained, by spread


def scenario(fraction: float, prompt: float, response: float, spread: float = _SPREAD) -> list[str]:
    """Keys of run A with these mean lengths, the generator at ``fraction``."""
    median = response * _MEDIANS[spread]
    lengths = f'{{kind="lognormal",median={median},p99={median * spread},most={32768 - prompt}}}'
    return [
        *REPLICA.overrides(fraction),
        *trainer_overrides(QWEN3_235B, H200, A_TRAINER_GPUS, MFU),
        f"workload.prompt_tokens={prompt}",
        f"workload.response_tokens={lengths}",
    ]


def simulate_step(step: int, fraction: float, spread: float = _SPREAD) -> CaseRun:
    """A stationary run with the lengths of one published step."""
    prompt, response, _, _ = A_STEPS[step]
    return run_case("a", scenario(fraction, prompt, response, spread), steps=4)


def fit(steps: Sequence[int] = FITTED_STEPS, spread: float = _SPREAD) -> float:
    """The generator's achieved fraction: the geometric mean of what each of ``steps`` asks for."""
    ratios = [simulate_step(step, _GUESS, spread).mean_step_s() / A_STEPS[step][3] for step in steps]
    return _GUESS * math.exp(sum(map(math.log, ratios)) / len(ratios))


def identities() -> list[Figure]:
    """Figures that follow arithmetically from other reported ones: the largest difference over the ten steps."""
    found: list[Figure] = []

    def worst(what: str, pairs: list[tuple[float, float]], unit: str, note: str) -> None:
        published, computed = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
        found.append(Figure(name=what, published=published, computed=computed, label="identity", unit=unit, note=note))

    rows = list(zip(A_COSTS, A_STEPS, strict=True))
    costs = [(cost[0], step[3] / 3600 * A_DOLLARS_PER_HOUR) for cost, step in rows]
    worst("dollars of a step (worst of 10)", costs, "$", "256 GPUs x $1.59/h x rollout seconds")
    tokens = [(float(cost[1]), float(A_BATCH * step[2])) for cost, step in rows]
    worst("tokens of a step (worst of 10)", tokens, "tokens", "512 x mean sequence")
    price = [(row[2], 1e6 * row[0] / row[1]) for row in A_COSTS]
    worst("dollars per million tokens (worst of 10)", price, "$", "the two above")
    rates = TINKER_DOLLARS_PER_MTOK
    tinker = [
        (row[3], A_BATCH * (prompt * rates["prefill"] + response * rates["sample"] + sequence * rates["train"]) / 1e6)
        for row, (prompt, response, sequence, _) in zip(A_TINKER, A_STEPS, strict=True)
    ]
    worst("Tinker's price of a step (worst of 10)", tinker, "$", "list prices x lengths")
    hourly = 256 * DOLLARS_PER_GPU_HOUR
    found.append(
        Figure(name="dollars per hour", published=A_DOLLARS_PER_HOUR, computed=hourly, label="identity", unit="$")
    )
    found.append(
        Figure(name="trainer waits", published=WAIT, computed=1 - DELIVERED / CONSUMPTION, label="identity",
               note="1 - delivered / consumption")
    )  # fmt: skip
    return found


def step_figures(runs: Sequence[CaseRun]) -> list[Figure]:
    return [
        Figure(
            name=f"rollout time, step {step}",
            published=A_STEPS[step][3],
            computed=run.mean_step_s(),
            label="fitted" if step in FITTED_STEPS else "predicted",
            unit="s",
        )
        for step, run in enumerate(runs)
    ]


def predicted_rates(run: CaseRun) -> list[Figure]:
    """``run``: at the mean lengths."""
    return [
        Figure(name="MFU while computing", published=MFU, computed=run.mfu_compute, label="fitted"),
        Figure(name="consumption", published=CONSUMPTION, computed=run.consumption_per_s,
               label="identity", unit="samples/s", note="the MFU, the lengths and the chip's FLOP/s"),
        Figure(name="delivered", published=DELIVERED, computed=run.samples_per_s, label="contradictory",
               unit="samples/s", note="the step table alone says 512 / 576 s = 0.89"),
    ]  # fmt: skip


def section() -> tuple[str, list[Figure]]:
    """(Markdown, all figures)."""
    fraction = fit()
    runs = [simulate_step(step, fraction) for step in range(len(A_STEPS))]
    mean = scenario(fraction, 5591, 12704)
    published = run_case("a", mean, steps=8)
    steps, rates = step_figures(runs), predicted_rates(published)
    spreads: list[str] = []
    for spread in (1.5, 3.0):
        other = fit(spread=spread)
        errors = [
            simulate_step(step, other, spread).mean_step_s() / A_STEPS[step][3] - 1
            for step in range(10)
            if step not in FITTED_STEPS
        ]
        spreads.append(
            f"p99 = {spread:g} x median: fraction {other:.2f}, errors {min(errors):+.0%} to {max(errors):+.0%}"
        )
    policies = [Policy(name="as published: 80 groups in flight, surplus discarded", run=published)]
    for name, keys in (
        ("surplus continued: 80 groups in flight", ["queue.surplus=continue"]),
        ("surplus continued: 160 groups in flight", ["queue.surplus=continue", "queue.oversampling=5"]),
        ("surplus continued: 320 groups in flight", ["queue.surplus=continue", "queue.oversampling=10"]),
    ):
        policies.append(Policy(name=name, run=run_case("a", [*mean, *keys], steps=12)))
    figures = [*identities(), *steps, *rates]
    length = max(abs(run.trained_length / A_STEPS[step][1] - 1) for step, run in enumerate(runs))
    text = _TEXT.format(
        fraction=fraction,
        identities=figures_table(identities()),
        steps=figures_table(steps),
        rates=figures_table(rates),
        spreads="; ".join(spreads),
        policies=policies_table(policies),
        length=length,
    )
    return text, figures


_TEXT = """\
## A: long responses, early exploration

192 H200 generate (24 replicas of 8, FP8 weights), 64 train; batches of 32 groups of 16. Scenario:
`examples/case_studies/a.toml`.

Given: lengths of each step, batch, group, budget 16, and that 60 % of what is dispatched is discarded, so 80 groups
are in flight for a batch of 32, and the 48 that are unfinished when it is full are thrown away. Fitted: **the
generator achieves {fraction:.3f} of its bandwidth and FLOP/s** (on steps 0, 2, 4, 6, 8) and **the trainer 0.105 of
its FLOP/s** (the reported MFU). Each step is simulated as a stationary run with that step's lengths; the lengths
trained on differ from the published ones by at most {length:.1%}.

{steps}

What makes the times grow faster than the lengths is the KV that each decode step reads: a step of the table takes
about as long as its longest group's responses, times weights plus KV of all that run. The spread of the lengths is
not reported; p99 = 2.2 x median is assumed. Fitted again for others: {spreads} (predicted steps).

{rates}

**The facts contradict each other here.** Consumption of 2.75 samples/s, 10.5 % MFU and the lengths agree to a
percent: a step's computation takes 186 s. But 1.95 samples/s delivered is a batch every 263 s, and the table has
one every 576 s (371 to 688 s), which is 0.89 samples/s and would have the trainer wait for 68 %, not 30 %. If the
table's times are right as step times (its dollars assume that), the run delivered 0.89; if 1.95 is right, the times
are those of 2.2 overlapping batches and a step cost less than half of the published dollars. The simulation, made
of the table, sides with the table.

{identities}

### With Headway's policies

At the mean lengths; everything else as above. Discarding keeps what is trained fresh and short; what continues is
trained later, within the budget of 16 steps.

{policies}
"""

"""Run B: frequent tools, easy tasks."""

from __future__ import annotations

from benchmarks.case_studies.hardware import H200, ModelShape, ReplicaHardware, trainer_overrides
from benchmarks.case_studies.runs import CaseRun, Figure, Policy, figures_table, policies_table, run_case

WAIT, CONSUMED_TO_DELIVERED = 0.74, 5.0  # reported
TRAINER = 0.105  # achieved fraction: run A's, as none is reported
# Compressed KV of about 90 kB a token is assumed: 78 layers x 576 values of 2 bytes.
GLM_5 = ModelShape(name="GLM-5", parameters=744e9, active_parameters=40e9, kv_bytes_per_token=78 * 576 * 2)
REPLICA = ReplicaHardware(model=GLM_5, device=H200, devices=8, weight_bytes_per_parameter=1.0)
_GUESS = 0.5
_STEPS = 5


def simulate_run(fraction: float, *keys: str) -> CaseRun:
    described = [
        *REPLICA.overrides(fraction),
        "hardware.generator.devices_per_replica=16",  # as many again prefill
        *trainer_overrides(GLM_5, H200, 16, TRAINER),
    ]
    return run_case("b", [*described, *keys], steps=_STEPS)


def fit(rounds: int = 2) -> float:
    """The generator's fraction at which the trainer waits as reported: its share of work is nearly proportional."""
    fraction = _GUESS
    for _ in range(rounds):
        fraction *= (1 - WAIT) / (1 - simulate_run(fraction).trainer_wait)
    return fraction


def section() -> tuple[str, list[Figure]]:
    """(Markdown, all figures)."""
    fraction = fit()
    run = simulate_run(fraction)
    ratio = run.consumption_per_s / run.samples_per_s
    figures = [
        Figure(name="trainer waits", published=WAIT, computed=run.trainer_wait, label="fitted"),
        Figure(name="consumption / delivered", published=CONSUMED_TO_DELIVERED, computed=ratio, label="contradictory",
               note="1 / (1 - wait)"),
    ]  # fmt: skip
    early = [
        'workload.turns={kind="lognormal",median=19,p99=36}',
        'workload.turn_tokens={kind="lognormal",median=110,p99=500}',
    ]
    policies = [
        Policy(name="as published: 55 % of the tasks all-solved, 51 tool calls", run=run),
        Policy(name="early in the run: 20 tool calls, a third of the tokens", run=simulate_run(fraction, *early)),
        Policy(
            name="late, and a curriculum leaves 10 % all-solved",
            run=simulate_run(fraction, "workload.trivial_share=0.1"),
        ),
        Policy(name="late, and eight batches in flight", run=simulate_run(fraction, "queue.oversampling=8")),
        Policy(
            name="late, with both",
            run=simulate_run(fraction, "queue.oversampling=8", "workload.trivial_share=0.1"),
        ),
    ]
    text = _TEXT.format(
        fraction=fraction, figures=figures_table(figures), policies=policies_table(policies), trainer=TRAINER
    )
    return text, figures


_TEXT = """\
## B: frequent tools, easy tasks

128 H200 generate (two replicas of 64, half of each prefills), 128 train GLM-5 (744 G parameters, 40 G active); 512
samples a step. Simulated: an eighth of it, `examples/case_studies/b.toml`.

**Underdetermined.** No rate, time or length is reported in absolute numbers, so nothing here is predicted. Given:
55 % of the tasks all-solved, 51 tool calls. Assumed: lengths, latencies, four batches in flight, and that the
trainer achieves {trainer:g} of its FLOP/s as in run A. Fitted: **the generator achieves {fraction:.3f}** of its
bandwidth and FLOP/s (at the reported wait); it takes up whatever the assumptions get wrong.

{figures}

**Contradictory.** A trainer that waits for 74 % of the time consumes 1 / 0.26 = 3.8 times what is delivered; five
times would be a wait of 80 %. Either figure is rounded, or they are of different parts of the run: the wait is
between 74 % and 80 %.

### With Headway's policies

{policies}
"""

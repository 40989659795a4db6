"""Run C: sandbox scaling."""

from __future__ import annotations

from benchmarks.case_studies.hardware import GB300, QWEN3_235B, ReplicaHardware, trainer_overrides
from benchmarks.case_studies.runs import CaseRun, Figure, Policy, policies_table, run_case

IDLE = (0.30, 0.60)  # reported range
STRAGGLER_S = 7500.0  # reported: one step
REPLICA = ReplicaHardware(model=QWEN3_235B, device=GB300, devices=4, weight_bytes_per_parameter=2.0)
GENERATOR = 0.45  # achieved fraction: about what runs A and D were fitted to
_GUESS = 0.02  # the trainer's, at which the fit begins
_STEPS = 8


def simulate_run(trainer: float, concurrency: int, *keys: str) -> CaseRun:
    described = [
        *REPLICA.overrides(GENERATOR),
        *trainer_overrides(QWEN3_235B, GB300, 48, trainer),
        f"queue.max_concurrent_rollouts={concurrency}",
    ]
    return run_case("c", [*described, *keys], steps=_STEPS)


def fit(rounds: int = 2) -> float:
    """The trainer's fraction at which it idles for the middle of the reported range with 256 rollouts in flight."""
    fraction, wanted = _GUESS, 1 - sum(IDLE) / 2
    for _ in range(rounds):
        fraction *= (1 - simulate_run(fraction, 256).trainer_wait) / wanted
    return fraction


def straggler_s(sampled_share: float, concurrency: int, fraction: float = GENERATOR) -> float:
    """Seconds that a response of 128K tokens decodes, ``sampled_share`` of them sampled, beside rollouts of the mean
    length on its replica."""
    rate = REPLICA.bytes_per_s * fraction
    kv_tokens = concurrency / 6 * 25_000  # half of a mean sequence of 50K: assumed
    step_s = (REPLICA.weights_bytes + kv_tokens * QWEN3_235B.kv_bytes_per_token) / rate
    return 131_072 * sampled_share * step_s


def section() -> tuple[str, list[Figure]]:
    """(Markdown, all figures)."""
    fraction = fit()
    policies = [Policy(name="96 rollouts at once", run=simulate_run(fraction, 96))]
    for concurrency in (256, 360, 960):
        policies.append(Policy(name=f"{concurrency} at once", run=simulate_run(fraction, concurrency)))
    tried = policies[-1].run
    failures = tried.outcome.environment["start_failures"]
    waiting = tried.outcome.environment
    policies += [
        Policy(name="360 at once, no batch waits for a straggler (dropped)",
               run=simulate_run(fraction, 360, "queue.overdue=drop")),
        Policy(name="360 at once, sandboxes of 3 s without a limit on starts",
               run=simulate_run(fraction, 360, "environment.start_s=3", "environment.starting_at_once=1000")),
    ]  # fmt: skip
    idle = ", ".join(f"{policy.run.trainer_wait:.0%} with {policy.name.split()[0]}" for policy in policies[:4])
    text = _TEXT.format(
        fraction=fraction,
        generator=GENERATOR,
        idle=idle,
        failures=failures,
        asked=failures + waiting["started"],
        low=straggler_s(0.4, 96),
        high=straggler_s(1.0, 360),
        straggler=STRAGGLER_S,
        policies=policies_table(policies),
    )
    return text, []


_TEXT = """\
## C: sandbox scaling

24 GB300 generate (6 replicas of 4), 48 train; 96, 256, 360 and, tried, 960 rollouts at once. Scenario:
`examples/case_studies/c.toml`.

**Underdetermined.** Batch, lengths, latencies and the account's limit are not reported; they are assumed in the
scenario, so nothing here counts as predicted. Taken over: the generator achieves {generator:g}, about as in runs A
and D. Fitted: **the trainer achieves {fraction:.4f} of its FLOP/s**, at which it idles for 45 %, the middle of the
reported 30 to 60 %, with 256 rollouts at once. Then it idles for {idle}; the reported range holds stages with
different trainers.

One step of {straggler:,.0f} s because of a straggler: a sample that hits 128K tokens decodes for {low:,.0f} s (two
fifths of the tokens sampled, 96 rollouts at once) to {high:,.0f} s (all of them, 360 at once); the time of its
tools comes on top. What share was sampled isn't reported, so the figure can't be predicted, but it asks for nothing
beside a long decode.

With 960 at once, {failures:.0f} of {asked:.0f} starts failed in the simulation: beyond an account's limit (assumed:
700) starts fail until others end, and those that start wait for each other.

{policies}
"""

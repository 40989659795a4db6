"""The table that `headway simulate` prints."""

from __future__ import annotations

from headway.planner.outcome import SimulationOutcome


def outcome_rows(outcome: SimulationOutcome) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    summary, counts = outcome.summary, outcome.environment
    found = {
        "steps": f"{summary.steps:,} in {_hours(summary.duration_s)}, {outcome.step_s:,.1f} s each",
        "trained samples": f"{summary.samples_trained:,}, {outcome.samples_per_s:.4g}/s",
        "waits": f"trainer {outcome.trainer_wait:.1%}, generator {outcome.generator_wait:.1%}",
        "rates, samples/s": (
            f"consumption {summary.consumption_per_s:.4g}, production {summary.production_per_s:.4g}, "
            f"effective {summary.effective_production_per_s:.4g}"
        ),
        "staleness, versions": f"mean {outcome.staleness_mean:.2f}, worst {outcome.staleness_max}",
        "tokens": (
            f"{outcome.generated_tokens:,} generated, {outcome.wasted_share:.1%} of them not trained; "
            f"{outcome.prefilled_tokens:,} prefilled, {outcome.preemptions:,} preemptions"
        ),
        "length bias (KS)": (
            f"{outcome.length_bias_ks:.4f}: scheduling {outcome.length_bias_scheduling_ks:.4f}, "
            f"filter {outcome.length_bias_filter_ks:.4f}, pruning {outcome.length_bias_pruning_ks:.4f}"
        ),
        "endings": ", ".join(f"{count:,} {ending}" for ending, count in summary.endings.items()) or "none",
    }
    if outcome.mfu_step:
        found["MFU"] = f"{outcome.mfu_step:.1%} of the step, {outcome.mfu_compute:.1%} while computing"
    if counts["started"]:
        found["sandboxes"] = (
            f"{counts['started']:,.0f} started, {counts['live_peak']:,.0f} at once; "
            f"{counts['tool_calls']:,.0f} tool calls; {counts['start_failures'] + counts['tool_failures']:,.0f} "
            f"failures"
        )
    if counts["resumed_states"] or counts["restarted_states"]:
        mean = counts["state_staleness_sum"] / max(1.0, counts["resumed_states"])
        found["environment states"] = (
            f"{counts['resumed_states']:,.0f} resumed, {mean:.2f} versions old in the mean, "
            f"{counts['state_staleness_max']:.0f} at worst; {counts['restarted_states']:,.0f} begun anew"
        )
    cost = f"{outcome.device_hours:,.2f} device-hours"
    if outcome.dollars:
        per_sample = outcome.dollars / max(1, summary.samples_trained)
        cost += f", ${outcome.dollars:,.2f}, ${per_sample:.3g} a sample"
    return found | {"cost": cost}


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.1f} s"

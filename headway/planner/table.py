"""The rows of `headway simulate`'s table beyond those of any run."""

from __future__ import annotations

from headway.planner.outcome import SimulationOutcome


def outcome_rows(outcome: SimulationOutcome) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    counts = outcome.environment
    rows = {
        "balance": outcome.balance,
        "mean staleness": f"{outcome.staleness_mean:.2f} versions",
        "tokens": (
            f"{outcome.generated_tokens:,} generated, {outcome.wasted_share:.1%} of them not trained; "
            f"{outcome.prefilled_tokens:,} prefilled, {outcome.preemptions:,} preemptions"
        ),
        "length bias (KS)": (
            f"{outcome.length_bias_ks:.4f}: scheduling {outcome.length_bias_scheduling_ks:.4f}, "
            f"filter {outcome.length_bias_filter_ks:.4f}, pruning {outcome.length_bias_pruning_ks:.4f}"
        ),
    }
    if outcome.mfu_step:
        rows["MFU"] = f"{outcome.mfu_step:.1%} of the step, {outcome.mfu_compute:.1%} while computing"
    if counts["started"]:
        rows["sandboxes"] = (
            f"{counts['started']:,.0f} started, {counts['live_peak']:,.0f} at once; "
            f"{counts['tool_calls']:,.0f} tool calls; {counts['start_failures'] + counts['tool_failures']:,.0f} "
            f"failures"
        )
    if counts["resumed_states"] or counts["restarted_states"]:
        mean_staleness = counts["state_staleness_sum"] / max(1.0, counts["resumed_states"])
        rows["environment states"] = (
            f"{counts['resumed_states']:,.0f} resumed, {mean_staleness:.2f} versions old in the mean, "
            f"{counts['state_staleness_max']:.0f} at worst; {counts['restarted_states']:,.0f} restarted"
        )
    cost_text = f"{outcome.device_hours:,.2f} device-hours"
    if outcome.dollars:
        usd_per_sample = outcome.dollars / max(1, outcome.summary.samples_trained)
        cost_text += f", ${outcome.dollars:,.2f}, ${usd_per_sample:.3g} a sample"
    return rows | {"cost": cost_text}

"""Prints the output of `headway check` as tables of memory, calibration and forecast."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.config.schema import Experiment
from headway.records.check_report import Calibration, CheckReport, Forecast, LengthSummary, MemoryPlace, MemoryUse
from headway.report.formats import duration, quantity
from headway.report.tables import Rows, print_rows

CONSTRAINTS = {
    "generator": "the generator",
    "trainer": "the trainer",
    "verifier": "the verifiers",
    "teacher": "the teachers",
    "kv": "the generator's KV cache",
    "admission": "the staleness budget (admission)",
    "environment": "the environments",
    "other": "neither model",
}


def print_preview(report: CheckReport, experiment: Experiment, console: Console | None = None) -> None:
    """Print the tables of a check without errors."""
    console = console or Console(highlight=False)
    if report.memory:
        console.print(memory_table(report.memory, report.places))
    if report.calibration is not None:
        print_rows(calibration_rows(report.calibration, experiment), "Measured", console)
    if report.forecast is not None:
        print_rows(forecast_rows(report.forecast, experiment), "Predicted", console)


# --- memory ----------------------------------------------------------------------------------------------


def memory_table(uses: list[MemoryUse], locations: list[MemoryPlace]) -> Table:
    """Tabulate the maximum that each process and file needs, and for calibrated processes the measured peak so far."""
    measured = any(use.measured_bytes is not None for use in uses)
    table = Table(
        box=None, padding=(0, 3, 0, 0), title="Memory at most", title_justify="left", title_style="bold underline"
    )
    table.add_column("")
    table.add_column("GiB", justify="right")
    if measured:
        table.add_column("seen", justify="right")
    table.add_column("of which (GiB)")
    for memory_place in locations:
        for use in uses:
            if use.location == memory_place.name:
                peak_cells = [_gib(use.measured_bytes) if use.measured_bytes is not None else ""] if measured else []
                table.add_row(Text(use.name), _gib(use.total_bytes), *peak_cells, Text(_parts(use)))
        free = "size unknown" if memory_place.available_bytes is None else f"{_gib(memory_place.available_bytes)} free"
        if memory_place.capacity_bytes is not None:
            free += f" of {_gib(memory_place.capacity_bytes)}"
        line_cells = [Text(f"= {memory_place.name}", style="bold"), Text(_gib(memory_place.needed_bytes), style="bold")]
        table.add_row(*line_cells, *([""] if measured else []), Text(free, style="bold"))
    return table


def _parts(use: MemoryUse) -> str:
    largest_first = sorted(use.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest_first if size)


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 10 else f"{gib:.3f}" if gib < 0.1 else f"{gib:.2f}"


# --- calibration -----------------------------------------------------------------------------------------


def calibration_rows(measured: Calibration, experiment: Experiment) -> Rows:
    """Describe the measurements of the calibration as rows."""
    decode_text = f"{quantity(measured.decode_tokens_per_s)} tokens/s with {measured.decode_running:.0f} requests"
    beside = measured.decode_beside_tokens_per_s
    if beside is not None and measured.decode_tokens_per_s:
        decode_text += f"; {quantity(beside)} beside the trainer ({beside / measured.decode_tokens_per_s - 1:+.0%})"
    full = experiment.queue.groups_per_step * experiment.rollout.group_size
    timed_text = (
        "a whole step" if measured.train_samples == full else f"{measured.train_samples} of {full} samples of a step"
    )
    rows = {
        "took": f"{duration(measured.measured_s)}, after {duration(measured.start_s)} for starting the workers",
        "responses": _lengths(measured.lengths),
        "prompts": f"{measured.prompt_tokens:.0f} tokens, {quantity(measured.prefill_tokens_per_s)} tokens/s",
        "decoding": decode_text,
        "training": f"{quantity(measured.train_tokens_per_s)} tokens/s, prompts included ({timed_text})",
        "measured": (
            "generator alone first, then both at once"
            if measured.at_once
            else "one after the other: generator and trainer have devices in common"
        ),
        "weights": (
            f"publish {duration(measured.publish_s)}, apply {duration(measured.apply_s)}, of which decoding pauses "
            f"{duration(measured.pause_s)}"
        ),
    }
    if measured.verify_response_s:
        rows["verifying"] = f"{measured.verify_response_s * 1e3:.2f} ms a response"
    if measured.teach_response_s:
        rows["teaching"] = f"{measured.teach_response_s * 1e3:.2f} ms a response, of each that is scored at once"
    return rows


def _lengths(lengths: LengthSummary) -> str:
    counts_text = f"{lengths.finished:,} ended, {lengths.censored:,} cut off by the calibration's end"
    if not lengths.finished:
        return f"{counts_text}; the longest had {lengths.longest_tokens} tokens: lengths are unknown"
    mean_text = f"mean {lengths.mean_tokens:.0f} tokens"
    if lengths.mean_most_tokens > 1.05 * lengths.mean_least_tokens:
        mean_text += f" (between {lengths.mean_least_tokens:.0f} and {lengths.mean_most_tokens:.0f})"
    p99_text = f"p99 {lengths.p99_tokens}" + ("" if lengths.p99_seen else " (extrapolated)")
    truncated_text = f", {lengths.truncated:,} at the limit" if lengths.truncated else ""
    return f"{mean_text}, median {lengths.p50_tokens}, {p99_text}; {counts_text}{truncated_text}"


# --- forecast --------------------------------------------------------------------------------------------


def forecast_rows(predicted: Forecast, experiment: Experiment) -> Rows:
    """Describe the forecast of the run as rows."""
    outcome, budget = predicted.outcome, experiment.queue.budget
    ideal_share, ideal_text = outcome.samples_per_s / max(predicted.ideal_per_s, 1e-9), quantity(predicted.ideal_per_s)
    if predicted.acceptance is None:
        effective = "filtering unknown (too few groups ended): none is assumed"
    else:
        effective = f"effective {quantity(predicted.effective_per_s)} ({predicted.acceptance:.0%} of groups trainable)"
    rows = {
        "production": f"{quantity(predicted.production_per_s)} samples/s; {effective}",
        "consumption": f"{quantity(predicted.consumption_per_s)} samples/s if the trainer never waits",
        "balance": _balance(predicted),
        "trained": f"{quantity(outcome.samples_per_s)} samples/s, {ideal_share:.0%} of the ideal {ideal_text}",
        "waits": f"trainer {outcome.trainer_wait:.0%}, generator {outcome.generator_wait:.0%}",
        "staleness": (
            f"{outcome.staleness_mean:.1f} versions in the mean, {outcome.staleness_max} at most (budget {budget})"
        ),
        "time": _time(predicted, experiment),
        "budget": _budget(predicted, experiment),
        "binds": f"{CONSTRAINTS[predicted.binding]}: {predicted.reason}",
    }
    for number, change in enumerate(predicted.changes, start=1):
        needs_text = f"; needs {change.needs}" if change.needs else ""
        rows[f"change {number}"] = f"{change.key} = {change.value}: {change.gain:+.0%} samples/s{needs_text}"
    if not predicted.changes:
        rows["change"] = "no single change that was tried gains 3 % or more"
    return rows


def _balance(predicted: Forecast) -> str:
    if predicted.yielded_share == 1.0:
        return "both sides take turns on the same devices: 1 / (1 / production + 1 / consumption)"
    if predicted.yielded_share:
        return f"{predicted.yielded_share:.0%} of the generator pauses while the trainer computes on its devices"
    return f"effective production / consumption = {predicted.balance:.2f}"


def _time(predicted: Forecast, experiment: Experiment) -> str:
    run = experiment.run
    steps = round(predicted.training_s * predicted.steps_per_h / 3600)
    until = f"{steps:,} of {run.steps:,} steps when the time is up" if steps < run.steps else f"{run.steps:,} steps"
    held_text = f" and {duration(predicted.evaluation_s)} of held evaluation" if predicted.evaluation_s else ""
    return (
        f"{predicted.steps_per_h:,.0f} steps/h; {until}, {duration(predicted.training_s)}{held_text} "
        "(checkpoints not counted)"
    )


def _budget(predicted: Forecast, experiment: Experiment) -> str:
    longest = "max_response_tokens" if predicted.longest_is == "limit" else "p99"
    shares_text = ", ".join(
        f"η = {option.budget} reaches {option.share:.0%}"
        + (" (configured)" if option.budget == experiment.queue.budget else "")
        for option in predicted.budgets
    )
    return (
        f"η ≥ {predicted.needed_budget} lets the longest responses ({predicted.longest_tokens} tokens: {longest}) end "
        f"in time; of the ideal rate {shares_text}"
    )

"""`headway doctor RUN` reports a run's binding constraint, its costs, and the changes that would help most. It reads
the ledger and the stored configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.config.simulation import AnyExperiment, SimulatorExperiment
from headway.control.alerts import AlertTracker
from headway.control.tuning.diagnosis import Diagnosis, Recommendation, device_splits, diagnose
from headway.control.tuning.ledger_model import shape_of
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.report.formats import duration, percent, quantity
from headway.report.incidents import event_detail
from headway.report.kernels import kernel_sentences
from headway.report.preview import CONSTRAINTS
from headway.report.run_view import RunView, view_run
from headway.report.tables import print_rows
from headway.runtime.devices import interchangeable, parse_device, sharing
from headway.runtime.run_directory import RunDirectory, with_saved_placement
from headway.telemetry.ledger import EVENT_ALERT, EVENT_SIMULATED
from headway.telemetry.pages import alert_page, troubleshooting
from headway.telemetry.summary import undisturbed


class DeviceCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the devices' time, over all steps of the run, in device-hours."""

    devices: int  # on which the generator or the trainer computes
    duration_s: float  # of all steps recorded
    device_h: float
    usd: float | None  # None: no price is given
    lost_h: dict[str, float]  # cause -> device-hours, the largest first; a device that generator and trainer share
    # counts only while neither uses it


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `headway doctor` reports."""

    run: str
    state: str  # running | finished | stopped
    costs: DeviceCosts
    diagnosis: Diagnosis
    whole_run: str = ""  # the report's verdict, where all steps give another one than the diagnosed steps
    recommended: str = ""  # the last recommendation of the run's own controller; "": none
    alerts: tuple[str, ...] = ()  # in order; recorded in the ledger, or else found by applying the rules to it
    kernels: str = ""  # of a run that writes kernels: what failed, and whether it waits for its evaluators


def diagnose_run(run_dir: str | Path, usd_per_device_hour: float | None = None) -> DoctorReport:
    """Diagnose a run. Raises ConfigurationError when there is no ledger, no readable configuration, or too few
    steps."""
    if usd_per_device_hour is not None and usd_per_device_hour < 0:
        raise ConfigurationError(f"--usd-per-device-hour {usd_per_device_hour:g}: must be at least 0")
    view = view_run(run_dir)
    experiment = stored_experiment(view)
    rank_devices = experiment.trainer.devices
    shared_devices = len(sharing(experiment.generator.devices, rank_devices))
    busy_indices = sharing(rank_devices, experiment.generator.devices)
    free_ranks = [rank for index, rank in enumerate(rank_devices) if index not in busy_indices]
    is_separate = not shared_devices and interchangeable([*experiment.generator.devices, *rank_devices])
    splits = device_splits(experiment) if is_separate else ()
    diagnosis = diagnose(undisturbed(view.lines), experiment, shape_of(experiment, shared_devices), free_ranks, splits)
    alerts = alerts_of(view.lines)
    if isinstance(diagnosis, str):
        raise ConfigurationError("; ".join([f"{view.path}: {diagnosis}", *(f"alert at {alert}" for alert in alerts)]))
    costs = device_costs(view, experiment, usd_per_device_hour)
    return DoctorReport(
        run=str(view.path),
        state=view.state,
        costs=costs,
        diagnosis=diagnosis,
        whole_run=view.verdict.balance_text if view.verdict.balance != diagnosis.balance else "",
        recommended=view.verdict.plan_text,
        alerts=alerts,
        kernels=" ".join(kernel_sentences(view.steps)),
    )


def alerts_of(lines: Sequence[LedgerLine]) -> tuple[str, ...]:
    """List the alerts of a run, each in a sentence. A ledger without alerts may belong to a run without rules; the
    rules about steps are then applied to its lines."""
    tracker, recorded_texts, replayed_texts = AlertTracker(["all"], 0.0), list[str](), list[str]()
    for line in lines:
        if isinstance(line, EventRecord) and line.event == EVENT_ALERT:
            recorded_texts.append(f"step {line.step}, {event_detail(line)}")
        for rule, change in tracker.take(line):
            alert_text = f"step {line.step}, {rule}: {tracker.raised.get(rule)} ({alert_page(rule)})"
            replayed_texts += [alert_text] if change == "raised" else []
    return tuple(recorded_texts or replayed_texts)


def device_costs(view: RunView, experiment: AnyExperiment, usd_per_device_hour: float | None) -> DeviceCosts:
    """Compute ``costs_of`` a run's steps; a simulated run has recorded the number of devices in its scenario."""
    event_data = next((event.data for event in view.events if event.event == EVENT_SIMULATED), {})
    per_replica, trainer_devices = (int(event_data.get(key, 0)) for key in ("devices_per_replica", "trainer_devices"))
    return costs_of(view.steps, experiment, usd_per_device_hour, per_replica or 1, trainer_devices or None)


def stored_experiment(view: RunView) -> Experiment:
    """Return the experiment that the run stored, in its current placement. Raises ConfigurationError when the
    configuration can't be read."""
    if not view.configuration:
        raise ConfigurationError(f"{view.path}/config.json can't be read: without it a ledger can't be interpreted")
    experiment = validate_experiment(view.configuration, f"{view.path}/config.json")
    return with_saved_placement(experiment, RunDirectory(view.path))


def costs_of(
    steps: Sequence[StepRecord],
    experiment: AnyExperiment,
    usd_per_device_hour: float | None,
    per_replica: int = 1,
    trainer_devices: int | None = None,
) -> DeviceCosts:
    """Compute the device-hours of all steps, and the lost ones by cause. ``per_replica``: devices of a replica;
    ``trainer_devices``: devices of the trainer, by default one for each rank."""
    rank_devices = experiment.trainer.devices
    is_simulated = isinstance(experiment, SimulatorExperiment)
    generator_devices = experiment.simulator.devices if is_simulated else experiment.generator.devices
    replicas = {parse_device(name) for name in generator_devices}
    trainer_count = len(rank_devices) if trainer_devices is None else trainer_devices
    device_count = len({*replicas, *map(parse_device, rank_devices)}) + len(replicas) * (per_replica - 1)
    total_s = sum(step.step_s for step in steps)
    device_h = device_count * total_s / 3600
    sole_ranks = len(rank_devices) - len(sharing(rank_devices, generator_devices))  # a shared device is used meanwhile
    lost_s_by_cause: dict[str, float] = {
        "trainer: waits for groups": sole_ranks * sum(_starved_s(s) for s in steps),
        "trainer: waits for stragglers": sole_ranks * sum(s.flow.straggler_wait_s for s in steps),
        "trainer: waits for its devices": trainer_count * sum(s.flow.device_wait_s for s in steps),
        "trainer: waits for an update": trainer_count * sum(s.flow.update_wait_s for s in steps),
        "trainer: publishes": trainer_count * sum(s.publish_s for s in steps),
        "trainer: writes checkpoints": trainer_count * sum(s.checkpoint_s for s in steps),
        "generator: has nothing to do": per_replica * sum(s.generator_wait_ratio * s.flow.generator_s for s in steps),
        "generator: stands still for updates": per_replica * sum(_paused_s(s) for s in steps),
    }
    tokens_by_ending = Counter[str]()
    for step in steps:
        tokens_by_ending.update(step.tokens.ended if step.tokens else {})
    busy_s, total_tokens = sum(s.flow.generator_busy_s for s in steps), tokens_by_ending.total()
    for ending, count in tokens_by_ending.items():
        if ending != "trained" and total_tokens:
            lost_s_by_cause[f"generator: rollouts that ended {ending}"] = per_replica * busy_s * count / total_tokens
    lost_h_by_cause = {cause: lost_s / 3600 for cause, lost_s in lost_s_by_cause.items() if lost_s > 0.0005 * total_s}
    return DeviceCosts(
        devices=device_count,
        duration_s=total_s,
        device_h=device_h,
        usd=None if usd_per_device_hour is None else device_h * usd_per_device_hour,
        lost_h=dict(sorted(lost_h_by_cause.items(), key=lambda item: -item[1])),
    )


def _starved_s(step: StepRecord) -> float:
    """Return the time for which the trainer waited because too few groups had finished."""
    return step.trainer_wait_s - step.flow.straggler_wait_s - step.flow.device_wait_s


def _paused_s(step: StepRecord) -> float:
    idle_ratio = step.generator_wait_ratio + step.generator_yielded_ratio
    return max(0.0, step.flow.generator_s * (1 - idle_ratio) - step.flow.generator_busy_s)


# --- printing --------------------------------------------------------------------------------------------


def print_report(report: DoctorReport, usd_per_device_hour: float | None, console: Console | None = None) -> None:
    """Print the report on one screen."""
    console = console or Console(highlight=False)
    diagnosis, costs, bound_name = report.diagnosis, report.costs, CONSTRAINTS[report.diagnosis.binding]
    error = f"± {diagnosis.error:.0%}"
    model_deviation = diagnosis.simulated_per_s / diagnosis.samples_per_s - 1
    rows = {
        "run": f"{report.run}, {report.state}; steps {diagnosis.first_step} to {diagnosis.last_step} are examined",
        "rate": (
            f"{quantity(diagnosis.samples_per_s)} samples/s {error}, {quantity(diagnosis.useful_per_s)} of them useful "
            f"(the model of the run predicts {model_deviation:+.0%})"
        ),
        "bound by": f"{bound_name}: {diagnosis.reason} ({troubleshooting(f'Bound by {bound_name}')})",
        "waits": (
            f"trainer {percent(diagnosis.trainer_wait)} ({percent(diagnosis.straggler_wait)} for stragglers), "
            f"generator {percent(diagnosis.generator_wait)}"
        ),
        "queue": (
            f"mean staleness {diagnosis.staleness_mean:.1f}, {diagnosis.acceptance:.0%} of the groups trainable, "
            f"{diagnosis.in_generation:.0f} rollouts in generation; the length tail needs η ≥ {diagnosis.needed_budget}"
        ),
        "costs": _cost_text(costs, usd_per_device_hour),
    }
    if report.whole_run:
        rows["whole run"] = report.whole_run
    if report.kernels:
        rows["kernels"] = report.kernels
    if report.recommended:
        rows["re-planning"] = report.recommended
    if report.alerts:
        rows["alerts"] = "\n".join(report.alerts)
    print_rows(rows, console=console)
    if costs.lost_h:
        lost_rows = {cause: _lost_text(hours, costs) for cause, hours in list(costs.lost_h.items())[:6]}
        print_rows(lost_rows, "Device-hours lost", console)
    console.print(Text("\nWhat would help most", style="bold underline"))
    if not diagnosis.changes:
        console.print("No simulated change gains 3 % or more.")
    for number, change in enumerate(diagnosis.changes, 1):
        for line in _change_lines(number, change):
            console.print(Text(line), soft_wrap=True)
    if diagnosis.unidentified:
        print_rows(diagnosis.unidentified, "Not in the ledger", console)


def _cost_text(costs: DeviceCosts, usd_per_device_hour: float | None) -> str:
    text = f"{costs.device_h:.3g} device-hours so far: {costs.devices} devices for {duration(costs.duration_s)}"
    if costs.usd is None:
        return text
    return f"{text}; {costs.usd:,.2f} USD at {usd_per_device_hour:g} an hour"


def _lost_text(hours: float, costs: DeviceCosts) -> str:
    money_text = "" if costs.usd is None else f", {costs.usd * hours / costs.device_h:,.2f} USD"
    return f"{hours:.3g} h, {hours / costs.device_h:.0%}{money_text}"


def _change_lines(number: int, change: Recommendation) -> list[str]:
    options_text = " ".join(f"--{key}={_quoted(value)}" for key, value in change.settings.items())
    text = f"{quantity(change.samples_per_s)} samples/s, {quantity(change.useful_per_s)} useful ({change.gain:+.0%}), "
    text += f"± {change.error:.0%}; mean staleness {change.staleness_mean:.1f}"
    return [f"{number}  {options_text}", f"   {text}{f'; {change.needs}' if change.needs else ''}"]


def _quoted(value: str) -> str:
    """Quote a value for a shell."""
    return value if value.replace(".", "").isalnum() else f"'{value}'"

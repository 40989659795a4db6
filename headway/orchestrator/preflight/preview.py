"""`headway check`: finds problems, sizes the memory, and forecasts the rates of a run before its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from headway.config.auto import Machine
from headway.config.schema import Experiment
from headway.control.tuning.forecast import RunShape, forecast
from headway.control.tuning.ledger_model import shape_of
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.calibration import SECONDS, OnProgress, calibrate, shared_replicas
from headway.orchestrator.preflight.capacity import gibibytes, memory_places
from headway.orchestrator.preflight.check import check, is_made_by_sft
from headway.orchestrator.preflight.cluster import node_findings
from headway.orchestrator.preflight.memory import memory_uses
from headway.orchestrator.task_sets import load_task_sets
from headway.records.check_report import Calibration, CheckReport, Finding, Findings, Forecast, MemoryUse
from headway.records.task import Task
from headway.runtime.devices import cuda_device_count, machine_cores, parse_device

_ENOUGH_SHARE = 0.95  # of the ideal rate: a budget that reaches less is worth a warning


def preview(
    experiment: Experiment,
    *,
    resume: bool = False,
    deep: bool = False,
    strict: bool = False,
    machine: Machine | None = None,
    seconds: float | None = SECONDS,
    on_progress: OnProgress = lambda text: None,
    on_findings: Callable[[list[Finding]], None] = lambda findings: None,
) -> CheckReport:
    """Check, size the memory, check the nodes, calibrate and forecast. ``strict``: see `check`; ``deep``: compare model
    files on the nodes byte by byte; ``machine``: a described one, on which nothing is measured; ``seconds`` None: don't
    calibrate. Nothing but the check while the model is still to be made. ``on_findings`` gets the findings before any
    worker is started, and again later ones. With an error among them nothing more is started. Raises the errors of
    ``calibrate`` when a worker fails."""
    findings = Findings(check(experiment, resume=resume, ahead=True, strict=strict, machine=machine))
    on_findings(findings)
    if any(finding.level == "error" for finding in findings) or is_made_by_sft(experiment):
        return CheckReport(findings=findings)
    node_checks = node_findings(experiment, deep=deep, on_progress=on_progress)
    on_findings(node_checks.by_level())
    findings = Findings(findings + node_checks)
    if any(finding.level == "error" for finding in node_checks):
        return CheckReport(findings=findings.by_level())
    uses = memory_uses(experiment, sizes_of(experiment.model.path))
    places = memory_places(uses, machine=machine)
    seconds = None if machine is not None else seconds
    if seconds is not None and experiment.environment.name != "single_turn":  # its episodes take longer
        environment_findings = Findings()
        environment_findings.info(
            "environment.name",
            f"rates of {experiment.environment.name} aren't measured before a run, which takes longer than a "
            "calibration; after some steps headway doctor has them",
        )
        on_findings(environment_findings)
        findings, seconds = Findings(findings + environment_findings), None
    if seconds is None:
        return CheckReport(findings=findings.by_level(), memory=uses, places=places)
    task_sets = load_task_sets(experiment)
    if any(task.pictures for task in task_sets["train"]):
        return CheckReport(
            findings=findings.by_level(), memory=uses, places=places
        )  # no rate without pictures means much
    calibration, lengths = calibrate(experiment, task_sets["train"], seconds=seconds, on_progress=on_progress)
    on_progress("forecasts the run")
    prediction = forecast(run_shape(experiment, task_sets), calibration, lengths)
    later_findings = calibration_findings(experiment, calibration, prediction)
    _check_tasks(experiment, len(task_sets["train"]), later_findings)
    on_findings(later_findings)
    return CheckReport(
        findings=Findings(findings + later_findings).by_level(),
        memory=_with_measured_bytes(uses, calibration),
        places=places,
        calibration=calibration,
        forecast=prediction,
    )


def _with_measured_bytes(uses: list[MemoryUse], measured: Calibration) -> list[MemoryUse]:
    resident_bytes = measured.resident_bytes
    return [
        msgspec.structs.replace(use, measured_bytes=resident_bytes.get(use.name)) if use.location == "memory" else use
        for use in uses
    ]


def run_shape(experiment: Experiment, sets: Mapping[str, Sequence[Task]]) -> RunShape:
    """Compute a forecast's inputs from the experiment and its task sets (``sets``: by split)."""
    evaluation = experiment.evaluation
    samples_by_split = {split: len(tasks) * evaluation.samples_per_task for split, tasks in sets.items()}
    held_samples = samples_by_split.get("validation", 0) * evaluation.before
    held_samples += samples_by_split.get("test", 0) * (evaluation.before + evaluation.after)
    step_samples = samples_by_split.get("validation", 0)
    return msgspec.structs.replace(
        shape_of(experiment, shared_replicas(experiment), _free_devices(experiment)),
        evaluated_samples=held_samples,
        evaluated_per_step=step_samples / evaluation.every_steps if evaluation.every_steps else 0.0,
        evaluated_per_s=step_samples / evaluation.every_s if evaluation.every_s else 0.0,
    )


def _free_devices(experiment: Experiment) -> int:
    """Count the GPUs of this machine that no worker uses; its cores where neither generator nor trainer has a GPU."""
    all_devices = map(parse_device, (*experiment.generator.devices, *experiment.trainer.devices))
    devices = [device for device in all_devices if not device.node]
    gpu_indices = {device.first for device in devices if device.kind == "cuda"}
    if gpu_indices:
        return max(0, (cuda_device_count() or 0) - len(gpu_indices))
    core_indices = {core for device in devices if device.kind == "cpu" for core in range(device.first, device.last + 1)}
    return max(0, len(machine_cores()) - len(core_indices))


def calibration_findings(experiment: Experiment, measured: Calibration, predicted: Forecast) -> Findings:
    """Check the configuration by the calibration's measurements."""
    findings = Findings()
    _check_budget(experiment, measured, predicted, findings)
    lengths, limit_tokens = measured.lengths, experiment.rollout.max_response_tokens
    if not lengths.finished:
        findings.warning(
            "rollout.max_response_tokens",
            f"no response ended in the calibration (the longest had {lengths.longest_tokens} tokens): all are "
            f"assumed to grow to {limit_tokens} tokens, so every rate is a lower bound",
        )
    elif lengths.mean_most_tokens > 1.5 * lengths.mean_least_tokens:
        findings.warning(
            "rollout.max_response_tokens",
            f"the mean response has between {lengths.mean_least_tokens:.0f} and {lengths.mean_most_tokens:.0f} tokens: "
            f"{lengths.censored:,} of {lengths.finished + lengths.censored:,} still grew when the calibration ended; "
            "rates are as uncertain as that. A longer one: --calibrate-s",
        )
    if measured.failed_rollouts:
        findings.warning("rollout", f"{measured.failed_rollouts:,} rollouts failed: {measured.failure_cause}")
    if predicted.acceptance is not None and predicted.acceptance == 0.0:
        findings.warning(
            "queue.filter_zero_variance",
            f"none of {measured.groups} groups could be trained: all their rewards are equal; easier or harder tasks, "
            "a larger rollout.group_size, or a model that has learned the format first",
        )
    check_resident_memory(experiment, measured, findings)
    return findings


def check_resident_memory(experiment: Experiment, measured: Calibration, findings: Findings) -> None:
    """Warn of processes that already hold more memory than was predicted for their entire run."""
    for use in memory_uses(experiment, sizes_of(experiment.model.path)):
        rss = measured.resident_bytes.get(use.name, 0) if use.location == "memory" else 0
        if rss > 1.3 * use.total_bytes:
            findings.warning(
                "model.path",
                f"{use.name} already held {gibibytes(rss)} while it was calibrated; {gibibytes(use.total_bytes)} "
                "were predicted for the run",
            )


def _check_budget(experiment: Experiment, measured: Calibration, predicted: Forecast, findings: Findings) -> None:
    budget, needed = experiment.queue.budget, predicted.needed_budget
    budget_share = next((row.share for row in predicted.budgets if row.budget == budget), 1.0)
    if experiment.queue.overdue != "wait" or budget >= needed or budget_share >= _ENOUGH_SHARE:
        return
    reached = next((row.share for row in predicted.budgets if row.budget == needed), None)
    basis = "max_response_tokens" if predicted.longest_is == "limit" else "p99"
    better_text = f" ({needed} would reach {reached:.0%})" if reached is not None and reached > budget_share else ""
    findings.warning(
        "queue.budget",
        f"{budget} is less than the {needed} that the longest responses need ({predicted.longest_tokens} tokens, "
        f"{basis}, at a mean of {measured.lengths.mean_tokens:.0f}): the trainer will wait for them, and the run is "
        f"predicted to reach {budget_share:.0%} of its ideal rate{better_text}. A larger budget, larger batches, fewer "
        "generator.slots or a smaller rollout.max_response_tokens",
    )


def _check_tasks(experiment: Experiment, tasks: int, findings: Findings) -> None:
    """Report few tasks. They limit no rate (a task comes again in the next pass), but the signal of one step."""
    queue = experiment.queue
    open_groups = min(
        queue.groups_per_step * (queue.budget + 1),
        queue.groups_per_step + experiment.concurrent_rollouts // experiment.rollout.group_size,
    )
    if tasks < open_groups:
        few = f"{tasks:,} task" + "s" * (tasks != 1) + f" for about {open_groups} groups open at once"
        findings.info("tasks.train", f"{few}: the same task will be in the queue more than once, at different versions")

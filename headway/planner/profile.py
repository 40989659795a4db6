"""`headway plan --profile CONFIG`: measures generator and trainer on this machine, and predicts other runs from that.

Each placement is measured by a calibration (`preflight/calibration.py`): prompts, decoding at two levels of
concurrency, training steps of ever larger batches, a new version. One placement with half of everything is held out:
its relative prediction error is reported, and is the error of plans that use the profile.

Another model's times follow by arithmetic. Its matrix products take the profiled trainer's FLOP/s; the other time of a
decode step grows with the layers, and that of a training step or an update with the weights that pass through memory.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import msgspec

from headway.config.load import placed_experiment
from headway.config.schema import Experiment
from headway.control.rates.specs import ModelFigures
from headway.control.tuning.forecast import rank_speed
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.calibration import calibrate
from headway.orchestrator.task_sets import load_task_sets
from headway.planner.model_figures import model_figures
from headway.planner.pool_file import PlanDevices, PlannedWorkload, PlanPool
from headway.planner.quantities import Quantity, constant
from headway.planner.stage_curves import GenerationCurve, SharedCosts, StageCurves, TrainerLayout, TrainingCurve
from headway.records.check_report import Calibration
from headway.records.errors import ConfigurationError
from headway.runtime.devices import cuda_device_count, machine_cores

_LEAST_ERROR = 0.1  # machines vary by so much from one minute to the next


class ProfilePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A placement that was measured."""

    generators: int  # devices, with a replica each
    trainers: int  # devices, with a rank each
    slots: int  # of a replica
    samples: int  # of a step
    measured: Calibration


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a model on one machine."""

    machine: str  # fingerprint
    date: date
    device: str  # class: cpu or cuda
    group_size: int
    model: ModelFigures
    points: tuple[ProfilePoint, ...]
    response_tokens: tuple[tuple[float, float], ...]  # (share, tokens) of the lengths seen
    missed: dict[str, float]  # relative error of the held-out placement: generate, train


def fingerprint() -> str:
    """A hash that identifies this machine: of its processor, number of cores, and GPUs."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model_match = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    parts = (model_match[1] if model_match else platform.processor(), len(machine_cores()), cuda_device_count() or 0)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def measure_profile(experiment: Experiment, seconds: float, on_progress: Callable[[str, int, int], None]) -> Profile:
    """Measure ``experiment`` with a device each for generator and trainer, with all devices for both, and with half of
    everything. ``on_progress`` receives each placement, the number measured before it, and their total.

    Raises ConfigurationError for a machine with a single device, and what `calibrate` raises."""
    family = "cuda" if cuda_device_count() else "cpu"
    device_count = cuda_device_count() or len(machine_cores())
    if device_count < 2:
        raise ConfigurationError(f"--profile: this machine has {device_count} device; two sides need two")
    devices_per_side, half = device_count // 2, max(1, experiment.queue.groups_per_step // 2)
    placements = [(range(1), range(1, 2)), (range(device_count), range(device_count))]
    if devices_per_side > 1:
        placements.append((range(devices_per_side), range(devices_per_side, 2 * devices_per_side)))
    tasks = load_task_sets(experiment)["train"]
    points: list[ProfilePoint] = []
    shares: tuple[tuple[float, float], ...] = ()
    reduced = {"generator.slots": str(max(2, experiment.generator.slots // 2)), "queue.groups_per_step": str(half)}
    for placement_index, (generators, trainers) in enumerate([*placements, placements[0]]):
        device_lists = [str([f"{family}:{index}" for index in ids]).replace("'", '"') for ids in (generators, trainers)]
        settings = {"generator.devices": device_lists[0], "trainer.devices": device_lists[1]}
        settings |= reduced if placement_index == len(placements) else {}
        on_progress(
            f"{len(generators)} generate, {len(trainers)} train ({placement_index + 1} of {len(placements) + 1})",
            placement_index,
            len(placements) + 1,
        )
        measured_experiment = placed_experiment(experiment, settings)
        measured, lengths = calibrate(measured_experiment, tasks, seconds=seconds)
        points.append(
            ProfilePoint(
                generators=len(generators),
                trainers=len(trainers),
                slots=measured_experiment.generator.slots,
                samples=measured_experiment.queue.groups_per_step * measured_experiment.rollout.group_size,
                measured=measured,
            )
        )
        shares = shares or tuple((i / 200, float(lengths.quantile(min(i / 200, 0.9999)))) for i in range(201))
    held_out_point = points.pop()
    return Profile(
        machine=fingerprint(),
        date=date.today(),
        device=family,
        group_size=experiment.rollout.group_size,
        model=model_figures(sizes_of(experiment.model.path)),
        points=tuple(points),
        response_tokens=_non_decreasing(shares),
        missed=_relative_errors(points[0].measured, held_out_point.measured),
    )


def _non_decreasing(shares: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points whose values never fall."""
    rising_points: list[tuple[float, float]] = []
    for share, value in shares:
        rising_points.append((share, max(value, rising_points[-1][1] if rising_points else 0.0)))
    return tuple(rising_points)


def _relative_errors(by: Calibration, held_out: Calibration) -> dict[str, float]:
    """Relative errors of the predictions from ``by`` for the held-out placement."""
    predicted_decode = held_out.decode_running / (by.decode_fixed_s + by.decode_request_s * held_out.decode_running)
    step_tokens = held_out.train_samples * (held_out.prompt_tokens + held_out.lengths.mean_tokens)
    predicted_train = step_tokens / (by.train_fixed_s + by.train_token_s * step_tokens)
    return {
        "generate": abs(predicted_decode / held_out.decode_tokens_per_s - 1),
        "train": abs(predicted_train / held_out.train_tokens_per_s - 1),
    }


class ProfiledCurves(StageCurves):
    """Curves from a profile of this machine, of the model that was profiled or of another."""

    def __init__(self, experiment: Experiment, model: ModelFigures, pool: PlanPool, profile: Profile) -> None:
        if profile.machine != fingerprint():
            raise ConfigurationError(
                f"pool: profile: measured on another machine ({profile.machine}, this one is {fingerprint()}): measure "
                "here with headway plan --profile"
            )
        for kind in pool.classes:
            if (kind.device.name == "cpu") != (profile.device == "cpu"):
                raise ConfigurationError(f"pool: {kind.device.name}: the profile is of {profile.device} devices")
        first = profile.points[0].measured
        workload = pool.tables.workload or PlannedWorkload(
            prompt_tokens=constant(first.prompt_tokens),
            response_tokens=Quantity(kind="quantiles", at=profile.response_tokens),
            group_correlation=first.lengths.group_correlation,
            verify_s=first.verify_response_s,
            teacher_s=first.teach_response_s,
            acceptance=max(0.05, first.accepted_groups / first.groups) if first.groups else 1.0,
        )
        super().__init__(experiment, model, pool, workload)
        self.profile = profile
        self.error = max(_LEAST_ERROR, *profile.missed.values())
        self.error_is = f"the profile of {profile.date} missed held-out placements by no more, or 10 %"
        profiled_model = profile.model
        self._flops_per_s = 6.0 * profiled_model.active / max(1e-12, first.train_token_s)

    def _point(self, key: Callable[[ProfilePoint], int], devices: int) -> ProfilePoint:
        """The measured placement nearest to a number of devices."""
        return min(self.profile.points, key=lambda point: abs(key(point) - devices))

    def _generation(self, class_index: int, devices: int, resident: float) -> GenerationCurve | None:
        """See :meth:`StageCurves._generation`."""
        measured = self._point(lambda point: point.generators, devices).measured
        base, model, per_flop = self.profile.model, self.model, 1.0 / self._flops_per_s
        extra_s = max(0.0, measured.decode_request_s - 2.0 * base.active * per_flop)  # beyond its products
        layers = model.layers / base.layers
        request_s = (
            extra_s * layers + min(measured.decode_request_s, 2.0 * base.active * per_flop) * model.active / base.active
        )
        queue = self.experiment.queue
        admitted_rollouts = queue.groups_per_step * (queue.budget + 1) * self.experiment.rollout.group_size
        return GenerationCurve(
            replicas=devices,
            per_replica=1,
            spread="1 device",
            slots=max(1, min(self.experiment.generator.slots, -(-admitted_rollouts // devices))),
            fixed_s=measured.decode_fixed_s * layers,
            request_s=request_s,
        )

    def _training(self, class_index: int, devices: int) -> TrainingCurve | None:
        """See :meth:`StageCurves._training`."""
        settings = self.experiment.trainer
        ranks, context, experts = settings.layout_of(devices)
        layout = TrainerLayout(
            shards=ranks // context,
            context_parallel=context,
            expert_parallel=experts,
            host_memory=settings.host_memory,
        )
        point = self._point(lambda point: point.trainers, devices)
        measured, profiled, model = point.measured, self.profile.model, self.model
        rank_ratio = rank_speed(point.trainers) / rank_speed(devices)
        moved_s = 32.0 * (model.parameters - profiled.parameters) / self._bytes_per_s(class_index)  # AdamW's, both ways
        return TrainingCurve(
            copies=devices // context,
            spread=str(layout),
            layout=layout,
            fixed_s=max(0.0, measured.train_fixed_s + moved_s),
            token_s=measured.train_token_s * model.active / profiled.active * rank_ratio,
        )

    def prompt_tokens_per_s(self, kind: PlanDevices, model: ModelFigures, tokens: float) -> float:
        """See :meth:`StageCurves.prompt_tokens_per_s`."""
        point = self.profile.points[0]
        return point.measured.prefill_tokens_per_s / point.generators * self.profile.model.active / model.active

    def _bytes_per_s(self, class_index: int) -> float:
        return self.pool.classes[class_index].device.figure("memory_bytes_per_s")

    def shared_costs(self, kind: PlanDevices, generation: GenerationCurve) -> SharedCosts:
        """See :meth:`StageCurves.shared_costs`. A verification is one call for a group, whose size hardly matters."""
        more_parameters = self.model.parameters - self.profile.model.parameters
        measured = self._point(lambda point: point.generators, generation.replicas).measured
        group_ratio = self.profile.group_size / self.experiment.rollout.group_size
        moved_s = 8.0 * more_parameters / kind.device.figure("memory_bytes_per_s")
        beside_rate = measured.decode_beside_tokens_per_s
        return SharedCosts(
            publish_s=max(0.0, measured.publish_s + moved_s),
            apply_s=max(0.0, measured.apply_s + moved_s),
            pause_s=measured.pause_s,
            verify_s=(measured.verify_response_s or self.workload.verify_s) * group_ratio,
            beside=max(1.0, measured.decode_tokens_per_s / beside_rate) if beside_rate else 1.0,
        )

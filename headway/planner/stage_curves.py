"""Rates of a run's generator and trainer by number of devices: by roofline, over all ways to spread the model.

The curves give the numbers that a calibration measures (`records/check_report.Calibration`), so that
`control/tuning/forecast.py` predicts the run from either.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from itertools import product
from statistics import NormalDist

import msgspec

from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution, length_distribution
from headway.control.rates.generation import GenerationRecipe, ReplicaRates
from headway.control.rates.specs import ModelFigures, Parallelism, RatedDevice
from headway.control.rates.training import TrainerRates, TrainingRecipe, publish_s
from headway.models.sizes import logit_rows
from headway.planner.pool_file import PlanDevices, PlannedWorkload, PlanPool, recipe
from headway.planner.quantities import Quantity
from headway.records.check_report import Calibration
from headway.records.errors import ConfigurationError

_QUANTILES = 200
# Options of recipes that a plan sets, that are judged by themselves, or that describe the load
_PLANNED_OPTIONS = ("slots", "parallelism", "sharded", "expert_imbalance")
# Relative: the trainers of the published runs A and D took 1.77 and 1.47 times as long as the roofline has it, with its
# fixed efficiencies (benchmarks/planner.py --parts published); too little was published of generators to compare.
ROOFLINE_ERROR = 0.8


class GenerationCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The generator on some devices: its replicas, and a decode step of one of them."""

    replicas: int
    per_replica: int
    spread: str
    slots: int
    tensor: int = 1
    fixed_s: float  # a decode step takes fixed + requests x request; prefills are in the latter
    request_s: float
    kv_tokens: int | None = None  # capacity of a replica's cache; None: not known
    bytes_per_device: float | None = None


class TrainingCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer on some devices: a step takes fixed + tokens x token."""

    copies: int
    spread: str
    fixed_s: float
    token_s: float
    bytes_per_device: float | None = None


class SharedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of publishing and applying a version and of verifying a response, and the slowdown by interference."""

    publish_s: float
    apply_s: float
    pause_s: float = 0.0
    verify_s: float  # of a response, one worker
    beside: float = 1.0  # factor on a decode step while the trainer computes


class StageCurves(ABC):
    """Curves of a model on a pool, from which placements are compared. Where nothing fits, ``reasons`` says why."""

    error: float  # relative, of predicted rates, and ...
    error_is: str  # ... where it is from
    shards = False  # whether the trainer's weights are sharded over devices
    unusual: tuple[str, ...] = ()  # options of the pool's recipes with which the configuration won't run

    def __init__(self, experiment: Experiment, model: ModelFigures, pool: PlanPool, workload: PlannedWorkload) -> None:
        self.experiment, self.model, self.pool, self.workload = experiment, model, pool, workload
        self.lengths = lengths_of(workload.response_tokens, experiment.rollout.max_response_tokens)
        self.prompt_tokens = sum(_values(workload.prompt_tokens)) / _QUANTILES
        self.samples = experiment.queue.groups_per_step * experiment.rollout.group_size
        self.reasons: dict[str, str] = {}
        self.generation, self.training = cache(self._generation), cache(self._training)

    @abstractmethod
    def _generation(self, class_index: int, devices: int, resident: float) -> GenerationCurve | None:
        """The generator on ``devices`` of class ``class_index``, where the trainer uses ``resident`` bytes of each."""

    @abstractmethod
    def _training(self, class_index: int, devices: int) -> TrainingCurve | None:
        """The trainer on ``devices`` of class ``class_index``."""

    @abstractmethod
    def shared_costs(self, kind: PlanDevices, generation: GenerationCurve) -> SharedCosts:
        """Costs that belong neither to the generator nor to the trainer alone."""

    def calibration(
        self, kind: PlanDevices, generation: GenerationCurve, training: TrainingCurve, *, shared: bool
    ) -> Calibration:
        """Predict what a calibration of this placement would measure."""
        workload, mean_tokens, costs = self.workload, self.lengths.mean_tokens, self.shared_costs(kind, generation)
        requests = float(generation.slots * generation.replicas)
        tokens_per_s = requests / (generation.fixed_s + generation.request_s * requests / generation.replicas)
        step_tokens = self.samples * (self.prompt_tokens + mean_tokens)
        return Calibration(
            measured_s=0.0,
            start_s=0.0,
            at_once=not shared,
            lengths=self.lengths.summary(workload.group_correlation),
            prompt_tokens=self.prompt_tokens,
            prefill_tokens_per_s=0.0,
            decode_running=requests,
            decode_tokens_per_s=tokens_per_s,
            decode_beside_tokens_per_s=tokens_per_s / costs.beside,
            decode_fixed_s=generation.fixed_s,
            decode_request_s=generation.request_s,
            train_tokens_per_s=step_tokens / (training.fixed_s + step_tokens * training.token_s),
            train_samples=self.samples,
            train_fixed_s=training.fixed_s,
            train_token_s=training.token_s,
            publish_s=costs.publish_s,
            apply_s=costs.apply_s,
            pause_s=costs.pause_s,
            verify_response_s=costs.verify_s,
            groups=1000,
            accepted_groups=round(1000 * workload.acceptance),
            failed_rollouts=0,
        )


class RooflineCurves(StageCurves):
    """Curves by `control/rates`, from data sheets."""

    error = ROOFLINE_ERROR
    error_is = "the roofline's, with fixed efficiencies; headway plan --profile measures them here"

    def __init__(self, experiment: Experiment, model: ModelFigures, trained_share: float, pool: PlanPool) -> None:
        if pool.tables.workload is None:
            raise ConfigurationError(
                "pool: [workload] is missing: lengths decide where devices belong. Give prompt_tokens and "
                "response_tokens, or measure with headway plan --profile"
            )
        super().__init__(experiment, model, pool, pool.tables.workload)
        trainer_settings = experiment.trainer
        run_training = TrainingRecipe(
            dtype=trainer_settings.dtype,
            state_bytes=16.0 if trainer_settings.dtype == "float32" else 18.0,
            sharded=False,
            recompute=trainer_settings.gradient_checkpointing == "full",
            micro_batch_tokens=trainer_settings.micro_batch_tokens,
            logit_tokens=logit_rows(model.vocabulary, on_gpu=False),
            trained_share=trained_share,
        )
        self._train = recipe(pool.tables, "train", TrainingRecipe, **msgspec.structs.asdict(run_training))
        run_generation = GenerationRecipe(dtype=experiment.generator.dtype, slots=experiment.generator.slots)
        self._generate = recipe(pool.tables, "generate", GenerationRecipe, **msgspec.structs.asdict(run_generation))
        self.shards = self._train.sharded
        recipes = (("generate", self._generate, run_generation), ("train", self._train, run_training))
        self.unusual = tuple(
            f"{section}: {key}"
            for section, pool_recipe, run_recipe in recipes
            for key, value in msgspec.structs.asdict(pool_recipe).items()
            if value != getattr(run_recipe, key) and key not in _PLANNED_OPTIONS
        )

    def _generation(self, class_index: int, devices: int, resident: float) -> GenerationCurve | None:
        """See :meth:`StageCurves._generation`: the fastest way of all."""
        device_class, rated_curves = self.pool.classes[class_index], list[tuple[float, GenerationCurve]]()
        for parallelism in self._spreads(device_class, devices):
            rates = ReplicaRates(
                model=self.model,
                device=_with_memory_taken(device_class.device, resident),
                recipe=msgspec.structs.replace(self._generate, parallelism=parallelism),
            )
            if devices % rates.devices:
                continue
            replicas = devices // rates.devices
            try:
                curve = self._curve(rates, replicas)
            except ConfigurationError as error:
                self.reasons.setdefault("generate", str(error))
                continue
            step_s = curve.fixed_s + curve.request_s * curve.slots
            rated_curves.append((replicas * curve.slots / step_s, curve))
        return max(rated_curves, key=lambda pair: pair[0])[1] if rated_curves else None

    def _curve(self, rates: ReplicaRates, replicas: int) -> GenerationCurve:
        mean_tokens = self.lengths.mean_tokens
        context_tokens, queue = self.prompt_tokens + mean_tokens / 2, self.experiment.queue
        admitted_rollouts = queue.groups_per_step * (queue.budget + 1) * self.experiment.rollout.group_size
        slots = max(1, min(rates.concurrency(context_tokens), math.ceil(admitted_rollouts / replicas)))
        full_s, half_s = rates.step_s(slots, context_tokens), rates.step_s(max(1.0, slots / 2), context_tokens)
        request_s = (full_s - half_s) / (slots / 2) if slots > 1 else 0.0
        prefill_s = self.prompt_tokens / rates.prefill_tokens_per_s(max(1.0, self.prompt_tokens))
        cached_bytes = rates.cached_bytes(context_tokens)  # of a request
        return GenerationCurve(
            replicas=replicas,
            per_replica=rates.devices,
            spread=_spread_text(rates.recipe.parallelism),
            tensor=rates.recipe.parallelism.tensor,
            slots=slots,
            fixed_s=full_s - request_s * slots,
            request_s=request_s + (0.0 if rates.recipe.prefill_devices else prefill_s / mean_tokens),
            kv_tokens=int(rates.cache_bytes() // (cached_bytes / context_tokens)),
            bytes_per_device=rates.weight_bytes() + slots * cached_bytes / rates.recipe.parallelism.devices,
        )

    def _training(self, class_index: int, devices: int) -> TrainingCurve | None:
        """See :meth:`StageCurves._training`: the fastest way of all."""
        device_class, timed_curves = self.pool.classes[class_index], list[tuple[float, TrainingCurve]]()
        sample_tokens = self.prompt_tokens + self.lengths.mean_tokens
        longest_tokens, tokens = float(self.experiment.max_sequence_tokens), self.samples * sample_tokens
        for parallelism in self._training_spreads(device_class, devices):
            rates = TrainerRates(
                model=self.model,
                device=device_class.device,
                devices=devices,
                recipe=msgspec.structs.replace(self._train, parallelism=parallelism),
            )
            try:
                copies = rates.copies
                rates.require_memory(longest_tokens)
                step_s, half_step_s = rates.step_s(tokens, sample_tokens), rates.step_s(tokens / 2, sample_tokens)
                if self.experiment.algorithm.kl_coefficient > 0:
                    step_s += rates.step_s(tokens, sample_tokens, scoring=True)
                    half_step_s += rates.step_s(tokens / 2, sample_tokens, scoring=True)
            except ConfigurationError as error:
                self.reasons.setdefault("train", str(error))
                continue
            token_s = max(0.0, (step_s - half_step_s) / (tokens / 2))
            curve = TrainingCurve(
                copies=copies,
                spread=_spread_text(parallelism) + (f", sharded over {devices}" if self._train.sharded else ""),
                fixed_s=max(0.0, step_s - token_s * tokens),
                token_s=token_s,
                bytes_per_device=rates.memory(longest_tokens).total,
            )
            timed_curves.append((step_s, curve))
        return min(timed_curves, key=lambda pair: pair[0])[1] if timed_curves else None

    def _spreads(self, kind: PlanDevices, devices: int) -> Iterator[Parallelism]:
        """Yield ways to spread a replica: the file's, or for vLLM tensor parallelism by powers of two, experts too."""
        configured = self._generate.parallelism
        if configured != Parallelism() or self.experiment.generator.engine == "torch":
            yield configured
            return
        for tensor in _powers(min(devices, 2 * kind.device.per_node)):
            yield Parallelism(tensor=tensor, expert=tensor if self.model.expert_parameters else 1)

    def _training_spreads(self, kind: PlanDevices, devices: int) -> Iterator[Parallelism]:
        """Yield ways to spread the trainer: the file's, or where weights may be sharded tensor and context parallelism
        inside a node, and experts."""
        configured = self._train.parallelism
        if configured != Parallelism() or not self._train.sharded:
            yield configured
            return
        node_counts = [count for count in _powers(min(8, kind.device.per_node)) if devices % count == 0]
        expert_counts = [1, *(_powers(devices)[1:] if self.model.expert_parameters else ())]
        for tensor, context, expert in product(node_counts, node_counts, expert_counts):
            if devices % (tensor * context) == 0 and devices % expert == 0:
                yield Parallelism(tensor=tensor, context=context, expert=expert)

    def shared_costs(self, kind: PlanDevices, generation: GenerationCurve) -> SharedCosts:
        """See :meth:`StageCurves.shared_costs`."""
        tables, weight_bytes = self.pool.tables, self.model.parameters * self._train.trained_share * 2.0
        bytes_per_s = tables.transport_bytes_per_s
        if bytes_per_s is None:
            is_local = kind.count == 1 or kind.device.name == "cpu"  # weights stay in one memory
            bytes_per_s = kind.device.memory_bytes_per_s if is_local else kind.device.link_bytes_per_s(kind.count)
        transfer_s = publish_s(weight_bytes, tables.transport, {tables.transport: bytes_per_s}, generation.replicas)
        return SharedCosts(publish_s=transfer_s, apply_s=transfer_s, verify_s=self.workload.verify_s)


def lengths_of(quantity: Quantity, limit: int) -> LengthDistribution:
    """Response lengths of a described workload, none beyond ``limit`` tokens."""
    return length_distribution(((max(1, round(value)), True) for value in _values(quantity)), limit)


def _values(quantity: Quantity) -> list[float]:
    normal_dist = NormalDist()
    return [quantity.at_normal(normal_dist.inv_cdf((index + 0.5) / _QUANTILES)) for index in range(_QUANTILES)]


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]


def _spread_text(spread: Parallelism) -> str:
    parts = [f"{name} {count}" for name, count in msgspec.structs.asdict(spread).items() if count > 1]
    return ", ".join(parts) or "1 device"


def _with_memory_taken(device: RatedDevice, resident: float) -> RatedDevice:
    """Return ``device`` with ``resident`` bytes less of usable memory."""
    if not resident:
        return device
    free_bytes = max(1.0, device.figure("memory_bytes") - resident / device.reached.usable_memory)
    return msgspec.structs.replace(device, figures=msgspec.structs.replace(device.figures, memory_bytes=free_bytes))

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
from typing import get_args

import msgspec

from headway.config.schema import GAE, Experiment, HostMemory
from headway.control.lengths import LengthDistribution, length_distribution
from headway.control.rates.generation import GenerationRecipe, ReplicaRates
from headway.control.rates.links import delta_bytes
from headway.control.rates.specs import ModelFigures, Parallelism, RatedDevice
from headway.control.rates.training import TrainerRates, TrainingRecipe, publish_s
from headway.models.sizes import ModelSizes, logit_rows
from headway.orchestrator.preflight.capacity import with_trainer
from headway.orchestrator.preflight.memory import (
    CUDA_CONTEXT_BYTES,
    critic_network,
    divides_experts,
    divides_heads,
    trained_weights,
    trainer_parts,
)
from headway.planner.model_figures import model_figures
from headway.planner.pool_file import PlanDevices, PlannedWorkload, PlanPool, recipe
from headway.planner.quantities import Quantity
from headway.records.check_report import Calibration
from headway.records.errors import ConfigurationError

_QUANTILES = 200
# Options of recipes that a plan sets, that are judged by themselves, or that describe the load
_PLANNED_OPTIONS = ("slots", "parallelism", "shards", "expert_imbalance")
_SLOWER = 1.05  # than the fastest layout of the trainer: as fast, so that the smallest is taken
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


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the section ``trainer`` that say how its ranks divide a model."""

    shards: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    host_memory: HostMemory = "none"

    @property
    def ranks(self) -> int:
        """Ranks that divide a copy's weights."""
        return self.shards * self.context_parallel

    def __str__(self) -> str:
        names = {"shards": self.shards, "context": self.context_parallel, "expert": self.expert_parallel}
        parts = [f"{name} {count}" for name, count in names.items() if count > 1]
        parts += {"none": [], "optimiser": ["optimiser in host memory"], "all": ["in host memory"]}[self.host_memory]
        return ", ".join(parts) or "1 device"


class TrainingCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer on some devices: a step takes fixed + tokens x token. ``layout`` None: no keys express its spread."""

    copies: int
    spread: str
    layout: TrainerLayout | None
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

    @abstractmethod
    def prompt_tokens_per_s(self, kind: PlanDevices, model: ModelFigures, tokens: float) -> float:
        """Tokens/s at which a device of ``kind`` reads prompts of ``tokens`` tokens by ``model``."""

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

    def __init__(self, experiment: Experiment, sizes: ModelSizes, pool: PlanPool) -> None:
        if pool.tables.workload is None:
            raise ConfigurationError(
                "pool: [workload] is missing: lengths decide where devices belong. Give prompt_tokens and "
                "response_tokens, or measure with headway plan --profile"
            )
        model = model_figures(sizes)
        super().__init__(experiment, model, pool, pool.tables.workload)
        self._sizes, self._fewest_bytes, trainer_settings = sizes, math.inf, experiment.trainer
        run_training = TrainingRecipe(
            dtype=trainer_settings.dtype,
            state_bytes=16.0 if trainer_settings.dtype == "float32" else 18.0,
            shards=1,
            recompute=trainer_settings.gradient_checkpointing == "full",
            micro_batch_tokens=trainer_settings.micro_batch_tokens,
            logit_tokens=logit_rows(model.vocabulary, on_gpu=False),
            trained_share=trained_weights(experiment, sizes) / sizes.parameters,
        )
        self._train = recipe(pool.tables, "train", TrainingRecipe, **msgspec.structs.asdict(run_training))
        run_generation = GenerationRecipe(dtype=experiment.generator.dtype, slots=experiment.generator.slots)
        self._generate = recipe(pool.tables, "generate", GenerationRecipe, **msgspec.structs.asdict(run_generation))
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

    def prompt_tokens_per_s(self, kind: PlanDevices, model: ModelFigures, tokens: float) -> float:
        """See :meth:`StageCurves.prompt_tokens_per_s`."""
        settings = GenerationRecipe(dtype=self.experiment.generator.dtype)
        return ReplicaRates(model=model, device=kind.device, recipe=settings).prefill_tokens_per_s(tokens)

    def _training(self, class_index: int, devices: int) -> TrainingCurve | None:
        """See :meth:`StageCurves._training`: of the layouts that fit, without host memory if one does, the smallest
        that is as fast as the fastest."""
        device_class = self.pool.classes[class_index]
        for host_memory in get_args(HostMemory):
            timed_curves: list[tuple[float, int, TrainingCurve]] = []
            for layout, training_recipe in self._layouts(device_class, devices, host_memory):
                rates = TrainerRates(
                    model=self.model, device=device_class.device, devices=devices, recipe=training_recipe
                )
                try:
                    step_s, curve = self._training_curve(rates, layout)
                except ConfigurationError as error:
                    self.reasons.setdefault("train", str(error))
                    continue
                division = training_recipe.parallelism.devices * rates.shard_count
                timed_curves.append((step_s, division, curve))
            if timed_curves:
                limit_s = _SLOWER * min(timed_curves, key=lambda timed: timed[0])[0]
                fast_curves = [timed for timed in timed_curves if timed[0] <= limit_s]
                return min(fast_curves, key=lambda timed: (timed[1], timed[0]))[2]
        return None

    def _training_curve(self, rates: TrainerRates, layout: TrainerLayout | None) -> tuple[float, TrainingCurve]:
        """Return the seconds of a step, and its curve. Raises ConfigurationError where the devices have no memory for
        it, or can't be divided so."""
        sample_tokens = self.prompt_tokens + self.lengths.mean_tokens
        longest_tokens, tokens = float(self.experiment.max_sequence_tokens), self.samples * sample_tokens
        copies = rates.copies
        if layout is None or self.unusual:
            rates.require_memory(longest_tokens)
            nbytes = rates.memory(longest_tokens).total
        else:
            nbytes = self._trainer_bytes(rates, layout)
        passes = self.experiment.trainer.passes
        step_s, half_step_s = (passes * rates.step_s(count, sample_tokens) for count in (tokens, tokens / 2))
        if any(rule.kl_coefficient > 0 for rule in self.experiment.rules.algorithms):
            step_s += rates.step_s(tokens, sample_tokens, scoring=True)
            half_step_s += rates.step_s(tokens / 2, sample_tokens, scoring=True)
        if self.experiment.algorithm.advantage == GAE:
            step_s += self._critic_s(rates, tokens, sample_tokens)
            half_step_s += self._critic_s(rates, tokens / 2, sample_tokens)
        token_s = max(0.0, (step_s - half_step_s) / (tokens / 2))
        spread = _spread_text(rates.recipe.parallelism) if layout is None else str(layout)
        fixed_s = max(0.0, step_s - token_s * tokens)
        curve = TrainingCurve(
            copies=copies, spread=spread, layout=layout, fixed_s=fixed_s, token_s=token_s, bytes_per_device=nbytes
        )
        return step_s, curve

    def _critic_s(self, rates: TrainerRates, tokens: float, mean_length: float) -> float:
        """Return the seconds that a critic adds to a step: its values at the start, and the passes of its own network.
        It reads the policy's hidden states in the policy's passes for nothing."""
        network = critic_network(self.experiment)
        sizes = self._sizes if network is None else network[1]
        trained_share = 0.0 if network is None else trained_weights(*network) / sizes.parameters
        model = model_figures(sizes)
        model = msgspec.structs.replace(model, active=model.active - model.vocabulary * model.width)  # without logits
        recipe = msgspec.structs.replace(rates.recipe, trained_share=trained_share)
        rates = msgspec.structs.replace(rates, model=model, recipe=recipe)
        values_s = rates.step_s(tokens, mean_length, scoring=True)
        if network is None:
            return values_s
        return values_s + self.experiment.trainer.passes * rates.step_s(tokens, mean_length)

    def _trainer_bytes(self, rates: TrainerRates, layout: TrainerLayout) -> int:
        """Return the bytes of each device by the memory model of `headway check`. Raises ConfigurationError with the
        largest part, and the number of devices that suffices, where they are more than it has."""
        device, usable_bytes = rates.device, rates.device.usable_bytes
        parts = self._parts(device, rates.devices, layout)
        if (nbytes := sum(parts.values())) <= usable_bytes:
            return nbytes
        top_part, devices = max(parts, key=lambda name: parts[name]), rates.devices
        while devices < 1 << 16:
            devices *= 2
            shards = devices // layout.context_parallel
            larger_layout = msgspec.structs.replace(layout, shards=shards)
            if sum(self._parts(device, devices, larger_layout).values()) <= usable_bytes:
                break
        advice = f"{devices} devices suffice" if devices < 1 << 16 else "more devices don't help"
        reason = (
            f"train: {nbytes / 1e9:.1f} GB on each of {rates.devices} {device.name} ({layout}), most of it {top_part} "
            f"({parts[top_part] / 1e9:.1f} GB), but {usable_bytes / 1e9:.1f} GB can be used; {advice}"
        )
        if nbytes < self._fewest_bytes:  # of the layout that comes nearest
            self._fewest_bytes, self.reasons["train"] = nbytes, reason
        raise ConfigurationError(reason)

    def _parts(self, device: RatedDevice, devices: int, layout: TrainerLayout) -> dict[str, int]:
        family = "cpu" if device.name == "cpu" else "cuda"
        changes = msgspec.structs.asdict(layout) | {"devices": tuple(f"{family}:{n}" for n in range(devices))}
        parts, moved_parts = trainer_parts(with_trainer(self.experiment, **changes), self._sizes)
        parts |= moved_parts if family == "cpu" else {"context": CUDA_CONTEXT_BYTES}
        states = sum(parts.pop(name, 0) for name in ("weights", "gradients", "AdamW"))
        return {"weights, gradients and optimiser": states, **parts}

    def _layouts(
        self, kind: PlanDevices, devices: int, host_memory: HostMemory
    ) -> Iterator[tuple[TrainerLayout | None, TrainingRecipe]]:
        """Yield the layouts of the trainer's keys with their recipes, within the pool file's parallelism and shards; or
        a recipe of the file that the keys don't express."""
        mesh, model = self._train.parallelism, self.model
        if max(mesh.tensor, mesh.pipeline) > 1:
            if host_memory == "none":
                yield None, self._train
            return
        contexts = [count for count in _powers(min(8, kind.device.per_node)) if divides_heads(self._sizes, count)]
        has_experts = divides_experts(self.experiment, self._sizes)
        experts = round(model.experts_per_token / model.active_experts) if has_experts else 1
        expert_counts = [count for count in _powers(devices) if experts % count == 0]
        if mesh != Parallelism():
            contexts, expert_counts = [mesh.context], [mesh.expert]
        for context in contexts:
            copies = devices // context
            counts = [count for count in range(1, copies + 1) if copies % count == 0 and copies * context == devices]
            if "shards" in self.pool.tables.train:
                counts = [count for count in counts if count * context == self._train.shards]
            for shards, expert in product(counts, expert_counts):
                if shards * context % expert:
                    continue
                layout = TrainerLayout(
                    shards=shards, context_parallel=context, expert_parallel=expert, host_memory=host_memory
                )
                yield layout, self._recipe(layout)

    def _recipe(self, layout: TrainerLayout) -> TrainingRecipe:
        gathers = layout.ranks > 1 or layout.host_memory == "all"  # from float32 alone
        state_bytes = min(16.0, self._train.state_bytes) if gathers else self._train.state_bytes
        offloaded_bytes = {"none": self._train.offloaded_bytes, "optimiser": 8.0, "all": state_bytes}
        return msgspec.structs.replace(
            self._train,
            parallelism=Parallelism(context=layout.context_parallel, expert=layout.expert_parallel),
            shards=layout.ranks,
            state_bytes=state_bytes,
            offloaded_bytes=offloaded_bytes[layout.host_memory],
        )

    def _spreads(self, kind: PlanDevices, devices: int) -> Iterator[Parallelism]:
        """Yield ways to spread a replica: the file's, or for vLLM tensor parallelism by powers of two, experts too."""
        configured = self._generate.parallelism
        if configured != Parallelism() or self.experiment.generator.engine == "torch":
            yield configured
            return
        for tensor in _powers(min(devices, 2 * kind.device.per_node)):
            yield Parallelism(tensor=tensor, expert=tensor if self.model.expert_parameters else 1)

    def shared_costs(self, kind: PlanDevices, generation: GenerationCurve) -> SharedCosts:
        """See :meth:`StageCurves.shared_costs`."""
        tables, weight_bytes = self.pool.tables, self.model.parameters * self._train.trained_share * 2.0
        bytes_per_s = tables.transport_bytes_per_s
        if bytes_per_s is None:
            is_local = kind.count == 1 or kind.device.name == "cpu"  # weights stay in one memory
            bytes_per_s = kind.device.memory_bytes_per_s if is_local else kind.device.link_bytes_per_s(kind.count)
        if tables.transport in ("tcp", "storage"):
            weight_bytes = delta_bytes(weight_bytes, tables.changed_share)
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

"""Predicts seconds and memory of a training step, a scoring pass, simulators, and publishing weights.

Products run at the achieved FLOP/s, 6 FLOP for each active weight and token (8 with recomputation) plus attention, with
pipeline bubbles on top. Gathering of sharded weights and transfers to host memory overlap with them and count where
they take longer. All-reduces over tensor-parallel devices and exchanges of tokens between experts are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from headway.control.rates.specs import NUMBER_BYTES, Count, ModelFigures, Parallelism, RatedDevice, all_reduce_s
from headway.records.errors import ConfigurationError

Transport = Literal["storage", "nccl", "tcp", "shared_memory"]


class TrainingRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with which a model is trained.

    Weights, gradients and moments are sharded over all devices (FSDP), or without ``sharded`` over those of one
    copy."""

    dtype: str = "bfloat16"
    parallelism: Parallelism = Parallelism()
    sharded: bool = True
    state_bytes: float = 16.0  # per weight: float32 weight, gradient and two moments of AdamW
    offloaded_bytes: float = 0.0  # of those, in host memory: 12 with the optimiser offloaded
    offload_activations: bool = False
    recompute: bool = True  # recompute each layer's activations from its input
    micro_batch_tokens: Count = 32_768
    logit_tokens: Count | None = None  # tokens whose logits exist at once; None: all of a micro-batch
    expert_imbalance: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    trained_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # of the weights: an adapter's share


class TrainingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device."""

    states: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits


_LOGIT_BYTES = 10.0  # per logit: in the model's dtype, in float32 for the softmax, and its gradient


class TrainerRates(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is trained on ``devices`` devices."""

    model: ModelFigures
    device: RatedDevice
    devices: int
    recipe: TrainingRecipe = TrainingRecipe()

    @property
    def copies(self) -> int:
        """Number of data-parallel copies. Raises ConfigurationError where the devices can't be divided so."""
        mesh = self.recipe.parallelism
        dense = mesh.tensor * mesh.pipeline * mesh.context
        if self.devices % dense or self.devices % mesh.expert:
            raise ConfigurationError(
                f"train: {self.devices} devices can't be divided into copies of tensor {mesh.tensor} x pipeline "
                f"{mesh.pipeline} x context {mesh.context} and groups of {mesh.expert} for experts"
            )
        return self.devices // dense

    def memory(self, longest: float) -> TrainingMemory:
        """Return the bytes on each device for sequences of up to ``longest`` tokens."""
        recipe, model, mesh = self.recipe, self.model, self.recipe.parallelism
        shards = self.devices if recipe.sharded else mesh.tensor * mesh.pipeline
        frozen = model.parameters * (1.0 - recipe.trained_share) * NUMBER_BYTES[recipe.dtype]
        states = model.parameters * recipe.trained_share * (recipe.state_bytes - recipe.offloaded_bytes) + frozen
        tokens = max(recipe.micro_batch_tokens, longest) / (mesh.tensor * mesh.context)
        activation_bytes = (model.kept_again if recipe.recompute else model.kept) * tokens / mesh.pipeline
        activation_bytes *= min(mesh.pipeline, 4)  # micro-batches in flight
        if recipe.offload_activations:  # two layers are on the device at a time
            activation_bytes *= min(1.0, 2.0 * mesh.pipeline / model.layers)
        gathered = 0.0
        if recipe.sharded:  # two layers of the weights that a device computes with
            weights = (model.parameters - model.expert_parameters) / (mesh.tensor * mesh.pipeline)
            weights += model.expert_parameters / (max(mesh.expert, mesh.tensor) * mesh.pipeline)
            gathered = 2.0 * weights / model.layers * NUMBER_BYTES[recipe.dtype]
        logits = min(tokens, recipe.logit_tokens or tokens) * model.vocabulary * _LOGIT_BYTES
        return TrainingMemory(states=states / shards + gathered, activations=activation_bytes, logits=logits)

    def require_memory(self, longest: float) -> None:
        """Raise ConfigurationError, with the largest part and a sufficient number of devices, where it doesn't fit."""
        needed, usable = self.memory(longest), self.device.usable_bytes
        if needed.total <= usable:
            return
        parts = {"weights, gradients and optimiser": needed.states, "activations": needed.activations}
        parts["logits"] = needed.logits
        largest = max(parts, key=lambda name: parts[name])
        count = self.devices
        while count < 1 << 20 and msgspec.structs.replace(self, devices=count).memory(longest).total > usable:
            count *= 2
        enough = f"{count} devices suffice" if count < 1 << 20 else "more devices don't help"
        raise ConfigurationError(
            f"train: {needed.total / 1e9:.1f} GB on each of {self.devices} {self.device.name}, most of it "
            f"{largest} ({parts[largest] / 1e9:.1f} GB), but {usable / 1e9:.1f} GB can be used; {enough}"
        )

    def step_s(self, tokens: float, mean_length: float, *, scoring: bool = False) -> float:
        """Return the seconds of a step over ``tokens`` tokens in sequences of ``mean_length``.

        ``scoring``: of the forward pass alone, for log-probabilities."""
        recipe, model, device, mesh = self.recipe, self.model, self.device, self.recipe.parallelism
        passes = 1.0 if scoring else (4.0 if recipe.recompute else 3.0)  # a backward pass counts as two
        forward = 2.0 * model.active + 2.0 * model.attended * mean_length * model.seen(mean_length)
        frozen = 0.0 if scoring else (1.0 - recipe.trained_share) * 2.0 * model.active  # gradients of weights
        imbalance = 1.0
        if mesh.expert > 1 and model.parameters:
            share = max(0.0, model.active - model.parameters + model.expert_parameters) / model.active
            imbalance += share * (recipe.expert_imbalance - 1.0)
        flops = tokens * (passes * forward - frozen) * imbalance
        micro_batches = max(1.0, math.ceil(tokens / self.copies / recipe.micro_batch_tokens))
        products = flops / self.devices / device.flops_per_s(recipe.dtype)
        products += passes * micro_batches * model.layers / mesh.pipeline * device.reached.layer_s
        products *= 1.0 + (mesh.pipeline - 1) / micro_batches
        beside = [self._gathering_s(passes, micro_batches, scoring)]
        if not scoring and recipe.offload_activations:
            kept = (model.kept_again if recipe.recompute else model.kept) * tokens / self.devices
            beside.append(2.0 * kept / (device.figure("host_bytes_per_s") * device.reached.link))
        each = tokens / (self.copies * mesh.context)  # tokens of a device's layers
        comm = passes * 2.0 * model.layers / mesh.pipeline * all_reduce_s(each * model.width * 2.0, mesh.tensor, device)
        if mesh.expert > 1:  # there and back, in each pass
            size = 4.0 * tokens / self.devices * model.experts_per_token * model.width * model.layers
            comm += passes * size / device.link_bytes_per_s(mesh.expert)
        if mesh.context > 1:  # keys and values pass around the ring
            values = sum(count for count, _ in model.cached)
            comm += passes * 2.0 * tokens / self.copies * values / device.link_bytes_per_s(mesh.context)
        seconds = max(products, *beside) + comm
        return seconds if scoring else seconds + self._optimiser_s()

    def _gathering_s(self, passes: float, micro_batches: float, scoring: bool) -> float:
        """Return the seconds to gather sharded weights in each pass and to scatter gradients in the backward pass."""
        recipe, mesh = self.recipe, self.recipe.parallelism
        if self.copies == 1 and mesh.expert == 1:
            return 0.0
        weights = (self.model.parameters - self.model.expert_parameters) / (mesh.tensor * mesh.pipeline)
        weights += self.model.expert_parameters / (max(mesh.expert, mesh.tensor) * mesh.pipeline)
        size = weights * NUMBER_BYTES[recipe.dtype]
        gathered = (passes - (0 if scoring else 1)) * size if recipe.sharded else 0.0
        scattered = 0.0 if scoring else recipe.trained_share * size * (1.0 if recipe.sharded else 2.0 / micro_batches)
        link = self.device.link_bytes_per_s(self.devices)
        return micro_batches * (gathered + scattered) / link

    def _optimiser_s(self) -> float:
        """Return the seconds of an optimiser step.

        AdamW reads and writes its states once; if offloaded, gradients go to the host and weights come back."""
        recipe = self.recipe
        shards = self.devices if recipe.sharded else recipe.parallelism.tensor * recipe.parallelism.pipeline
        trained = self.model.parameters * recipe.trained_share / shards
        if recipe.offloaded_bytes:
            return trained * 6.0 / (self.device.figure("host_bytes_per_s") * self.device.reached.link)
        return trained * 2.0 * recipe.state_bytes / self.device.memory_bytes_per_s


class Simulator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Environments that are stepped together: a step takes fixed_s, plus item_s for each on a device.

    Their memory is the stage's (`records/plan.py:WorkflowStage`)."""

    fixed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    item_s: Annotated[float, msgspec.Meta(ge=0)]

    def step_s(self, environments: int, devices: int) -> float:
        return self.fixed_s + self.item_s * math.ceil(environments / devices)


def publish_s(size: float, transport: Transport, bytes_per_s: Mapping[Transport, float], readers: int = 1) -> float:
    """Return the seconds until ``readers`` nodes have ``size`` bytes of weights (for an adapter, its bytes).

    Shared storage is written once, and its bandwidth is divided among the readers; NCCL broadcasts in a ring; a TCP
    uplink sends to one node after the other. Raises ConfigurationError for a transport whose bandwidth isn't given.
    """
    if transport not in bytes_per_s:
        raise ConfigurationError(f"publish: bandwidth of {transport} not given; given: {', '.join(bytes_per_s)}")
    times = {"storage": 1 + readers, "tcp": readers, "nccl": 1, "shared_memory": 1}[transport]
    return times * size / bytes_per_s[transport]

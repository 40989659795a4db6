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

    Weights, gradients and moments are divided over ``shards`` devices (FSDP) of each copy."""

    dtype: str = "bfloat16"
    parallelism: Parallelism = Parallelism()
    shards: Count | None = None  # beside tensor and pipeline parallelism, context parallelism's included; None: all
    state_bytes: float = 16.0  # per weight: float32 weight, gradient and two moments of AdamW; 18 with a bfloat16 one
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
    def shard_count(self) -> int:
        """Number of devices that divide a copy's weights, gradients and moments."""
        mesh, shards = self.recipe.parallelism, self.recipe.shards
        return self.devices if shards is None else mesh.tensor * mesh.pipeline * shards

    @property
    def _gathers(self) -> bool:
        return self.shard_count > self.recipe.parallelism.tensor * self.recipe.parallelism.pipeline

    @property
    def copies(self) -> int:
        """Number of data-parallel copies. Raises ConfigurationError where the devices can't be divided so."""
        mesh = self.recipe.parallelism
        dense_devices = mesh.tensor * mesh.pipeline * mesh.context
        if any(self.devices % count for count in (dense_devices, mesh.expert, self.shard_count)):
            raise ConfigurationError(
                f"train: {self.devices} devices can't be divided into copies of tensor {mesh.tensor} x pipeline "
                f"{mesh.pipeline} x context {mesh.context}, groups of {mesh.expert} for experts and "
                f"{self.shard_count} shards"
            )
        return self.devices // dense_devices

    def memory(self, longest: float) -> TrainingMemory:
        """Return the bytes on each device for sequences of up to ``longest`` tokens."""
        recipe, model, mesh = self.recipe, self.model, self.recipe.parallelism
        frozen_bytes = model.parameters * (1.0 - recipe.trained_share) * NUMBER_BYTES[recipe.dtype]
        states = model.parameters * recipe.trained_share * (recipe.state_bytes - recipe.offloaded_bytes) + frozen_bytes
        device_tokens = max(recipe.micro_batch_tokens, longest) / (mesh.tensor * mesh.context)
        activation_bytes = (model.kept_again if recipe.recompute else model.kept) * device_tokens / mesh.pipeline
        activation_bytes *= min(mesh.pipeline, 4)  # micro-batches in flight
        if recipe.offload_activations:  # two layers are on the device at a time
            activation_bytes *= min(1.0, 2.0 * mesh.pipeline / model.layers)
        gathered_bytes = 0.0
        if self._gathers:  # two layers of the weights that a device computes with
            weight_count = (model.parameters - model.expert_parameters) / (mesh.tensor * mesh.pipeline)
            weight_count += model.expert_parameters / (max(mesh.expert, mesh.tensor) * mesh.pipeline)
            gathered_bytes = 2.0 * weight_count / model.layers * NUMBER_BYTES[recipe.dtype]
        logits = min(device_tokens, recipe.logit_tokens or device_tokens) * model.vocabulary * _LOGIT_BYTES
        state_bytes = states / self.shard_count + gathered_bytes
        return TrainingMemory(states=state_bytes, activations=activation_bytes, logits=logits)

    def require_memory(self, longest: float) -> None:
        """Raise ConfigurationError, with the largest part and a sufficient number of devices, where it doesn't fit."""
        needed_memory, usable_bytes = self.memory(longest), self.device.usable_bytes
        if needed_memory.total <= usable_bytes:
            return
        parts = {"weights, gradients and optimiser": needed_memory.states, "activations": needed_memory.activations}
        parts["logits"] = needed_memory.logits
        top_part = max(parts, key=lambda name: parts[name])
        devices = self.devices
        while devices < 1 << 20 and msgspec.structs.replace(self, devices=devices).memory(longest).total > usable_bytes:
            devices *= 2
        advice = f"{devices} devices suffice" if devices < 1 << 20 else "more devices don't help"
        raise ConfigurationError(
            f"train: {needed_memory.total / 1e9:.1f} GB on each of {self.devices} {self.device.name}, most of it "
            f"{top_part} ({parts[top_part] / 1e9:.1f} GB), but {usable_bytes / 1e9:.1f} GB can be used; {advice}"
        )

    def step_s(self, tokens: float, mean_length: float, *, scoring: bool = False) -> float:
        """Return the seconds of a step over ``tokens`` tokens in sequences of ``mean_length``.

        ``scoring``: of the forward pass alone, for log-probabilities."""
        recipe, model, device, mesh = self.recipe, self.model, self.device, self.recipe.parallelism
        passes = 1.0 if scoring else (4.0 if recipe.recompute else 3.0)  # a backward pass counts as two
        forward_flops = 2.0 * model.active + 2.0 * model.attended * mean_length * model.seen(mean_length)
        frozen_flops = 0.0 if scoring else (1.0 - recipe.trained_share) * 2.0 * model.active  # gradients of weights
        imbalance = 1.0
        if mesh.expert > 1 and model.parameters:
            expert_share = max(0.0, model.active - model.parameters + model.expert_parameters) / model.active
            imbalance += expert_share * (recipe.expert_imbalance - 1.0)
        flops = tokens * (passes * forward_flops - frozen_flops) * imbalance
        micro_batches = max(1.0, math.ceil(tokens / self.copies / recipe.micro_batch_tokens))
        compute_s = flops / self.devices / device.flops_per_s(recipe.dtype)
        compute_s += passes * micro_batches * model.layers / mesh.pipeline * device.reached.layer_s
        compute_s *= 1.0 + (mesh.pipeline - 1) / micro_batches
        overlapped_times = [self._gathering_s(passes, micro_batches, scoring)]
        if not scoring and recipe.offload_activations:
            kept_bytes = (model.kept_again if recipe.recompute else model.kept) * tokens / self.devices
            overlapped_times.append(2.0 * kept_bytes / (device.figure("host_bytes_per_s") * device.reached.link))
        each = tokens / (self.copies * mesh.context)  # tokens of a device's layers
        comm = passes * 2.0 * model.layers / mesh.pipeline * all_reduce_s(each * model.width * 2.0, mesh.tensor, device)
        if mesh.expert > 1:  # there and back, in each pass
            exchanged_bytes = 4.0 * tokens / self.devices * model.experts_per_token * model.width * model.layers
            comm += passes * exchanged_bytes / device.link_bytes_per_s(mesh.expert)
        if mesh.context > 1:  # keys and values pass around the ring
            cached_values = sum(count for count, _ in model.cached)
            comm += passes * 2.0 * tokens / self.copies * cached_values / device.link_bytes_per_s(mesh.context)
        seconds = max(compute_s, *overlapped_times) + comm
        return seconds if scoring else seconds + self._optimiser_s()

    def _gathering_s(self, passes: float, micro_batches: float, scoring: bool) -> float:
        """Return the seconds to gather divided weights in each pass, to scatter gradients in the backward pass, and to
        sum them over copies once a step."""
        recipe, mesh, shard_count = self.recipe, self.recipe.parallelism, self.shard_count
        weight_count = (self.model.parameters - self.model.expert_parameters) / (mesh.tensor * mesh.pipeline)
        weight_count += self.model.expert_parameters / (max(mesh.expert, mesh.tensor) * mesh.pipeline)
        nbytes = weight_count * NUMBER_BYTES[recipe.dtype]
        seconds, trained_bytes = 0.0, 0.0 if scoring else recipe.trained_share * nbytes
        if self._gathers:
            gathered_bytes = (passes - (0 if scoring else 1)) * nbytes
            seconds += micro_batches * (gathered_bytes + trained_bytes) / self.device.link_bytes_per_s(shard_count)
        if shard_count < self.devices and (self.copies > 1 or mesh.expert > 1):
            summed_bytes = 2.0 * trained_bytes * mesh.tensor * mesh.pipeline / shard_count
            seconds += summed_bytes / self.device.link_bytes_per_s(self.devices)
        return seconds

    def _optimiser_s(self) -> float:
        """Return the seconds of an optimiser step.

        AdamW reads and writes its states once; if offloaded, gradients go to the host and weights come back."""
        recipe = self.recipe
        trained_weights = self.model.parameters * recipe.trained_share / self.shard_count
        if recipe.offloaded_bytes:
            return trained_weights * 6.0 / (self.device.figure("host_bytes_per_s") * self.device.reached.link)
        return trained_weights * 2.0 * recipe.state_bytes / self.device.memory_bytes_per_s


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
    transfer_count = {"storage": 1 + readers, "tcp": readers, "nccl": 1, "shared_memory": 1}[transport]
    return transfer_count * size / bytes_per_s[transport]

"""Seconds and memory of a training step, of a pass that only scores, of simulators, and of bringing weights along.

Products at the FLOP/s that are reached, 6 FLOP for each active weight and token (8 with recomputation) and
attention's; pipeline bubbles on top; gathering of sharded weights and transfers to host memory go on beside them and
count where they take longer; sums over tensor-parallel devices and exchanges of tokens between experts are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from headway.control.rates.figures import NUMBER_BYTES, Count, ModelFigures, Parallelism, RatedDevice, all_reduce_s
from headway.records.errors import ConfigurationError

Transport = Literal["storage", "nccl", "tcp", "shared_memory"]


class TrainingRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is trained. Weights, gradients and moments are sharded over all devices (FSDP), or where
    ``sharded`` is off, over those of one copy."""

    dtype: str = "bfloat16"
    parallelism: Parallelism = Parallelism()
    sharded: bool = True
    state_bytes: float = 16.0  # of a weight: float32 weight, gradient and two moments of AdamW
    offloaded_bytes: float = 0.0  # of those, in host memory: 12 with the optimiser offloaded
    offload_activations: bool = False
    recompute: bool = True  # each layer's activations from its input
    micro_batch_tokens: Count = 32_768
    logit_tokens: Count | None = None  # whose logits exist at once; None: all of a micro-batch
    expert_imbalance: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    trained_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # of the weights: an adapter's beside a frozen base


class TrainingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device."""

    states: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits


_LOGIT_BYTES = 10.0  # of a logit: in the model's dtype, in float32 for the softmax, and its gradient


class TrainerRates(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is trained on ``devices`` devices."""

    model: ModelFigures
    device: RatedDevice
    devices: int
    recipe: TrainingRecipe = TrainingRecipe()

    @property
    def copies(self) -> int:
        """Data-parallel copies. Raises ConfigurationError where the devices don't divide so."""
        one = self.recipe.parallelism
        dense = one.tensor * one.pipeline * one.context
        if self.devices % dense or self.devices % one.expert:
            raise ConfigurationError(
                f"train: {self.devices} devices can't be divided into copies of tensor {one.tensor} x pipeline "
                f"{one.pipeline} x context {one.context} and groups of {one.expert} for experts"
            )
        return self.devices // dense

    def memory(self, longest: float) -> TrainingMemory:
        """Bytes on each device, of sequences of up to ``longest`` tokens."""
        recipe, model, one = self.recipe, self.model, self.recipe.parallelism
        shards = self.devices if recipe.sharded else one.tensor * one.pipeline
        frozen = model.parameters * (1.0 - recipe.trained_share) * NUMBER_BYTES[recipe.dtype]
        states = model.parameters * recipe.trained_share * (recipe.state_bytes - recipe.offloaded_bytes) + frozen
        tokens = max(recipe.micro_batch_tokens, longest) / (one.tensor * one.context)
        kept = (model.kept_again if recipe.recompute else model.kept) * tokens / one.pipeline
        kept *= min(one.pipeline, 4)  # micro-batches in flight
        if recipe.offload_activations:  # two layers are here at a time
            kept *= min(1.0, 2.0 * one.pipeline / model.layers)
        gathered = 0.0
        if recipe.sharded:  # two layers' weights, of those that a device computes with
            own = (model.parameters - model.expert_parameters) / (one.tensor * one.pipeline)
            own += model.expert_parameters / (max(one.expert, one.tensor) * one.pipeline)
            gathered = 2.0 * own / model.layers * NUMBER_BYTES[recipe.dtype]
        logits = min(tokens, recipe.logit_tokens or tokens) * model.vocabulary * _LOGIT_BYTES
        return TrainingMemory(states=states / shards + gathered, activations=kept, logits=logits)

    def require_memory(self, longest: float) -> None:
        """Raises ConfigurationError, with what takes most and how many devices would do, where it doesn't fit."""
        needed, usable = self.memory(longest), self.device.usable_bytes
        if needed.total <= usable:
            return
        parts = {"weights, gradients and optimiser": needed.states, "activations": needed.activations}
        parts["logits"] = needed.logits
        most = max(parts, key=lambda name: parts[name])
        count = self.devices
        while count < 1 << 20 and msgspec.structs.replace(self, devices=count).memory(longest).total > usable:
            count *= 2
        enough = f"{count} devices would do" if count < 1 << 20 else "more devices don't help"
        raise ConfigurationError(
            f"train: {needed.total / 1e9:.1f} GB on each of {self.devices} {self.device.name}, most of it "
            f"{most} ({parts[most] / 1e9:.1f} GB), but {usable / 1e9:.1f} GB can be used; {enough}"
        )

    def step_s(self, tokens: float, mean_length: float, *, scoring: bool = False) -> float:
        """Seconds of a step over ``tokens`` tokens in sequences of ``mean_length``; ``scoring``: the forward alone,
        whose log-probabilities are wanted."""
        recipe, model, device, one = self.recipe, self.model, self.device, self.recipe.parallelism
        passes = 1.0 if scoring else (4.0 if recipe.recompute else 3.0)  # a backward is two
        forward = 2.0 * model.active + 2.0 * model.attended * mean_length * model.seen(mean_length)
        frozen = 0.0 if scoring else (1.0 - recipe.trained_share) * 2.0 * model.active  # gradients of weights
        imbalance = 1.0
        if one.expert > 1 and model.parameters:
            share = max(0.0, model.active - model.parameters + model.expert_parameters) / model.active
            imbalance += share * (recipe.expert_imbalance - 1.0)
        flops = tokens * (passes * forward - frozen) * imbalance
        micro_batches = max(1.0, math.ceil(tokens / self.copies / recipe.micro_batch_tokens))
        products = flops / self.devices / device.flops_per_s(recipe.dtype)
        products += passes * micro_batches * model.layers / one.pipeline * device.reached.layer_s
        products *= 1.0 + (one.pipeline - 1) / micro_batches
        beside = [self._gathering_s(passes, micro_batches, scoring)]
        if not scoring and recipe.offload_activations:
            kept = (model.kept_again if recipe.recompute else model.kept) * tokens / self.devices
            beside.append(2.0 * kept / (device.figure("host_bytes_per_s") * device.reached.link))
        each = tokens / (self.copies * one.context)  # tokens of a device's layers
        summed = passes * 2.0 * model.layers / one.pipeline * all_reduce_s(each * model.width * 2.0, one.tensor, device)
        if one.expert > 1:  # there and back, in each pass
            size = 4.0 * tokens / self.devices * model.experts_per_token * model.width * model.layers
            summed += passes * size / device.link_bytes_per_s(one.expert)
        if one.context > 1:  # keys and values go around
            values = sum(count for count, _ in model.cached)
            summed += passes * 2.0 * tokens / self.copies * values / device.link_bytes_per_s(one.context)
        seconds = max(products, *beside) + summed
        return seconds if scoring else seconds + self._optimiser_s()

    def _gathering_s(self, passes: float, micro_batches: float, scoring: bool) -> float:
        """Each pass gathers the sharded weights of its layers, and the backward scatters gradients."""
        recipe, one = self.recipe, self.recipe.parallelism
        if self.copies == 1 and one.expert == 1:
            return 0.0
        own = (self.model.parameters - self.model.expert_parameters) / (one.tensor * one.pipeline)
        own += self.model.expert_parameters / (max(one.expert, one.tensor) * one.pipeline)
        size = own * NUMBER_BYTES[recipe.dtype]
        gathered = (passes - (0 if scoring else 1)) * size if recipe.sharded else 0.0
        scattered = 0.0 if scoring else recipe.trained_share * size * (1.0 if recipe.sharded else 2.0 / micro_batches)
        link = self.device.link_bytes_per_s(self.devices)
        return micro_batches * (gathered + scattered) / link

    def _optimiser_s(self) -> float:
        """AdamW reads and writes its states once; offloaded, gradients go to the host and weights come back."""
        recipe = self.recipe
        shards = self.devices if recipe.sharded else recipe.parallelism.tensor * recipe.parallelism.pipeline
        trained = self.model.parameters * recipe.trained_share / shards
        if recipe.offloaded_bytes:
            return trained * 6.0 / (self.device.figure("host_bytes_per_s") * self.device.reached.link)
        return trained * 2.0 * recipe.state_bytes / self.device.memory_bytes_per_s


class Simulator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Environments that are stepped together: a step takes fixed_s, and item_s for each on a device. What memory they
    need is the stage's (`records/plan.py:WorkflowStage`)."""

    fixed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    item_s: Annotated[float, msgspec.Meta(ge=0)]

    def step_s(self, environments: int, devices: int) -> float:
        return self.fixed_s + self.item_s * math.ceil(environments / devices)


def publish_s(size: float, transport: Transport, bytes_per_s: Mapping[Transport, float], readers: int = 1) -> float:
    """Seconds until ``readers`` nodes have ``size`` bytes of weights; of an adapter, its own bytes.

    Shared storage is written once, and its bandwidth divided among those that read; NCCL broadcasts in a ring; a TCP
    uplink sends to one node after the other. Raises ConfigurationError for a transport whose bandwidth isn't given.
    """
    if transport not in bytes_per_s:
        raise ConfigurationError(f"publish: bandwidth of {transport} not given; given: {', '.join(bytes_per_s)}")
    times = {"storage": 1 + readers, "tcp": readers, "nccl": 1, "shared_memory": 1}[transport]
    return times * size / bytes_per_s[transport]

"""Predicts the seconds of decode steps, prefills and a step's whole generation by a roofline model.

A decode step of n requests: products take the longer of reading the weights that are touched and computing with them;
then attention reads the cache; then devices that share layers all-reduce. Kernels of products and of attention run one
after the other, so their times add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from headway.control.rates.specs import NUMBER_BYTES, Count, ModelFigures, Parallelism, RatedDevice, Share, all_reduce_s
from headway.records.errors import ConfigurationError

_ACTIVATION_TOKENS = 8192  # of a prefill computed at once: vLLM's default max_num_batched_tokens


class GenerationRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with which a replica generates. Each option at its default changes nothing."""

    dtype: str = "bfloat16"  # of weights and products; float8: FP8 generation
    kv_dtype: str = "bfloat16"
    parallelism: Parallelism = Parallelism()
    slots: Count | None = None  # requests that may decode at once; None: as many as memory allows
    prefill_devices: Annotated[int, msgspec.Meta(ge=0)] = 0  # of a replica, that only prefill (prefill/decode split)
    draft_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # most tokens that speculative decoding drafts ahead
    draft_acceptance: Share = 0.0  # of a drafted token, given that those before it were accepted
    draft_cost: Annotated[float, msgspec.Meta(ge=0)] = 0.1  # of drafting one token, in decode steps
    offload_bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # host memory of a device for the cache
    expert_imbalance: Annotated[float, msgspec.Meta(ge=1)] = 1.0  # the fullest device's share of tokens over the mean


class ReplicaRates(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the devices of one replica."""

    model: ModelFigures
    device: RatedDevice
    recipe: GenerationRecipe = GenerationRecipe()

    @property
    def devices(self) -> int:
        """All devices of the replica."""
        return self.recipe.parallelism.devices + self.recipe.prefill_devices

    def weight_bytes(self) -> float:
        """Return the bytes of weights on each device."""
        return self.model.parameters * NUMBER_BYTES[self.recipe.dtype] / self.recipe.parallelism.devices

    def cache_bytes(self) -> float:
        """Return the bytes for the KV cache on all decoding devices. Raises ConfigurationError where there are none."""
        work_bytes = _ACTIVATION_TOKENS * 6 * self.model.width * 2.0
        free_bytes = self.device.usable_bytes - self.weight_bytes() - work_bytes
        if free_bytes <= 0:
            raise ConfigurationError(
                f"generate: {self.weight_bytes() / 1e9:.1f} GB of weights and {work_bytes / 1e9:.1f} GB of activations "
                f"don't fit into {self.device.usable_bytes / 1e9:.1f} GB of {self.device.name} on "
                f"{self.recipe.parallelism.devices} devices a replica"
            )
        return free_bytes * self.recipe.parallelism.devices

    def cached_bytes(self, context: float) -> float:
        """Return the bytes of a request's KV cache on all devices.

        With more tensor-parallel devices than KV heads, each head is replicated."""
        copies = max(1.0, self.recipe.parallelism.tensor / self.model.kv_heads)
        return copies * self.model.kv_bytes(context, NUMBER_BYTES[self.recipe.kv_dtype])

    def concurrency(self, context: float) -> int:
        """Return the number of requests with ``context`` tokens on average whose caches fit, at most the slots.

        Raises ConfigurationError where not even one fits."""
        recipe = self.recipe
        size = self.cached_bytes(context)
        unused = self.cache_bytes() + recipe.offload_bytes * recipe.parallelism.devices
        fitting_requests = int(unused // size) if size else 1 << 20
        if fitting_requests < 1:
            raise ConfigurationError(
                f"generate: the cache of one request of {context:,.0f} tokens, {size / 1e9:.2f} GB, doesn't fit into "
                f"the {unused / 1e9:.2f} GB that {recipe.parallelism.devices} devices of {self.device.name} have for it"
            )
        return min(fitting_requests, recipe.slots or fitting_requests)

    def step_s(self, requests: float, context: float) -> float:
        """Return the seconds per token of each of ``requests`` requests, with ``context`` tokens in its cache.

        With speculative decoding it is the best over the number k of drafted tokens up to draft_tokens: the seconds of
        a step over the tokens that a request then gets on average, (1 - a^(k+1)) / (1 - a)."""
        recipe = self.recipe
        plain_s = self._verified_s(requests, context, 0)
        best_s = plain_s
        for drafted_tokens in range(1, recipe.draft_tokens + 1):
            accepted_tokens = sum(recipe.draft_acceptance**index for index in range(drafted_tokens + 1))
            seconds = self._verified_s(requests, context, drafted_tokens) + drafted_tokens * recipe.draft_cost * plain_s
            best_s = min(best_s, seconds / accepted_tokens)
        return best_s

    def _verified_s(self, requests: float, context: float, drafted: int) -> float:
        model, device, recipe = self.model, self.device, self.recipe
        parallelism, tokens = recipe.parallelism, requests * (1 + drafted)
        device_count = parallelism.devices
        # each pipeline stage reads its weights for every micro-batch, of which there are as many as stages
        weight_bytes = model.touched(tokens) * NUMBER_BYTES[recipe.dtype] / device_count * parallelism.pipeline
        flops = 2.0 * tokens * model.active / device_count
        expert_share = model.expert_parameters / model.parameters if parallelism.expert > 1 else 0.0
        imbalance = 1.0 + expert_share * (recipe.expert_imbalance - 1.0)
        matmul_s = max(weight_bytes / device.memory_bytes_per_s, flops * imbalance / device.flops_per_s(recipe.dtype))
        cached_bytes = requests * self.cached_bytes(context)
        attention_s = cached_bytes / device_count / device.memory_bytes_per_s
        offloaded_bytes = max(0.0, cached_bytes - self.cache_bytes()) if recipe.offload_bytes else 0.0
        if offloaded_bytes:  # the part in host memory is transferred once a step
            attention_s += offloaded_bytes / device_count / (device.figure("host_bytes_per_s") * device.reached.link)
        communication_s = 2.0 * model.layers * all_reduce_s(tokens * model.width * 2.0, parallelism.tensor, device)
        if parallelism.expert > 1:  # there and back
            exchanged_bytes = 4.0 * tokens / device_count * model.experts_per_token * model.width * model.layers
            communication_s += exchanged_bytes / device.link_bytes_per_s(parallelism.expert)
        return matmul_s + attention_s + communication_s + model.layers * device.reached.layer_s

    def prefill_tokens_per_s(self, prompt: float) -> float:
        """Return the tokens/s at which the prefilling devices process prompts of ``prompt`` tokens."""
        device_count = self.recipe.prefill_devices or self.recipe.parallelism.devices
        attention_flops = 2.0 * self.model.attended * prompt * self.model.seen(prompt)
        return device_count * self.device.flops_per_s(self.recipe.dtype) / (2.0 * self.model.active + attention_flops)

    def rate(self, prompt: float, response: float, requests: float) -> float:
        """Return the samples/s in steady state, with ``requests`` of them decoding together.

        Prefills take the decoding devices' time, unless they have separate devices."""
        decode_s = response * self.step_s(requests, prompt + response / 2)
        prefill_s = prompt / self.prefill_tokens_per_s(prompt) if prompt else 0.0
        if self.recipe.prefill_devices:
            return min(requests / decode_s, 1.0 / prefill_s if prefill_s else math.inf)
        return requests / (decode_s + requests * prefill_s)

    def batch_s(self, items: int, prompt: float, lengths: Sequence[float]) -> float:
        """Return the seconds from the first prefill to the last token of ``items`` samples.

        Response lengths are drawn from ``lengths`` (ascending, equally likely). All slots are full while samples wait;
        then fewer and fewer decode until the longest ends."""
        mean_tokens = sum(lengths) / len(lengths)
        requests = min(items, self.concurrency(prompt + mean_tokens / 2))
        prefill_s = items * prompt / self.prefill_tokens_per_s(prompt) if prompt else 0.0
        queued_s = (items - requests) * mean_tokens / requests * self.step_s(requests, prompt + mean_tokens / 2)
        drain_s, generated_tokens = 0.0, 0.0
        for index, length in enumerate(lengths):
            if length > generated_tokens:
                running = max(1.0, requests * (len(lengths) - index) / len(lengths))
                drain_s += (length - generated_tokens) * self.step_s(running, prompt + (generated_tokens + length) / 2)
                generated_tokens = length
        decode_s = queued_s + drain_s
        if self.recipe.prefill_devices:
            return max(decode_s, prefill_s)
        return decode_s + prefill_s

"""Figures of models and devices for the rate models, and the parallelism of a model over devices.

Bytes, seconds, FLOP. *Efficiencies* are the shares of data-sheet figures that real programs achieve. They are fixed
here, each with its source, and never set for one comparison; a profile (`planner/profile.py`) replaces the rates by
measured ones.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from headway.records.errors import ConfigurationError

NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int4": 0.57}  # int4: with its scales

Figure = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak figures of one device. Bandwidths of links are of one direction, FLOP/s without sparsity, by dtype."""

    memory_bytes: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    flops_per_s: dict[str, Figure] = {}
    link_bytes_per_s: Figure | None = None  # to its neighbours: NVLink, Infinity Fabric
    host_bytes_per_s: Figure | None = None
    watts: Figure | None = None


class Efficiencies(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of data-sheet figures that real programs achieve."""

    # Llama 3 (arXiv:2407.21783, table 4): 0.38 to 0.43 of the FLOP/s of 16,384 H100, communication and pipeline bubbles
    # of some 15 % included, which are terms of their own here
    matmul: Share = 0.5
    # Databricks, "LLM Inference Performance Engineering: Best Practices" (2023): 0.55 to 0.65 of A100's bandwidth
    memory: Share = 0.6
    link: Share = 0.8  # nccl-tests' all_reduce on a DGX H100: bus bandwidth 360 of 450 GB/s
    usable_memory: Share = 0.9  # vLLM's default gpu_memory_utilization
    # some ten kernels of a layer, each 2 us inside a CUDA graph (NVIDIA, "Getting Started with CUDA Graphs")
    layer_s: Annotated[float, msgspec.Meta(ge=0)] = 2e-5


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a model from which rates and memory follow (`models/sizes.py` reads them from a config.json)."""

    parameters: float
    active: float  # weights that one token uses
    expert_parameters: float = 0.0  # weights of routed experts, a part of ``parameters``
    active_experts: Share = 1.0  # share of a layer's routed experts that a token goes to, and ...
    experts_per_token: int = 0  # ... their number
    layers: int
    width: int
    vocabulary: int
    kv_heads: int = 1
    attended: float  # query values of all layers: a query and a key take 4 FLOP for each
    cached: tuple[tuple[float, int | None], ...]  # (values cached of a token, window in tokens) of groups of layers
    state: float = 0.0  # values kept of a sequence regardless of its length
    kept: float = 0.0  # bytes of activations per token that the backward needs, and ...
    kept_again: float = 0.0  # ... with each layer recomputed from its input

    def kv_bytes(self, tokens: float, number_bytes: float) -> float:
        """Return the bytes of the KV cache of a sequence of ``tokens``."""
        number_count = sum(count * min(tokens, window or tokens) for count, window in self.cached) + self.state
        return number_count * number_bytes

    def seen(self, tokens: float) -> float:
        """Return the mean share of keys to which a query at a sequence's end attends, windows included."""
        values = sum(count for count, _ in self.cached)
        return sum(c * min(tokens, w or tokens) for c, w in self.cached) / (values * tokens) if values * tokens else 0.0

    def touched(self, tokens: float) -> float:
        """Return the number of weights that a step of ``tokens`` tokens reads.

        With E experts and k per token, evenly drawn, the share 1 - (1 - k/E)^tokens is used; a dense model uses all."""
        hit_share = 1.0 - (1.0 - self.active_experts) ** max(1.0, tokens)
        return self.parameters - self.expert_parameters * (1.0 - hit_share)


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallelism of one copy of a model. Experts are sharded over devices of the other dimensions."""

    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    expert: Count = 1

    @property
    def devices(self) -> int:
        return max(self.tensor * self.pipeline * self.context, self.expert)


class RatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device with its links and efficiencies; an unknown figure raises where it is needed."""

    name: str
    figures: DeviceFigures
    per_node: int = 1
    network_bytes_per_s: float | None = None  # of a device, to other nodes
    reached: Efficiencies = Efficiencies()

    def figure(self, key: str) -> float:
        """Return a data-sheet figure. Raises ConfigurationError where it isn't known."""
        number = getattr(self.figures, key)
        if number is None:
            raise ConfigurationError(f"devices.{self.name}.{key} is not known: give it in a --catalogue")
        return number

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products; a dtype that only compresses weights has those of bfloat16."""
        peak_by_dtype = self.figures.flops_per_s
        peak_flops = peak_by_dtype.get(dtype) or (peak_by_dtype.get("bfloat16") if dtype == "int4" else None)
        if peak_flops is None:
            known_dtypes = ", ".join(peak_by_dtype) or "none"
            raise ConfigurationError(f"devices.{self.name}.flops_per_s.{dtype} is not known (known: {known_dtypes})")
        return peak_flops * self.reached.matmul

    @property
    def memory_bytes_per_s(self) -> float:
        return self.figure("memory_bytes_per_s") * self.reached.memory

    @property
    def usable_bytes(self) -> float:
        return self.figure("memory_bytes") * self.reached.usable_memory

    def link_bytes_per_s(self, devices: int) -> float:
        """Return the bytes/s between ``devices`` devices: over links inside a node, else over the network."""
        if devices <= 1:
            return math.inf
        if devices > self.per_node:
            if self.network_bytes_per_s is None:
                raise ConfigurationError(
                    f"{devices} devices of {self.name} are more than one node has ({self.per_node}), and "
                    "network_bytes_per_s is not known: name a machine of the catalogue, or give it in the pool"
                )
            return self.network_bytes_per_s * self.reached.link
        return self.figure("link_bytes_per_s") * self.reached.link


def all_reduce_s(size: float, devices: int, device: RatedDevice) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes over ``devices``: a ring carries 2 (n - 1) / n of them."""
    return 2.0 * (devices - 1) / devices * size / device.link_bytes_per_s(devices) if devices > 1 else 0.0

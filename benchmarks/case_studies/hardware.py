"""Times of decode steps, prefills and training steps on described hardware: the roofline over the achieved fraction.

Memory-bound: a decode step reads the weights and the KV of all running requests once. Compute-bound: a prefill takes
2 FLOP, a training step 6 FLOP, for each token and active parameter. ``fraction``: the share of bandwidth and FLOP/s
that is achieved; it includes all other costs (communication, kernels, waiting for the slowest expert).
"""

from __future__ import annotations

import msgspec

from headway.planner.catalogue.read import Catalogue, DeviceFigures


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Public figures of one model."""

    name: str
    parameters: float
    active_parameters: float  # parameters used for a token
    kv_bytes_per_token: float  # bfloat16


H200, GB300 = (Catalogue.read().entry("devices", name, DeviceFigures) for name in ("H200", "GB300"))
# 94 layers, 4 KV heads of 128: 2 x 94 x 4 x 128 values of 2 bytes
QWEN3_235B = ModelShape(
    name="Qwen3-235B-A22B", parameters=235e9, active_parameters=22e9, kv_bytes_per_token=2.0 * 94 * 4 * 128 * 2
)


class ReplicaHardware(msgspec.Struct, frozen=True, kw_only=True):
    """A generator replica: a model on several devices by tensor parallelism."""

    model: ModelShape
    device: DeviceFigures
    devices: int
    weight_bytes_per_parameter: float  # 1: FP8, 2: bfloat16
    kv_copies: int = 1  # devices that hold the same KV head, where there are more devices than heads

    @property
    def weights_bytes(self) -> float:
        return self.model.parameters * self.weight_bytes_per_parameter

    @property
    def bytes_per_s(self) -> float:
        return self.devices * (self.device.memory_bytes_per_s or 0)

    def kv_capacity_tokens(self, memory_share: float = 0.9) -> int:
        """Tokens whose KV fits beside the weights, when ``memory_share`` of the memory may be used."""
        room = self.devices * (self.device.memory_bytes or 0) * memory_share - self.weights_bytes
        return int(room / (self.model.kv_bytes_per_token * self.kv_copies))

    def overrides(self, fraction: float) -> list[str]:
        """Scenario overrides (``key=value``) for this replica at an achieved ``fraction``."""
        rate = self.bytes_per_s * fraction
        compute = self.devices * self.device.flops_per_s["bfloat16"] * fraction
        prefill = compute / (2 * self.model.active_parameters)
        return [
            f"hardware.generator.devices_per_replica={self.devices}",
            f"hardware.generator.decode_fixed_s={self.weights_bytes / rate}",
            f"hardware.generator.decode_kv_token_s={self.model.kv_bytes_per_token * self.kv_copies / rate}",
            f"hardware.generator.prefill_tokens_per_s={prefill}",
            f"generator.kv_capacity_tokens={self.kv_capacity_tokens()}",
        ]


def trainer_overrides(model: ModelShape, device: DeviceFigures, devices: int, fraction: float) -> list[str]:
    """Scenario overrides (``key=value``) for a trainer that achieves ``fraction`` of its FLOP/s while it computes."""
    flops, peak = 6.0 * model.active_parameters, devices * device.flops_per_s["bfloat16"]
    return [
        f"hardware.trainer.devices={devices}",
        f"hardware.trainer.token_s={flops / (peak * fraction)}",
        f"hardware.trainer.flops_per_token={flops}",
        f"hardware.trainer.peak_flops_per_s={peak}",
    ]

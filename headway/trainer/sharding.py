"""Division of a model's weights among ranks by FSDP2 (torch's ``fully_shard``, arXiv 2304.11277), in one way for the
project's decoder and for transformers' architectures.

Each layer is a unit, and what is outside of the layers another. A unit is complete while it computes; at all other
times a rank has its rows of each matrix alone, in float32. Gradients are summed over the ranks, never averaged: the
loss has the divisor already (DESIGN, rule 10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headway.models.packed_model import PackedModel
from headway.models.parallel.exchange import counted
from headway.records.errors import ConfigurationError
from headway.trainer.ranks import Ranks

T = TypeVar("T")


class ShardedModel:
    """A model whose weights are divided among the ranks of a mesh's dimension "shards".

    Every rank must call `PackedModel.compute` equally often, inside it the layers equally often, and then the backward.
    """

    def __init__(
        self,
        model: PackedModel,
        ranks: Ranks,
        dtype: torch.dtype,
        device: torch.device,
        fill: Callable[[], None],
        *,
        in_host_memory: bool = False,
    ) -> None:
        """``model``: on the meta device; it gets memory for this rank's rows on ``device``, and ``fill`` writes them.
        ``dtype``: that it computes in, whatever its parameters have. ``in_host_memory``: weights and gradients are
        there, except those of a unit that computes. Raises ConfigurationError for a model without layers, or with a
        matrix that several layers share."""
        # Loads sympy: half a second of a start, which other ranks needn't pay.
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        from torch.distributed.fsdp import register_fsdp_forward_method as register

        require_units(model)
        assert ranks.mesh is not None
        on_gpu = device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": ranks.shard_mesh,
            "shard_placement_fn": None if model.division.experts is None else _placement(ranks.mesh["same_experts"]),
            # Positions must not be rounded, as casting a layer's inputs would.
            "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if in_host_memory else OffloadPolicy(),
        }
        self.model = model
        units: list[Any] = [*model.layers, model]
        for unit in units:
            fully_shard(unit, **options)
            # Neither setter is recursive, and gloo has no sum of scaled summands.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
            for group in unit._get_fsdp_state()._fsdp_param_groups:  # the setters take units without experts alone
                group._all_gather_comm = _CountedCollective("all_gather", torch.distributed.all_gather_single)
                group._reduce_scatter_comm = _CountedCollective(
                    "reduce_scatter", torch.distributed.reduce_scatter_single
                )
        self._root: Any = model
        self._root.set_reduce_scatter_unused_params(True)  # a rank's tokens may use less of a layer than others'
        register(model, "compute")
        model.compute = partial(self._compute, model.compute)
        model.most_calls = partial(ranks.largest, dimension="shards")
        model.to_empty(device="cpu" if in_host_memory else device)
        for module in model.modules() if in_host_memory else ():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        fill()
        self._complete_parameters = self._gather_once(units)

    def _compute(self, compute: Callable[[Callable[[], T]], T], function: Callable[[], T]) -> T:
        outcome = compute(function)
        if not torch.is_grad_enabled():  # else the backward does it; until then the next pass would compute with these
            self._root.reshard()
        return outcome

    def _gather_once(self, units: list[Any]) -> list[nn.Parameter]:
        """The parameters of complete units, which FSDP2 makes at the first gathering and keeps."""
        kept_ids, parameters = {id(parameter) for parameter in self.model.parameters()}, list[nn.Parameter]()
        with torch.no_grad():
            self.model.compute(lambda: None)
        for unit in units:
            unit.unshard()
            complete = [
                parameter
                for parameter in unit.parameters()
                if id(parameter) not in kept_ids and parameter.requires_grad
            ]
            if unit is self.model and any(parameter.dtype != torch.float32 for parameter in complete):
                for parameter in complete:  # each chunk of logits adds to the gradients of embedding and head
                    parameter.grad_dtype = torch.float32
            parameters += complete
            unit.reshard()
        return parameters

    def release(self) -> None:
        """Forget the complete weights outside of the layers, which passes without a backward keep while gradients are
        enabled. No collective."""
        self._root.reshard()

    def reset(self) -> None:
        """Forget a pass that failed, and its gradients of complete units. No collective."""
        self._root.reset_iter_state()
        for parameter in self._complete_parameters:
            parameter.grad = None


def _placement(same_experts: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Choose the ranks among which FSDP2 divides a parameter: experts, which are divided already, among those that have
    the same experts."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    placement = ShardPlacementResult(Shard(0), FSDPMeshInfo(same_experts, shard_mesh_dim=0))
    return lambda parameter: placement if is_divided(parameter) else None


class _CountedCollective:
    """A collective of FSDP2 that the stall watch sees: torch's ``AllGather`` or ``ReduceScatter``."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def allocate(self, size: Collection[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the collective's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        with counted(self._name, output_tensor):
            return self._function(output_tensor, input_tensor, **options)


def is_divided(tensor: Tensor) -> bool:
    """Whether a rank has some rows of this tensor alone."""
    return hasattr(tensor, "_local_tensor")


def own_rows_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter or its gradient, which share its memory; all of them if it isn't divided."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def require_units(model: PackedModel) -> None:
    if not hasattr(torch.distributed, "reduce_scatter_single"):
        raise ConfigurationError(f"trainer.shards needs torch 2.13, and {torch.__version__} is installed; valid: 1")
    if not len(model.layers):
        raise ConfigurationError(
            "trainer.shards: the model has no list of its decoder's layers, which would be divided one by one; valid: 1"
        )
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    units = [*((f"layer {number}", [*layer.modules()]) for number, layer in enumerate(model.layers))]
    unit_by_parameter: dict[int, str] = {}
    for unit, modules in [*units, ("what is outside of the layers", outside)]:
        for name, parameter in (pair for module in modules for pair in module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                raise ConfigurationError(f"trainer.shards: {name} of {unit} is a number, without rows; valid: 1")
            if (first_unit := unit_by_parameter.setdefault(id(parameter), unit)) != unit:
                raise ConfigurationError(
                    f"trainer.shards: {first_unit} and {unit} share the matrix {name}, which can't be divided with "
                    "both; valid: 1"
                )

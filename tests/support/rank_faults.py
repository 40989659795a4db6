"""Planted faults of ranks that divide a model, each as a context in which a rank computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import division_faults
from torch import nn

from headway.models.packed_model import PackedModel
from headway.models.parallel.experts import ExpertRanks
from headway.trainer.learner import Learner
from headway.trainer.master_weights import MasterWeights
from headway.trainer.ranks import Ranks
from headway.trainer.sharding import own_rows_of


@contextmanager
def averaged_layers() -> Iterator[None]:
    """The divisor of the root alone is set: the setter isn't recursive."""
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def of_root(self: Any, factor: float) -> None:
        if isinstance(self, PackedModel):
            original(self, factor)

    with mock.patch.object(FSDPModule, "set_gradient_divide_factor", of_root):
        yield


@contextmanager
def scaled_summands() -> Iterator[None]:
    """The reduction isn't told to be a sum, of which gloo can't scale the summands."""
    from torch.distributed.fsdp import FSDPModule

    with mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms"):
        yield


@contextmanager
def method_without_hooks() -> Iterator[None]:
    """No method gathers what is outside of the layers."""
    with mock.patch("torch.distributed.fsdp.register_fsdp_forward_method"):
        yield


@contextmanager
def unequal_calls() -> Iterator[None]:
    """Ranks don't agree on the calls of a model that is computed by rows."""
    with mock.patch.object(Ranks, "largest", lambda self, number, dimension="all": number):
        yield


@contextmanager
def rounded_positions() -> Iterator[None]:
    """A layer's inputs are cast, and so are the positions."""
    from torch.distributed import fsdp

    policy = fsdp.MixedPrecisionPolicy
    with mock.patch.object(fsdp, "MixedPrecisionPolicy", lambda *types, **_: policy(*types)):
        yield


@contextmanager
def stale_parameters() -> Iterator[None]:
    """The optimiser has parameters that the model doesn't compute with, as those from before it was divided."""
    original, open_masters = MasterWeights.__init__, Learner._open_masters

    def of_others(self: Any, parameters: dict[str, nn.Parameter], *arguments: Any) -> None:
        others = {name: nn.Parameter(own_rows_of(parameter).clone()) for name, parameter in parameters.items()}
        original(self, others, *arguments)

    def open_others(self: Learner) -> MasterWeights:
        if self.ranks.mesh is None:
            return open_masters(self)
        with mock.patch.object(MasterWeights, "__init__", of_others):
            return open_masters(self)

    with mock.patch.object(Learner, "_open_masters", open_others):
        yield


@contextmanager
def denominators_of_every_rank() -> Iterator[None]:
    """Ranks that compute the same samples each count them in the denominators."""
    with mock.patch.object(Ranks, "all_gather_data", Ranks.all_gather):
        yield


@contextmanager
def counts_of_every_rank() -> Iterator[None]:
    """Ranks that compute the same samples each add their figures."""
    with mock.patch.object(Ranks, "is_first", True):
        yield


@contextmanager
def experts_of_another_rank() -> Iterator[None]:
    """A rank takes experts other than those that tokens are sent to it for."""
    original = ExpertRanks.own_experts
    with mock.patch.object(ExpertRanks, "own_experts", staticmethod(lambda weight: original(weight).roll(1, 0))):
        yield


@contextmanager
def experts_summed_once_more() -> Iterator[None]:
    """The gradients of experts are summed over the ranks that divide them, beside what FSDP2 sums."""
    original = Learner.gradients

    def gradients(self: Learner) -> list[Any]:
        assert self.ranks.mesh is not None
        summed = original(self)
        for weight, gradient in zip(self.weights().values(), summed, strict=True):
            if weight.ndim == 3:
                self.ranks.sum_(gradient, "shards")
        return summed

    with mock.patch.object(Learner, "gradients", gradients):
        yield


LAYOUT_FAULTS = (denominators_of_every_rank, counts_of_every_rank, experts_of_another_rank, experts_summed_once_more)
FAULTS = {
    fault.__name__: fault
    for fault in (
        averaged_layers,
        scaled_summands,
        method_without_hooks,
        unequal_calls,
        rounded_positions,
        stale_parameters,
    )
}


def with_fault(mesh: tuple[int, int, str], fault: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` on a rank that has the fault, one of these or of `division_faults`."""
    faults = {**division_faults.FAULTS, **FAULTS, **{plant.__name__: plant for plant in LAYOUT_FAULTS}}
    with faults[fault]():
        return function(mesh, *arguments)

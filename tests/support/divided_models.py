"""Gradients of a decoder whose tokens and experts are divided among the ranks of a `RankPool`, and of one rank."""

from __future__ import annotations

import contextlib
import functools
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from division_faults import FAULTS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headway.models import lora
from headway.models.adapter_targets import AdaptedTarget, targets_of
from headway.models.cpu import native
from headway.models.decoder import Decoder
from headway.models.experts import ExpertReplay
from headway.models.hf.model import load_hf
from headway.models.kernels import target_logprobs
from headway.models.packed_model import PackedModel
from headway.models.parallel.context import ContextRanks
from headway.models.parallel.division import Division
from headway.models.parallel.exchange import RankGroup
from headway.models.parallel.experts import ExpertRanks
from headway.records.errors import ConfigurationError
from headway.runtime.stalls.collectives import COLLECTIVES
from headway.trainer.sharding import own_rows_of
from tests.conformance.reference import random_model

EXPERTS = ("gate_up_weight", "down_weight")


@dataclass(frozen=True)
class Layout:
    """``ranks`` of which neighbours are a context group; an expert group's are neighbours, or of each context group
    one if ``crossed``."""

    ranks: int
    context: int = 1
    experts: int = 1
    crossed: bool = False

    def groups(self, size: int, crossed: bool) -> list[list[int]]:
        if crossed:
            step = self.ranks // size
            return [list(range(first, self.ranks, step)) for first in range(step)]
        return [list(range(first, first + size)) for first in range(0, self.ranks, size)]


@dataclass(frozen=True)
class Case:
    """A model and how its gradient is computed."""

    family: str = "qwen3"
    checkpointing: str = "none"
    loss: str = "token"  # or "sequence"
    shared: bool = False
    replay: bool = False
    adapter: bool = False
    dtype: str = "float32"
    native: bool = False
    # "short": fewer tokens than ranks; "late": all loss tokens are in one slice; "two experts" have all tokens
    batches: str = "uneven"


@dataclass(frozen=True)
class MicroBatch:
    ids: Tensor
    lengths: list[int]
    continues: list[int]
    predictors_m: np.ndarray
    targets_m: Tensor
    sequence_m: Tensor
    chosen: Tensor | None  # [N, layers, K]

    @classmethod
    def random(cls, seed: int, lengths: list[int], continues: list[int] | None, case: Case) -> MicroBatch:
        random = np.random.default_rng(seed)
        tokens = sum(lengths)
        predictors = np.arange(tokens) if case.batches == "short" else np.flatnonzero(random.random(tokens) < 0.8)
        if case.batches == "late":
            predictors = predictors[predictors > 0.8 * tokens]
        random.shuffle(predictors)  # with shared prefixes they don't ascend
        piece_n = np.repeat(np.arange(len(lengths)), lengths)
        chosen = random.random((tokens, 2, 4)).argsort(-1)[..., :2]
        chosen[random.random(tokens) < 0.2] = -1
        if case.batches == "two experts":
            chosen[:] = 0, 1
        return cls(
            ids=torch.from_numpy(random.integers(0, 40, tokens)),
            lengths=lengths,
            continues=continues or [-1] * len(lengths),
            predictors_m=predictors,
            targets_m=torch.from_numpy(random.integers(0, 40, len(predictors))),
            sequence_m=torch.from_numpy(piece_n[predictors]),
            chosen=torch.from_numpy(chosen) if case.replay else None,
        )

    @classmethod
    def without_targets(cls, replay: bool) -> MicroBatch:
        nothing = np.zeros(0, np.int64)
        unknown = torch.full((1, 2, 2), -1) if replay else None
        return cls(torch.zeros(1, dtype=torch.int64), [1], [-1], nothing, *[torch.from_numpy(nothing)] * 2, unknown)


def micro_batches(case: Case) -> list[MicroBatch]:
    """Five micro-batches of different sizes."""
    shapes: list[tuple[list[int], list[int] | None]] = [([9, 4, 17], None), ([3], None), ([30, 2, 2], None)]
    shapes += [([5, 6, 7, 8, 9], None), ([21, 20], None)]
    if case.shared:
        shapes = [([8, 3, 5, 4], [-1, 0, 0, 2]), ([11, 6, 2, 7, 9], [-1, -1, 0, 0, 1]), ([13], None), *shapes[:2]]
    if case.batches == "short":
        shapes = [([1], None), ([1, 1], None), ([3], None), ([1, 2], None)]
    return [MicroBatch.random(seed, *shape, case) for seed, shape in enumerate(shapes)]


def build(case: Case) -> tuple[Decoder, dict[str, torch.nn.Parameter]]:
    """The model, and an adapter's parameters."""
    model = random_model(3, family=case.family).to(getattr(torch, case.dtype))
    model.checkpointing = case.checkpointing
    if not case.adapter:
        return model, {}
    adapted = [AdaptedTarget(target=target, rank=2, alpha=3.0) for target in targets_of(model.config)]
    adapter = lora.Lora(adapted, dtype=model.dtype, seed=5)
    for name, parameter in adapter.parameters.items():  # B isn't zero, so that A has gradients
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.normal_(0, 0.1, generator=generator)
    lora.use(model, adapter.layers)
    model.requires_grad_(False)
    return model, adapter.parameters


def loss_of(case: Case, logprobs_m: Tensor, batch: MicroBatch) -> Tensor:
    if not len(batch.targets_m):
        return 0 * logprobs_m.sum()
    weights_m = (batch.targets_m % 7 - 2).to(logprobs_m.dtype)
    if case.loss == "token":
        return (logprobs_m * weights_m).sum()
    means = logprobs_m.new_zeros(len(batch.lengths)).scatter_reduce(0, batch.sequence_m, logprobs_m, "mean")
    return ((means[batch.sequence_m] + 3).exp() * weights_m).sum()  # each token's ratio is that of its sequence


def accumulate(model: PackedModel, case: Case, batches: list[MicroBatch]) -> list[float]:
    """The losses of the micro-batches, whose gradients are added up."""
    losses = []
    kernels = native.kernels_for(torch.float32, torch.device("cpu")) if case.native else None
    with native.using(kernels):
        for batch in batches:
            losses.append(_backward(model, case, batch))
    return losses


def _backward(model: PackedModel, case: Case, batch: MicroBatch) -> float:
    replay = [] if batch.chosen is None else [ExpertReplay.of(batch.chosen)]
    hidden_nd = model.forward_packed(batch.ids, batch.lengths, batch.continues, *replay)
    context, share = model.division.context, None
    rows, targets = torch.from_numpy(batch.predictors_m), batch.targets_m
    if context is not None:
        share = context.share(batch.predictors_m, len(batch.ids), torch.device("cpu"))
        rows, targets = share.rows, targets[share.own]
    logprobs = target_logprobs(model.head(hidden_nd.index_select(0, rows)), targets, 0.8)[0]
    loss = loss_of(case, logprobs if share is None else share.gather(logprobs), batch)
    loss.backward()
    return float(loss.detach())


@functools.cache
def alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of one rank."""
    model, adapter = build(case)
    losses = accumulate(model, case, micro_batches(case))
    return losses, _gradients({**dict(model.named_parameters()), **adapter})


def divided(layout: Layout, case: Case, fault: str = "") -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of this rank's micro-batches; on rank 0 the gradients of all ranks added up; the number of exchanges."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        model, adapter = build(case)
        entered = COLLECTIVES.entered
        division, expert_ranks, same_experts = _division(layout)
        model.divide(division)
        batches, copies = micro_batches(case), layout.ranks // layout.context
        while len(batches) % copies:
            batches.append(MicroBatch.without_targets(case.replay))
        copy = torch.distributed.get_rank() // layout.context
        losses = accumulate(model, case, batches[copy::copies])
        entered = COLLECTIVES.entered - entered
        gradients = _gradients({**dict(model.named_parameters()), **adapter})
        for name, gradient in gradients.items():
            if layout.experts > 1 and name.endswith(EXPERTS):
                torch.distributed.all_reduce(gradient, group=same_experts)
                parts = [torch.empty_like(gradient) for _ in range(layout.experts)]
                torch.distributed.all_gather(parts, gradient, group=expert_ranks)
                gradients[name] = torch.cat(parts)
            else:
                torch.distributed.all_reduce(gradient)
    return losses, gradients if torch.distributed.get_rank() == 0 else {}, entered


def alone_hf(folder: str, checkpointing: str = "none") -> tuple[list[float], dict[str, Tensor]]:
    """`alone` of a model of transformers, with some micro-batches of fewer tokens than ranks."""
    model = load_hf(folder, "float32", "cpu")
    model.checkpointing = checkpointing
    return _accumulate_hf(model)


def divided_hf(layout: Layout, folder: str, checkpointing: str = "none") -> tuple[list[float], dict[str, Tensor]]:
    """`divided` of a model of transformers."""
    model = load_hf(folder, "float32", "cpu")
    model.checkpointing = checkpointing
    model.divide(_division(layout)[0])
    losses, gradients = _accumulate_hf(model)
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    return losses, gradients if torch.distributed.get_rank() == 0 else {}


def _accumulate_hf(model: PackedModel) -> tuple[list[float], dict[str, Tensor]]:
    batches = micro_batches(Case()) + micro_batches(Case(batches="short"))
    return accumulate(model, Case(), batches), _gradients(dict(model.named_parameters()))


def refusal(layout: Layout, folder: str) -> str:
    """The error of a model of transformers that this layout can't divide; "": it can."""
    model = load_hf(folder, "float32", "cpu")
    try:
        model.divide(_division(layout)[0])
    except ConfigurationError as error:
        return str(error)
    return ""


def kept_bytes(layout: Layout | None, tokens: int) -> int:
    """The memory that a document's backward needs, on this rank of ``layout`` or alone."""
    model = random_model(3, width=64, head_dim=16)
    if layout is not None:
        model.divide(_division(layout)[0])
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward_packed(torch.arange(tokens) % 40, [tokens]).sum().backward()
    return sum(kept.values())


def _gradients(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: own_rows_of(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }


@functools.cache
def _division(layout: Layout) -> tuple[Division, Any, Any]:
    """This rank's division, its expert group, and the group of the ranks that have the same experts."""
    context = _own_group(layout.groups(layout.context, False)) if layout.context > 1 else None
    experts = same_experts = None
    if layout.experts > 1:
        experts = _own_group(layout.groups(layout.experts, layout.crossed))
        same_experts = _own_group(layout.groups(layout.ranks // layout.experts, not layout.crossed))
    division = Division(
        context=None if context is None else ContextRanks(RankGroup(context)),
        experts=None if experts is None else ExpertRanks(DeviceMesh.from_group(experts, "cpu")),
    )
    return division, experts, same_experts


def _own_group(groups: list[list[int]]) -> Any:
    made = [torch.distributed.new_group(ranks) for ranks in groups]
    rank = torch.distributed.get_rank()
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)

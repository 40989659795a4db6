"""Compares ranks that divide a model with one rank before they train: the gradients of a batch, on a narrow model of
the run's architecture with random weights, by the trainer's own code.

Ranks that average where they should add, or compute a part twice, learn something else without any error: AdamW hides
a factor, and the loss falls all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.samples import FlatBatch, lay_out
from headway.algorithms.step_plan import divide
from headway.config.schema import AlgorithmConfig, Experiment
from headway.models.initialise import NARROW_VOCABULARY
from headway.models.run_model import write_narrow_model
from headway.models.shards.shard import row_width, shards_of
from headway.records.errors import LayoutsDisagree
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.training import TrainBatch
from headway.trainer.learner import Learner
from headway.trainer.policy import PolicyGradient
from headway.trainer.ranks import Ranks

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}  # of a difference, relative to the largest gradient
_SAMPLES, _GROUP_SIZE, _LONGEST = 12, 3, 40  # samples of each rank; tokens of a response
_ONE_RANK = {"shards": 1, "context_parallel": 1, "expert_parallel": 1, "host_memory": "none"}
_OBJECTIVE = AlgorithmConfig(loss="gspo", clip_low=0.99, clip_high=1e3)  # a loss of whole sequences, hardly clipped


def compare_with_one_rank(experiment: Experiment, learner: Learner) -> str:
    """Compare the gradients that the ranks of ``learner`` compute with those of one; a call of all ranks. Returns the
    largest difference in words, or why this architecture can't be compared. Raises LayoutsDisagree on every rank if it
    is beyond `LIMITS`, which names the layer where they part."""
    ranks, settings = learner.ranks, learner.settings
    # With rounded weights a router sends some tokens to other experts.
    dtype = "float32" if learner.model.config.has_experts else settings.dtype
    with TemporaryDirectory(prefix="headway-layout-") as folder, torch.random.fork_rng():
        obstacles = ranks.all_gather(write_narrow_model(experiment.model, folder, experiment.run.seed))
        if obstacle := max(obstacles):  # of any rank
            return f"gradients of {ranks.size} ranks weren't compared with those of one: {obstacle}"
        narrow = _narrow_experiment(experiment, folder, dtype)
        whole_batch = _batch(ranks.data_size)
        one_rank = narrow.trainer.model_copy(update=_ONE_RANK)
        expected = _gradients(narrow.model_copy(update={"trainer": one_rank}), Ranks(), learner.device, whole_batch)
        share = whole_batch.take(divide(whole_batch, narrow.trainer, ranks.data_size)[ranks.data_rank])
        computed = _gradients(narrow, ranks, learner.device, share)
    scale = max(float(gradient.abs().max()) for _, gradient in expected.values()) or 1.0
    differences = {
        name: _difference(first, gradient, expected[name][1]) / scale for name, (first, gradient) in computed.items()
    }
    return _require_small(ranks.all_gather(differences), dtype)


def _narrow_experiment(experiment: Experiment, folder: str, dtype: str) -> Experiment:
    """The experiment with the model in ``folder``, and settings under which each rank has several micro-batches."""
    adapter = experiment.model.adapter
    if adapter is not None and adapter.path:  # of matrices as wide as the run's
        adapter = adapter.model_copy(update={"path": "", "rank": 4, "alpha": 8.0})
    micro_batches = {"packing": "balanced", "micro_batch_tokens": 2 * _LONGEST, "micro_batch_samples": None}
    settings = experiment.trainer.model_copy(update={**micro_batches, "dtype": dtype, "optimizer_steps_per_batch": 1})
    model = experiment.model.model_copy(update={"path": folder, "reference": "", "adapter": adapter})
    return experiment.model_copy(update={"model": model, "trainer": settings, "algorithm": _OBJECTIVE})


def _batch(ranks: int) -> FlatBatch:
    """A batch of random samples of uneven lengths, whose groups share their prompts."""
    random, samples = np.random.default_rng(0), list[Sample]()
    for index in range(_SAMPLES * ranks):
        if index % _GROUP_SIZE == 0:
            prompt_ids = random.integers(NARROW_VOCABULARY, size=random.integers(1, 9)).astype(np.int32)
        tokens = int(random.integers(1, _LONGEST + 1))
        rollout = Rollout(
            group=index // _GROUP_SIZE,
            member=index % _GROUP_SIZE,
            prompt_ids=TokenIds.view(prompt_ids),
            response_ids=TokenIds.view(random.integers(NARROW_VOCABULARY, size=tokens).astype(np.int32)),
            response_logprobs=TokenLogprobs.filled(-float(np.log(NARROW_VOCABULARY)), tokens),
            response_mask=TokenMask.filled(True, tokens),
            versions=(VersionSpan(version=0, tokens=tokens),),
        )
        samples.append(Sample(rollout=rollout, advantage=float(random.standard_normal())))
    return lay_out(TrainBatch(step=0, samples=tuple(samples)))


def _gradients(
    experiment: Experiment, ranks: Ranks, device: torch.device, share: FlatBatch
) -> dict[str, tuple[int, Tensor]]:
    """The gradients of ``share`` by parameter: the number of this rank's first value, and its values [n]."""
    learner = Learner(experiment.model, experiment.trainer, device, ranks, experiment.run.seed)
    PolicyGradient(learner, experiment).accumulate_gradients(share.arrays())
    shards = {shard.name: shard for shard in shards_of(learner.weights())}
    gradients: dict[str, tuple[int, Tensor]] = {}
    for name, gradient in zip(learner.masters.trained(), learner.sum_gradients(), strict=True):
        shard = shards.get(name)  # an adapter's names differ, and all of it is on every rank
        first = 0 if shard is None else shard.first * row_width(shard.shape)
        gradients[name] = first, gradient.detach().flatten().float().cpu()
    return gradients


def _difference(first: int, gradient: Tensor, expected: Tensor) -> float:
    if not len(gradient):
        return 0.0
    largest = float((gradient - expected[first : first + len(gradient)]).abs().max())
    return largest if np.isfinite(largest) else float("inf")


def _require_small(differences_by_rank: Sequence[Mapping[str, float]], dtype: str) -> str:
    """Describe the largest difference. Raises LayoutsDisagree if it is beyond the limit."""
    names, limit = differences_by_rank[0], LIMITS[dtype]
    differences = {name: max(differences[name] for differences in differences_by_rank) for name in names}
    largest = max(differences.values())
    summary = f"gradients of {len(differences_by_rank)} ranks and of one differ by {largest:.1e} of the largest"
    if largest <= limit:
        return f"{summary}; limit {limit:g} ({dtype})"
    wrong_names = [name for name, difference in differences.items() if difference > limit]
    part = min(wrong_names, key=_backward_order)
    raise LayoutsDisagree(
        f"{summary}, in {part} first; the limit is {limit:g} ({dtype}). {len(wrong_names)} of {len(names)} parameters "
        "differ. Nothing was trained: please report it with the layout, trainer.shards = 1 trains without"
    )


def _backward_order(name: str) -> tuple[int, str]:
    """The order in which a backward reaches a parameter: head and last norm, layers from the last to the first, and the
    embedding."""
    layer_match = re.search(r"(?:^|\.)(\d+)\.", name)
    if layer_match is not None:
        return -int(layer_match[1]), name
    return (1 if re.search(r"embed|\bwte\b|\bwpe\b", name) else -(1 << 31)), name

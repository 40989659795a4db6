"""Batches for the trainer's ranks, by what is particular about their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tiny_trainer import VOCABULARY, make_batch

from headway.records.rollout import Rollout
from headway.records.tokens import EXPERTS, KEPT, TokenRows
from headway.records.training import TrainBatch


def make_rank_batch(kind: str, seed: int, step: int = 0) -> TrainBatch:
    """``kind``: "plain", "few" (one sample), "trees" (members share a long prompt and some the response's beginning),
    "kept" (tokens sampled among sets) or "experts" (tokens with the experts of two layers of four)."""
    groups, members = (1, 1) if kind == "few" else (8, 3)
    batch, random = make_batch(seed, groups=groups, members=members, step=step), np.random.default_rng(seed)
    if (change := _CHANGES.get(kind)) is None:
        return batch
    shared = {group: random.integers(0, VOCABULARY, 24).tolist() for group in range(groups)}
    samples = [
        msgspec.structs.replace(sample, rollout=change(sample.rollout, random, shared[sample.rollout.group]))
        for sample in batch.samples
    ]
    return TrainBatch(step=step, samples=tuple(samples))


def _all_with_loss(rollout: Rollout, random: np.random.Generator, shared: list[int]) -> Rollout:
    return msgspec.structs.replace(rollout, response_mask=(True,) * len(rollout.response_ids))


def _with_common_beginning(rollout: Rollout, random: np.random.Generator, shared: list[int]) -> Rollout:
    response = list(rollout.response_ids)
    if rollout.member:
        response[:4] = shared[-4:][: len(response)]
    return msgspec.structs.replace(rollout, prompt_ids=tuple(shared[:20]), response_ids=tuple(response))


def _with_kept_sets(rollout: Rollout, random: np.random.Generator, shared: list[int]) -> Rollout:
    rows: list[list[int]] = [[] for _ in rollout.prompt_ids]
    for token in rollout.response_ids:
        others = random.integers(0, VOCABULARY, int(random.integers(0, 12))).tolist()
        rows.append(sorted({token, *others}) if random.random() < 0.7 else [])
    return msgspec.structs.replace(rollout, token_rows={KEPT: TokenRows.of(rows)})


def _with_experts(rollout: Rollout, random: np.random.Generator, shared: list[int]) -> Rollout:
    tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
    chosen = random.random((tokens, 2, 4)).argsort(-1)[..., :2].reshape(tokens, -1)
    rows = [row if random.random() < 0.8 else [] for row in chosen.tolist()]
    return msgspec.structs.replace(rollout, token_rows={EXPERTS: TokenRows.of(rows)})


_CHANGES: dict[str, Callable[[Rollout, np.random.Generator, list[int]], Any]] = {
    "few": _all_with_loss,
    "trees": _with_common_beginning,
    "kept": _with_kept_sets,
    "experts": _with_experts,
}

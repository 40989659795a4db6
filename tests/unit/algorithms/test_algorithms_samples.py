"""The flat layout of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import make_batch

from headway.algorithms.samples import build_arrays, input_lengths, slice_micro_batch, split_by_group
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.training import TrainBatch


def sample(group: int, prompt: tuple[int, ...], response: tuple[int, ...], **changes) -> Sample:
    fields = {
        "group": group,
        "member": 0,
        "prompt_ids": prompt,
        "response_ids": response,
        "response_logprobs": tuple(-0.5 * (i + 1) for i in range(len(response))),
        "response_mask": (True,) * len(response),
        "versions": (VersionSpan(version=3, tokens=len(response)),) if response else (),
        **changes,
    }
    return Sample(rollout=Rollout(**fields), advantage=1.5 - group)


def test_layout_of_two_samples() -> None:
    first = sample(
        0, (7, 8), (1, 2, 3), response_mask=(True, False, True),
        versions=(VersionSpan(version=4, tokens=2), VersionSpan(version=5, tokens=1)),
    )  # fmt: skip
    arrays = build_arrays(TrainBatch(step=0, samples=(first, sample(1, (9,), (4,)))))
    assert arrays.token_ids_n.tolist() == [7, 8, 1, 2, 3, 9, 4]
    assert arrays.lengths_s.tolist() == [5, 2]
    assert arrays.loss_mask_n.tolist() == [False, False, True, False, True, False, True]
    assert arrays.behaviour_logprobs_n.tolist() == [0, 0, -0.5, -1.0, -1.5, 0, -0.5]
    assert arrays.advantages_n.tolist() == [0, 0, 1.5, 1.5, 1.5, 0, 0.5]
    assert arrays.versions_n.tolist() == [-1, -1, 4, 4, 5, -1, 3]
    assert arrays.groups_s.tolist() == [0, 1]
    assert arrays.loss_tokens == 3


def test_micro_batch_predicts_each_loss_token_from_the_token_before() -> None:
    batch = TrainBatch(step=0, samples=(sample(0, (7, 8), (1, 2, 3)), sample(1, (9,), (4,)), sample(2, (5, 6), (0,))))
    arrays = build_arrays(batch)
    cut = slice_micro_batch(arrays, [0, 2])
    assert cut.input_ids.tolist() == [7, 8, 1, 2, 5, 6]
    assert cut.input_lengths == [4, 2]
    assert cut.predictors_m.tolist() == [1, 2, 3, 5]
    assert arrays.token_ids_n[cut.targets_m].tolist() == [1, 2, 3, 0]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_any_slice_pairs_every_loss_token_with_its_predecessor(seed: int, groups: int, members: int) -> None:
    arrays = build_arrays(make_batch(seed, groups, members))
    active = np.flatnonzero(input_lengths(arrays) > 0)
    if not active.size:
        return
    chosen = np.random.default_rng(seed).permutation(active)
    cut = slice_micro_batch(arrays, chosen)
    assert np.array_equal(cut.input_ids[cut.predictors_m], arrays.token_ids_n[cut.targets_m - 1])
    assert sorted(cut.targets_m.tolist()) == np.flatnonzero(arrays.loss_mask_n).tolist()
    assert sum(cut.input_lengths) == len(cut.input_ids)


def test_empty_prompt_and_empty_response_carry_no_loss() -> None:
    arrays = build_arrays(TrainBatch(step=0, samples=(sample(0, (), (1, 2)), sample(1, (5,), ()), sample(2, (), ()))))
    assert arrays.loss_mask_n.tolist() == [False, True, False]
    assert input_lengths(arrays).tolist() == [1, 0, 0]


def test_empty_batch() -> None:
    arrays = build_arrays(TrainBatch(step=0, samples=()))
    assert (arrays.samples, arrays.tokens, arrays.loss_tokens) == (0, 0, 0)


def test_inconsistent_rollout_is_named() -> None:
    broken = sample(4, (1,), (2, 3), response_logprobs=(-1.0,))
    with pytest.raises(ValueError, match="rollout 4-0"):
        build_arrays(TrainBatch(step=0, samples=(broken,)))


def test_minibatches_keep_groups_whole_and_in_order() -> None:
    arrays = build_arrays(make_batch(0, groups=5, members=3))
    parts = split_by_group(arrays, 2)
    assert [sorted(set(arrays.groups_s[part].tolist())) for part in parts] == [[0, 1, 2], [3, 4]]
    assert np.concatenate(parts).tolist() == list(range(15))
    assert len(split_by_group(arrays, 9)) == 5

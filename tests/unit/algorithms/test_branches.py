"""Branches of a rollout: they share its weight in the loss, so that cutting it up changes no gradient."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import gradient
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.aggregation import Aggregation, weighting
from headway.algorithms.groups.batches import build_batch, useful_samples
from headway.algorithms.samples import SampleArrays, build_arrays, input_lengths, prefix_tree, split_by_group
from headway.config.schema import Experiment
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, FinishedGroup, Group, Rollout, Sample, Verdict
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.verification.verdicts import apply_verdict
from headway.trainer.service import TrainerService

torch.set_num_threads(1)

AGGREGATIONS = get_args(Aggregation)


def span_of(versions: tuple[VersionSpan, ...], first: int, last: int) -> tuple[VersionSpan, ...]:
    each = [span.version for span in versions for _ in range(span.tokens)][first:last]
    return tuple(VersionSpan(version=version, tokens=1) for version in each)


def cut(rollout: Rollout, places: list[int]) -> Rollout:
    """The same tokens in the same contexts: the response up to the first place as the trunk, every piece between two
    places as a branch whose prompt is all before it."""
    edges = [*places, len(rollout.response_ids)]
    pieces = [
        Branch(
            prompt_ids=(*rollout.prompt_ids, *rollout.response_ids[:first]),
            response_ids=rollout.response_ids[first:last],
            response_logprobs=rollout.response_logprobs[first:last],
            response_mask=rollout.response_mask[first:last],
            versions=span_of(rollout.versions, first, last),
        )
        for first, last in zip([0, *places], edges, strict=True)
    ]
    names = ("prompt_ids", "response_ids", "response_logprobs", "response_mask", "versions")
    fields = {name: getattr(pieces[0], name) for name in names}
    return msgspec.structs.replace(rollout, **fields, branches=tuple(pieces[1:]))


def cut_batch(batch: TrainBatch, seed: int) -> TrainBatch:
    chance = Random(seed)
    samples: list[Sample] = []
    for sample in batch.samples:
        length = len(sample.rollout.response_ids)
        places = sorted(chance.sample(range(length), chance.randint(0, min(3, length))))
        samples.append(msgspec.structs.replace(sample, rollout=cut(sample.rollout, places)))
    return msgspec.structs.replace(batch, samples=tuple(samples))


def numbered(batch: TrainBatch) -> TrainBatch:
    """Every response token has a log-probability of its own."""
    samples: list[Sample] = []
    count = 0
    for sample in batch.samples:
        tokens = len(sample.rollout.response_ids)
        logprobs = tuple(-1.0 - (count + place) / 4096 for place in range(tokens))
        count += tokens
        samples.append(
            msgspec.structs.replace(sample, rollout=msgspec.structs.replace(sample.rollout, response_logprobs=logprobs))
        )
    return msgspec.structs.replace(batch, samples=tuple(samples))


def padded(batch: TrainBatch, seed: int) -> TrainBatch:
    """Some samples stand there twice, with half their weight."""
    chance = Random(seed)
    samples: list[Sample] = []
    for sample in batch.samples:
        copies = 1 + (chance.random() < 0.3)
        samples += [msgspec.structs.replace(sample, weight=1.0 / copies)] * copies
    return msgspec.structs.replace(batch, samples=tuple(samples))


def token_weights(arrays: SampleArrays, aggregation: Aggregation, parts: int) -> dict[float, list]:
    """Of every loss token: what its loss is multiplied by, its advantage and version."""
    found: dict[float, list] = {}
    owner_n = np.repeat(np.arange(arrays.samples), arrays.lengths_s)
    for minibatch in split_by_group(arrays, parts):
        weights = weighting(aggregation, arrays, minibatch, max_response_tokens=16)
        for at in np.flatnonzero(arrays.loss_mask_n & np.isin(owner_n, minibatch)).tolist():
            weight = weights.weights_s[owner_n[at]] / weights.divisor
            entry = (float(weight), float(arrays.advantages_n[at]), int(arrays.versions_n[at]))
            found.setdefault(float(arrays.behaviour_logprobs_n[at]), []).append(entry)
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_cutting_rollouts_into_branches_changes_no_tokens_weight(
    aggregation: Aggregation, seed: int, parts: int, pad: bool
) -> None:
    batch = numbered(make_batch(seed, groups=3, members=3))
    if pad:
        batch = padded(batch, seed)
    whole, pieces = build_arrays(batch), build_arrays(cut_batch(batch, seed))
    expected = token_weights(whole, aggregation, parts)
    assert token_weights(pieces, aggregation, parts) == expected
    assert pieces.loss_tokens == whole.loss_tokens
    assert pieces.tokens >= whole.tokens


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_cutting_rollouts_into_branches_changes_no_gradient(tmp_path: Path, aggregation: str, shared: bool) -> None:
    path = make_model(tmp_path / "m")
    batch = make_batch(5, groups=2, members=3)
    raw = make_experiment(
        path,
        Path("/nowhere"),
        algorithm={"loss": "ppo_clip", "aggregation": aggregation},
        trainer={"shared_prefix": shared},
    )
    service = TrainerService(Context, experiment=raw, run_id="test")
    expected = gradient(service, build_arrays(batch))
    pieces = cut_batch(batch, 5)
    assert any(sample.rollout.branches for sample in pieces.samples)
    torch.testing.assert_close(gradient(service, build_arrays(pieces)), expected, rtol=1e-4, atol=1e-6)


def test_layout_of_a_trunk_and_its_branch() -> None:
    trunk = Rollout(
        group=4,
        member=0,
        prompt_ids=(7, 8),
        response_ids=(1, 2, 3),
        response_logprobs=(-1.0, -2.0, -3.0),
        response_mask=(True,) * 3,
        versions=(VersionSpan(version=6, tokens=3),),
    )
    rollout = msgspec.structs.replace(cut(trunk, [2]), turn_ends=(1, 2))
    other = msgspec.structs.replace(trunk, group=5)
    samples = (Sample(rollout=rollout, advantage=0.5, turn_advantages=(0.25, 0.75)), Sample(rollout=other, advantage=2))
    arrays = build_arrays(TrainBatch(step=0, samples=samples))
    assert arrays.token_ids_n.tolist() == [7, 8, 1, 2, 7, 8, 1, 2, 3, 7, 8, 1, 2, 3]
    assert arrays.lengths_s.tolist() == [4, 5, 5]
    assert arrays.loss_mask_n.tolist() == [*[False] * 2, *[True] * 2, *[False] * 4, True, *[False] * 2, *[True] * 3]
    assert arrays.advantages_n.tolist() == [0, 0, 0.25, 0.75, 0, 0, 0, 0, 0.5, 0, 0, 2, 2, 2]
    assert arrays.groups_s.tolist() == [4, 4, 5]
    assert arrays.branches_s is not None
    assert arrays.branches_s.tolist() == [0, 1, 0]
    assert arrays.rollout_tokens_s is not None
    assert arrays.rollout_tokens_s.tolist() == [3, 3, 3]
    assert input_lengths(arrays).tolist() == [3, 4, 4]
    tree = prefix_tree(arrays, np.arange(3), 1)
    assert (tree.order_t.tolist(), tree.common_t.tolist()) == ([1, 0, 2], [0, 3, 0])


def test_a_branch_whose_parts_differ_in_length_is_named() -> None:
    rollout = cut(make_batch(1).samples[0].rollout, [0])
    broken = msgspec.structs.replace(rollout.branches[0], response_logprobs=())
    sample = Sample(rollout=msgspec.structs.replace(rollout, branches=(broken,)), advantage=1.0)
    with pytest.raises(ValueError, match="rollout 0-0"):
        build_arrays(TrainBatch(step=0, samples=(sample,)))


def rollout_with_branch(member: int, **changes: object) -> Rollout:
    whole = Rollout(
        group=0,
        member=member,
        prompt_ids=(7,),
        response_ids=(1, 2, 3),
        response_logprobs=(-1.0,) * 3,
        response_mask=(True,) * 3,
        versions=(VersionSpan(version=6, tokens=2), VersionSpan(version=8, tokens=1)),
        reward=float(member),
    )
    branched = cut(whole, [1])
    older = (VersionSpan(version=4, tokens=1), VersionSpan(version=9, tokens=1))
    branch = msgspec.structs.replace(branched.branches[0], versions=older)
    return msgspec.structs.replace(branched, branches=(branch,), **changes)


def test_the_oldest_and_newest_tokens_of_any_branch_count() -> None:
    rollout = rollout_with_branch(0)
    assert (rollout.first_version, rollout.last_version) == (4, 9)
    assert (rollout.response_tokens, rollout.all_tokens) == (3, 6)
    nothing = Rollout(group=0, member=0, prompt_ids=(1,))
    assert (nothing.first_version, nothing.last_version) == (-1, -1)


def test_a_truncated_rollout_teaches_nothing_in_any_branch_where_it_is_masked() -> None:
    members = tuple(rollout_with_branch(m, finish_reason="length" if m else "stop") for m in range(2))
    task = Task(task_id="t", prompt="p")
    group = Group(index=0, task=task, prompt_ids=(7,), size=2, admitted_version=4, admitted_s=0.0)
    experiment = Experiment.model_validate(
        make_experiment("m", Path("/nowhere"), algorithm={"overlong": "mask", "loss": "ppo_clip"})
    )
    batch = build_batch(9, [FinishedGroup(group=group, rollouts=members)], experiment)
    arrays = build_arrays(batch)
    assert arrays.loss_mask_n.tolist() == [False, True, False, False, True, True, *[False] * 6]
    assert useful_samples(batch.samples, experiment.rules) == 1


def test_rewards_by_turn_have_no_meaning_where_turns_branch() -> None:
    rollout = msgspec.structs.replace(rollout_with_branch(0), turn_ends=(1,))
    found = apply_verdict(rollout, Verdict(reward=1.0, solved=True, turn_rewards=(1.0,)), 0.0)
    assert found.failure is not None
    assert "branches" in found.failure.cause
    assert apply_verdict(rollout, Verdict(reward=1.0, solved=True), 0.0).failure is None

"""Streams and rules through the trainer: loss, gradient and figures are the definition's, in float64 and written out a
second time, however the batch is packed and spread; each source alone gives its part of the mix."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from objective_definition import gradient, on_ranks
from tiny_trainer import VOCABULARY, Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out, split_by_group
from headway.algorithms.step_plan import pass_order
from headway.config import load
from headway.config.objective.rules import DEMONSTRATION, STREAMS
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, Sample
from headway.records.tokens import TokenIds, TokenMask
from headway.records.training import DrawnDemonstration, TrainBatch
from headway.trainer import losses
from headway.trainer.service import TrainerService
from headway.trainer.streams.losses import Divergence

torch.set_num_threads(1)

# rule -> policy coefficient, teacher coefficient, environment coefficient, aggregation
RULES = {
    0: (1.0, 0.0, 0.0, "token_mean"),
    1: (0.5, 2.0, 0.0, "seq_mean_token_mean"),
    2: (0.0, 1.5, 0.25, "token_mean"),
    DEMONSTRATION: (0.0, 0.0, 0.75, "token_mean"),
}
LOSS = {0: "ppo_clip", 1: "gspo"}
SOURCES: list[dict[str, Any]] = [
    {"path": "reward.jsonl"},
    {
        "path": "both.jsonl",
        "algorithm": {
            "loss": "gspo",
            "aggregation": "seq_mean_token_mean",
            "policy_coefficient": 0.5,
            "teacher": "t",
            "teacher_coefficient": 2.0,
        },
    },
    {
        "path": "teacher.jsonl",
        "algorithm": {
            "policy_coefficient": 0.0,
            "teacher": "t",
            "teacher_coefficient": 1.5,
            "environment_coefficient": 0.25,
        },
    },
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher of these tests is a function of the token."""
    monkeypatch.setattr(load, "require_consistent", lambda experiment: None)


def service(path: str, sources: list[dict[str, Any]] = SOURCES, **sections: Any) -> TrainerService:
    sections["tasks"] = {"train": sources}
    sections.setdefault("demonstrations", {"data": "rows.jsonl", "coefficient": 0.75})
    sections["algorithm"] = {"loss": "ppo_clip"} | sections.get("algorithm", {})
    sections["teachers"] = {"t": {"path": path}}
    raw = make_experiment(path, Path("/nowhere"), **sections)
    trainer = TrainerService(Context, experiment=raw, run_id="test")
    score = trainer.learner.logprobs

    def with_divergence(batch: Any, arrays: Any, temperature: float, *model: Any, **taught: Any) -> Any:
        scores = score(batch, arrays, temperature, *model, **taught)
        targets = torch.from_numpy(aimed(arrays.token_ids_n[batch.targets_m])).float()
        difference = scores.logprobs_m - targets
        return scores._replace(divergence=Divergence(difference**2, 2 * difference.detach().abs()))

    trainer.learner.logprobs = with_divergence
    return trainer


def aimed(ids: Any) -> Any:
    """The log-probability that the teacher gives to a token."""
    return -2.0 - 0.05 * np.asarray(ids)


def mixed_batch(seed: int, rules: tuple[int, ...] = (0, 1, 2, 2, 1), demonstrations: int = 3) -> TrainBatch:
    """Groups of several rules: observations, masked and empty responses, a branch; and demonstrations."""
    random, samples = np.random.default_rng(seed), list[Sample]()
    for position, sample in enumerate(make_batch(seed, groups=len(rules)).samples):
        rollout = sample.rollout
        rule, length = rules[rollout.group], len(rollout.response_ids)
        runs: tuple[tuple[int, int], ...] = ()
        if length > 4 and position % 2:
            mask = TokenMask([bool(m) and not 2 <= i < 4 for i, m in enumerate(rollout.response_mask)])
            rollout, runs = msgspec.structs.replace(rollout, response_mask=mask), ((2, 4),)
        if position % 7 == 3:
            rollout = msgspec.structs.replace(rollout, response_mask=TokenMask.filled(False, length))
        if position % 5 == 1:
            ids = tuple(random.integers(0, VOCABULARY, 5).tolist())
            branch = Branch(
                prompt_ids=(*rollout.prompt_ids, *rollout.response_ids[:1]),
                response_ids=ids,
                response_logprobs=(-3.0,) * 5,
                response_mask=(True, False, True, False, True),
                versions=(VersionSpan(version=0, tokens=5),),
                observations=((1, 2), (3, 4)),
            )
            rollout = msgspec.structs.replace(rollout, branches=(branch,))
        rollout = msgspec.structs.replace(rollout, observations=runs)
        samples.append(msgspec.structs.replace(sample, rollout=rollout, rule=rule, imitates=rule == 2))
    drawn = [demonstration(random, row) for row in range(demonstrations)]
    return TrainBatch(step=0, samples=tuple(samples), demonstrations=tuple(drawn))


def demonstration(random: np.random.Generator, row: int) -> DrawnDemonstration:
    length = int(random.integers(3, 12))
    ids = TokenIds(tuple(random.integers(0, VOCABULARY, length).tolist()))
    return DrawnDemonstration(row=row, ids=ids, learned=TokenMask([i > 1 for i in range(length)]))


# --- the definition ---------------------------------------------------------------------------------------


def sequences_of(batch: TrainBatch) -> list[dict[str, Any]]:
    """Each response, as its token sequences with the masks of both kinds."""
    responses = []
    for sample in batch.samples:
        sequences = [
            {
                "ids": [*part.prompt_ids, *part.response_ids],
                "behaviour": [0.0] * len(part.prompt_ids) + list(part.response_logprobs),
                "sampled": [False] * len(part.prompt_ids) + [bool(m) for m in part.response_mask],
                "imitated": [
                    sample.imitates and any(a <= i - len(part.prompt_ids) < b for a, b in part.observations)
                    for i in range(len(part.prompt_ids) + len(part.response_ids))
                ],
            }
            for part in sample.rollout.sequences
        ]
        responses.append({"rule": sample.rule, "advantage": sample.advantage, "sequences": sequences})
    for drawn in batch.demonstrations:
        count = len(drawn.ids)
        sequence = {"ids": list(drawn.ids), "behaviour": [0.0] * count, "sampled": [False] * count}
        sequence["imitated"] = [bool(m) for m in drawn.learned]
        responses.append({"rule": DEMONSTRATION, "advantage": 0.0, "sequences": [sequence]})
    return responses


def defined(path: str, batch: TrainBatch, trainer: TrainerService) -> tuple[torch.Tensor, np.ndarray]:
    """The gradient in float64, and of each stream loss, tokens and slope."""
    model = copy.deepcopy(trainer.learner.model).double()
    parameters = [parameter for _, parameter in model.named_parameters()]
    responses = sequences_of(batch)
    for response in responses:
        for sequence in response["sequences"]:
            ids = torch.tensor(sequence["ids"])
            logits = model.head(model.forward_packed(ids, [len(ids)]))
            logprobs_v = torch.log_softmax(logits[:-1], -1)
            sequence["logprobs"] = logprobs_v[torch.arange(len(ids) - 1), ids[1:]]
            sequence["entropies"] = -(logprobs_v.exp() * logprobs_v).sum(-1)
            for kind in ("sampled", "imitated"):
                sequence[kind] = torch.tensor(sequence[kind][1:])
    total, figures = torch.zeros((), dtype=torch.float64), np.zeros((3, 3))
    for stream, name in enumerate(STREAMS):
        kind = "imitated" if name == "imitate" else "sampled"
        of_stream = [r for r in responses if RULES[r["rule"]][stream] > 0]
        tokens = [sum(int(s[kind].sum()) for s in r["sequences"]) for r in of_stream]
        counted = {"token_mean": sum(tokens), "seq_mean_token_mean": sum(count > 0 for count in tokens)}
        for response, count in zip(of_stream, tokens, strict=True):
            coefficient, aggregation = RULES[response["rule"]][stream], RULES[response["rule"]][3]
            weight = coefficient / max(1, counted[aggregation])
            weight /= max(1, count) if aggregation == "seq_mean_token_mean" else 1
            for sequence in response["sequences"]:
                loss_k, logprobs_k = token_losses(name, response, sequence, sequence[kind], trainer)
                (slope_k,) = torch.autograd.grad(loss_k.sum(), logprobs_k, retain_graph=True)
                total = total + weight * loss_k.sum()
                figures[stream] += [weight * loss_k.sum().item(), len(loss_k), weight * float(slope_k.abs().sum())]
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)]), figures


def token_losses(
    name: str, response: Any, sequence: Any, chosen: torch.Tensor, trainer: TrainerService
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_k = sequence["logprobs"][chosen]
    if name == "imitate":
        return -logprobs_k, logprobs_k
    if name == "teacher":
        ids = np.array(sequence["ids"][1:])[chosen.numpy()]
        return (logprobs_k - torch.from_numpy(aimed(ids))) ** 2, logprobs_k
    behaviour_k = torch.tensor(sequence["behaviour"][1:], dtype=torch.float64)[chosen]
    algorithm, entropies_k = trainer.policy.algorithm, sequence["entropies"][chosen]
    is_uncertain_k = entropies_k >= (algorithm.entropy_threshold or 0.0)
    terms = losses.TokenTerms(
        logprobs_m=torch.where(is_uncertain_k, logprobs_k, logprobs_k.detach()),
        proximal_m=logprobs_k.detach(),
        behaviour_m=behaviour_k,
        advantages_m=torch.full_like(logprobs_k, response["advantage"]),
    )
    loss_k = losses.LOSSES[LOSS[response["rule"]]](terms, losses.LossSettings()).loss_m
    return loss_k - algorithm.entropy_coefficient * entropies_k, logprobs_k


def require_close(actual: Any, expected: Any, limit: float = 2e-6) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.abs(actual - expected).max() <= limit * np.abs(expected).max()


PACKINGS = [
    {"packing": "balanced", "micro_batch_tokens": 40},
    {"packing": "areal", "micro_batch_tokens": 64},
    {"packing": "fixed", "micro_batch_samples": 3},
]


ENTROPY = {"entropy_coefficient": 0.2, "entropy_threshold": 3.1}


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing["packing"])
@pytest.mark.parametrize(("ranks", "algorithm"), [(1, {}), (2, {}), (4, {}), (1, ENTROPY), (2, ENTROPY)])
def test_gradient_and_figures_equal_the_definition(
    model: str, packing: dict[str, Any], ranks: int, algorithm: dict[str, Any]
) -> None:
    batch = mixed_batch(ranks)
    expected, figures = defined(model, batch, service(model, algorithm=algorithm))
    assert (figures[:, 1] > 3).all(), "every stream has tokens"
    trainers = [service(model, trainer=packing, algorithm=algorithm) for _ in range(ranks)]

    def accumulate(trainer: TrainerService, share: Any) -> tuple[torch.Tensor, Any]:
        progress = trainer.policy.accumulate_gradients(share(batch).arrays())
        gathered = progress.gather(trainer.learner.ranks)
        gradients = [g.flatten().clone() for g in trainer.learner.gradients()]
        return torch.cat(gradients), gathered

    outcomes = on_ranks(trainers, accumulate)
    require_close(torch.stack([g for g, _ in outcomes]).sum(0), expected)
    require_close(outcomes[0][1].streams, figures)
    assert outcomes[0][1].loss == pytest.approx(figures[:, 0].sum(), rel=1e-5)


def test_a_stream_without_tokens_is_zero(model: str) -> None:
    batch = mixed_batch(3, rules=(0, 0), demonstrations=0)
    trainer = service(model)
    expected, figures = defined(model, batch, trainer)
    assert not figures[1:].any()
    require_close(gradient(trainer, build_arrays(batch)), expected)
    metrics = trainer.train_step(lay_out(batch)).metrics
    assert (metrics["stream_teacher_loss"], metrics["stream_teacher_tokens"]) == (0.0, 0.0)
    assert metrics["stream_policy_tokens"] == figures[0, 1]


def test_each_source_alone_times_its_share_adds_up_to_the_mix(model: str) -> None:
    batch = mixed_batch(5)
    whole = gradient(service(model), build_arrays(batch))
    figures = defined(model, batch, service(model))[1]
    parts = []
    for rule in (0, 1, 2, DEMONSTRATION):
        alone = msgspec.structs.replace(
            batch,
            samples=tuple(sample for sample in batch.samples if sample.rule == rule),
            demonstrations=batch.demonstrations if rule == DEMONSTRATION else (),
        )
        for stream, coefficient in enumerate(RULES[rule][:3]):
            if not coefficient:
                continue
            # a run of this source and stream alone
            own = [{"path": "own.jsonl", "algorithm": only(rule, stream)}]
            trainer = service(model, own, demonstrations={"data": "rows.jsonl"} if rule == DEMONSTRATION else {})
            samples = [msgspec.structs.replace(s, rule=trainer.experiment.rules.used[0]) for s in alone.samples]
            arrays = build_arrays(msgspec.structs.replace(alone, samples=tuple(samples)))
            counted = count_of(alone, rule, stream), count_of(batch, rule, stream)
            parts.append(coefficient * counted[0] / counted[1] * gradient(trainer, arrays))
    require_close(torch.stack(parts).sum(0), whole)
    assert figures.any()


def only(rule: int, stream: int) -> dict[str, Any]:
    base = {"aggregation": RULES[rule][3], "loss": LOSS.get(rule, "ppo_clip"), "policy_coefficient": 0.0}
    return base | ({"policy_coefficient": 1.0}, {"teacher": "t"}, {"environment_coefficient": 1.0})[stream]


def count_of(batch: TrainBatch, rule: int, stream: int) -> int:
    """Of the stream's tokens or responses in ``batch``, by the unit that the rule's aggregation counts."""
    kind = "imitated" if STREAMS[stream] == "imitate" else "sampled"
    responses = [r for r in sequences_of(batch) if RULES[r["rule"]][stream] > 0]
    tokens = [sum(sum(s[kind][1:]) for s in r["sequences"]) for r in responses]
    return sum(tokens) if RULES[rule][3] == "token_mean" else sum(count > 0 for count in tokens)


def test_two_equal_rules_give_what_one_gives(model: str) -> None:
    batch = mixed_batch(7, rules=(0, 1), demonstrations=0)
    equal = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": {"clip_high": 0.2801}}]
    one = service(model, [{"path": "a.jsonl"}], demonstrations={})
    two = service(model, equal, demonstrations={})
    assert len(two.experiment.rules.used) == 2
    single_rule = tuple(msgspec.structs.replace(sample, rule=0) for sample in batch.samples)
    expected = gradient(one, build_arrays(msgspec.structs.replace(batch, samples=single_rule)))
    require_close(gradient(two, build_arrays(batch)), expected)


def test_masks_ratios_and_alerts_look_at_sampled_tokens_of_the_policy_stream_alone(model: str) -> None:
    stale = {"queue": {"overdue": "mask", "budget": 1}, "algorithm": {}}
    trainer = service(model, **{k: v for k, v in stale.items() if k == "queue"})
    plain = service(model, [{"path": "a.jsonl"}], demonstrations={}, queue=stale["queue"])
    batch = msgspec.structs.replace(mixed_batch(9, rules=(0, 2, 2)), step=2)
    progress = trainer.policy.accumulate_gradients(build_arrays(batch), step=2)
    reward_only = tuple(sample for sample in batch.samples if sample.rule == 0)
    alone = plain.policy.accumulate_gradients(build_arrays(TrainBatch(step=2, samples=reward_only)), step=2)
    mixed, expected = trainer.policy.metrics(progress), plain.policy.metrics(alone)
    assert expected["masked_share"] == 1.0, "all tokens are too old"
    names = ("masked_share", "ratio_p50", "ratio_max", "mismatch_k3", "mismatch_max", "kl", "clip_fraction", "entropy")
    assert {name: mixed[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-5)
    assert progress.streams[0, 0] == 0.0, "masked"
    assert progress.streams[1, 0] > 0, "the teacher's stream isn't masked"
    assert progress.streams[2, 0] > 0, "nor is what no policy sampled"


def test_minibatches_share_the_demonstrations(model: str) -> None:
    batch = mixed_batch(11, rules=(0, 0, 1, 1), demonstrations=4)
    trainer = service(model, trainer={"optimizer_steps_per_batch": 2})
    arrays = build_arrays(batch)
    assert arrays.rules_s is not None
    counts = [int((arrays.rules_s[part] == DEMONSTRATION).sum()) for part in split_by_group(arrays, 2)]
    assert counts == [2, 2]
    assert trainer.train_step(lay_out(batch)).version == 1


def test_entropy_is_of_the_policy_stream_alone(model: str) -> None:
    """Without a token of it the bonus has no gradient, and the threshold's share is of its tokens."""
    imitated = mixed_batch(17, rules=(2, 2))
    assert torch.equal(*(gradient(service(model, algorithm=keys), build_arrays(imitated)) for keys in ({}, ENTROPY)))
    batch = mixed_batch(17)
    sampled = msgspec.structs.replace(batch, demonstrations=(), samples=tuple(s for s in batch.samples if s.rule < 2))
    shares = [
        service(model, algorithm=ENTROPY).train_step(lay_out(trained)).metrics["low_entropy_share"]
        for trained in (batch, sampled)
    ]
    assert 0.1 < shares[0] < 0.9
    assert shares[0] == pytest.approx(shares[1])


def test_a_second_pass_is_a_second_step_of_all_streams(model: str) -> None:
    batch, settings = mixed_batch(19), {"learning_rate": 1e-2}
    twice, by_steps = service(model, trainer={"passes": 2, **settings}), service(model, trainer=settings)
    report, first = (trainer.train_step(lay_out(batch)) for trainer in (twice, by_steps))
    by_steps.train_step(lay_out(msgspec.structs.replace(batch, step=1)))
    for one, other in zip(twice.learner.parameters, by_steps.learner.parameters, strict=True):
        assert torch.equal(one, other)
    names = [name for name in first.metrics if name.startswith("stream_")]
    assert len(names) == 9
    assert {name: report.metrics[name] for name in names} == {name: first.metrics[name] for name in names}


def test_later_passes_shuffle_groups_and_demonstrations(model: str) -> None:
    arrays = build_arrays(mixed_batch(23, rules=(0, 1, 0, 1, 2, 0), demonstrations=6))
    assert arrays.rules_s is not None
    splits = []
    for number in range(3):
        order = partial(pass_order, number=number, seed=0, step=5)
        minibatches = split_by_group(arrays, 3, order)
        assert sorted(np.concatenate(minibatches).tolist()) == list(range(arrays.samples))
        for minibatch in minibatches:
            numbers = np.unique(arrays.groups_s[minibatch])
            assert ((numbers < 0).sum(), (numbers >= 0).sum()) == (2, 2)
            assert np.isin(arrays.groups_s, numbers).sum() == len(minibatch), "groups are whole"
        splits.append([set(arrays.groups_s[minibatch].tolist()) for minibatch in minibatches])
    for one, other in itertools.combinations(splits, 2):
        for is_group in (True, False):
            chosen = [[{n for n in part if (n >= 0) == is_group} for part in split] for split in (one, other)]
            assert chosen[0] != chosen[1]


def test_a_share_of_the_batch_keeps_rules_and_imitated_tokens(model: str) -> None:
    laid_out = lay_out(mixed_batch(13))
    whole = laid_out.arrays()
    for sequences in itertools.batched(range(whole.samples), 3) if hasattr(itertools, "batched") else [(0, 2, 5)]:
        chosen = np.array(sequences)
        taken = laid_out.take(chosen).arrays()
        index_n = np.flatnonzero(np.isin(np.repeat(np.arange(whole.samples), whole.lengths_s), chosen))
        assert whole.imitated_n is not None
        assert taken.imitated_n is not None
        assert np.array_equal(taken.imitated_n, whole.imitated_n[index_n])
        assert whole.rules_s is not None
        assert taken.rules_s is not None
        assert np.array_equal(taken.rules_s, whole.rules_s[chosen])
        assert np.array_equal(taken.imitated_tokens_s, whole.imitated_tokens_s[chosen])

"""Teachers in the trainer, stored scores and contexts: their gradients by definition, in every packing and on ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from objective_definition import gradient, gradient_over_ranks
from tiny_trainer import VOCABULARY, Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays
from headway.algorithms.teacher_scores import score_rows
from headway.config.load import validate_experiment
from headway.models.decoder import Decoder
from headway.models.loading import load_model
from headway.records.generation import PromptLogprobs
from headway.records.rollout import Rollout
from headway.records.tokens import CONTEXT, KEPT, TEACHER, RowLengths, TokenIds, TokenMask, TokenRows
from headway.records.training import DrawnDemonstration, TrainBatch
from headway.trainer.service import TrainerService
from headway.trainer.streams.teachers import UNKNOWN, with_contexts

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    make_model(folder / "model")
    make_model(folder / "teacher", seed=1, width=24)
    return folder


def service(
    folder: Path, teacher: dict[str, Any], algorithm: dict[str, Any] | None = None, **sections: Any
) -> TrainerService:
    teacher = {"path": "teacher"} | teacher
    if teacher["path"] != "self":
        teacher["path"] = str(folder / teacher["path"])
    rule = {"loss": "reinforce", "teacher": "t", "policy_coefficient": 0.0} | (algorithm or {})
    raw = make_experiment(str(folder / "model"), Path("/nowhere"), algorithm=rule, teachers={"t": teacher}, **sections)
    return TrainerService(
        Context(), experiment=validate_experiment(raw, "test").model_dump(mode="json"), run_id="teachers"
    )


def changed(batch: TrainBatch, change: Any) -> TrainBatch:
    samples = [msgspec.structs.replace(sample, rollout=change(sample.rollout)) for sample in batch.samples]
    return TrainBatch(step=batch.step, samples=tuple(samples))


def distributions(model: Decoder, rollout: Rollout, prompt: tuple[int, ...] | None = None) -> torch.Tensor:
    """Log-probabilities [R, V] in the place of each response token."""
    prompt = tuple(rollout.prompt_ids) if prompt is None else prompt
    ids = torch.tensor([*prompt, *rollout.response_ids])
    logits = model.head(model.forward_packed(ids, [len(ids)]))
    return torch.log_softmax(logits[len(prompt) - 1 : -1], -1)


def defined(trainer: TrainerService, batch: TrainBatch, contexts: dict[int, tuple[int, ...]] | None = None):
    """The gradient of the mean reverse KL over the sampled tokens."""
    (teacher,) = trainer.policy.teachers._models.values()
    total, tokens = torch.zeros(()), 0
    for sample in batch.samples:
        rollout = sample.rollout
        mask = torch.tensor(rollout.response_mask)
        log_p = distributions(trainer.learner.model, rollout)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            log_q = distributions(teacher, rollout, (contexts or {}).get(rollout.group))  # pyright: ignore[reportArgumentType]
        total = total + (log_p.exp() * (log_p - log_q)).sum(1)[mask].sum()
        tokens += int(mask.sum())
    return torch.cat([g.flatten() for g in torch.autograd.grad(total / tokens, trainer.learner.parameters)])


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert expected.abs().max() > 1e-4
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("micro_batch_tokens", [24, 64, 4096])
def test_gradient_is_that_of_the_mean_divergence(folder: Path, micro_batch_tokens: int) -> None:
    trainer, batch = service(folder, {}, trainer={"micro_batch_tokens": micro_batch_tokens}), make_batch(3)
    close(gradient(trainer, build_arrays(batch)), defined(trainer, batch), 2e-5)


def test_gradient_is_equal_on_ranks(folder: Path) -> None:
    batch = make_batch(4)
    expected = gradient(service(folder, {}), build_arrays(batch))
    for ranks in (2, 4):
        close(gradient_over_ranks(lambda: service(folder, {}), batch, ranks), expected)


def test_all_tokens_named_equal_the_complete_vocabulary(folder: Path) -> None:
    arrays = build_arrays(make_batch(5))
    close(gradient(service(folder, {"top_k": VOCABULARY}), arrays), gradient(service(folder, {}), arrays), 1e-5)


def scored(batch: TrainBatch, teacher: Decoder, top: int) -> TrainBatch:
    """The batch with the teacher's stored scores of its sampled tokens."""

    @torch.no_grad()
    def add(rollout: Rollout) -> Rollout:
        log_q = distributions(teacher, rollout)
        top_logprobs, top_ids = log_q.topk(top)
        chosen = log_q.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        columns = [x.numpy() for x in (chosen, top_ids.int(), top_logprobs)]
        scores = PromptLogprobs(version=0, logprobs=columns[0], top_ids=columns[1], top_logprobs=columns[2])
        rows = score_rows(scores, np.array(rollout.response_mask))
        token_rows = {TEACHER: TokenRows.joined((TokenRows.empty(len(rollout.prompt_ids)), rows))}
        return msgspec.structs.replace(rollout, token_rows=token_rows)

    return changed(batch, add)


def test_stored_scores_give_the_gradient_of_the_teacher_in_the_trainer(folder: Path) -> None:
    batch, computing = make_batch(6), service(folder, {"top_k": 5})
    (teacher,) = computing.policy.teachers._models.values()
    storing = service(folder, {"top_k": 5, "devices": ["cpu:0"]})
    assert not storing.policy.teachers._models
    assert isinstance(teacher, Decoder)
    stored = build_arrays(scored(batch, teacher, 5))
    close(gradient(storing, stored), gradient(computing, build_arrays(batch)), 1e-5)
    with pytest.raises(ValueError, match="rows of 0 numbers"):
        gradient(storing, build_arrays(batch))


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jensen_shannon"])
def test_padding_among_the_likeliest_counts_in_the_rest(folder: Path, divergence: str) -> None:
    batch, teacher = make_batch(6), make_model(folder / f"padded-{divergence}", seed=1, width=24)

    def padded(rollout: Rollout) -> Rollout:
        """Beside its two likeliest tokens two that only the teacher has: one of them between these."""
        rows, table = rollout.token_rows[TEACHER], np.array(rollout.token_rows[TEACHER].values).reshape(-1, 5)
        small = np.full(len(table), -50.0, np.float32).view(np.uint32)
        pad = [np.full(len(table), VOCABULARY + i, np.uint32) for i in (0, 7)]
        columns = [table[:, 0], table[:, 1], pad[0], table[:, 2], pad[1], table[:, 3], table[:, 4], table[:, 4], small]
        lengths = np.where(np.array(rows.lengths) > 0, 9, 0)
        wide = TokenRows(RowLengths(lengths), TokenRows.of(np.stack(columns, 1), 4).data, 4)
        return msgspec.structs.replace(rollout, token_rows={TEACHER: wide})

    stored = scored(batch, load_model(teacher), 2)
    settings = {"divergence": divergence, "devices": ["cpu:0"]}
    expected = gradient(service(folder, settings | {"top_k": 2}), build_arrays(stored))
    close(gradient(service(folder, settings | {"top_k": 4}), build_arrays(changed(stored, padded))), expected)


@pytest.mark.parametrize("policy_coefficient", [0.0, 0.5])
def test_log_probabilities_of_sampled_tokens_are_added_to_advantages(folder: Path, policy_coefficient: float) -> None:
    batch = make_batch(7)
    rule = {"policy_coefficient": policy_coefficient, "teacher_coefficient": 0.25}
    computing = service(folder, {"divergence": "sampled"}, rule)
    (teacher,) = computing.policy.teachers._models.values()
    assert isinstance(teacher, Decoder)
    arrays = build_arrays(batch)
    computing.policy.accumulate_gradients(arrays)
    progress = computing.policy.accumulate_gradients(arrays)
    assert progress.prepared is not None
    expected = list[float]()
    with torch.no_grad():
        for sample in batch.samples:
            rollout = sample.rollout
            log_q = distributions(teacher, rollout).gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
            added = 0.25 * (log_q.numpy() - np.array(rollout.response_logprobs, np.float32))
            reward = sample.advantage if policy_coefficient else 0.0
            values = np.where(rollout.response_mask, reward + added, sample.advantage)
            expected += [0.0] * len(rollout.prompt_ids) + values.tolist()
    np.testing.assert_allclose(progress.prepared.advantages_n, expected, atol=1e-5)
    storing = service(folder, {"divergence": "sampled", "devices": ["cpu:0"]}, rule)
    close(gradient(storing, build_arrays(scored(batch, teacher, 0))), gradient(computing, arrays), 1e-5)


def test_the_weights_at_the_start_of_a_step_teach_nothing(folder: Path) -> None:
    arrays = build_arrays(make_batch(8))
    for divergence in ("forward", "reverse", "jensen_shannon"):
        trainer = service(folder, {"path": "self", "divergence": divergence}, {"policy_coefficient": 1.0})
        policy = gradient(service(folder, {}, {"teacher_coefficient": 1e-9, "policy_coefficient": 1.0}), arrays)
        both = gradient(trainer, arrays)
        assert (both - policy).abs().max() <= 1e-6 * policy.abs().max()
        progress = trainer.policy.accumulate_gradients(arrays)
        assert abs(progress.streams[1][0]) <= 1e-6


CONTEXTS = {0: (3, 9, 4, 1), 1: (7,), 2: (5, 5, 2, 8, 11, 6, 2)}  # by group; group 3 has none


def in_context(batch: TrainBatch) -> TrainBatch:
    def add(rollout: Rollout) -> Rollout:
        context = CONTEXTS.get(rollout.group)
        rows = {CONTEXT: TokenRows.of([list(context)], 4)} if context else {}
        return msgspec.structs.replace(rollout, token_rows=rows)

    return changed(batch, add)


def test_a_teacher_reads_its_context_in_the_prompts_place(folder: Path) -> None:
    batch = in_context(make_batch(9))
    for teacher in ({}, {"path": "self"}):
        trainer = service(folder, teacher)
        close(gradient(trainer, build_arrays(batch)), defined(trainer, batch, CONTEXTS), 2e-5)


def test_a_teacher_reads_sampled_tokens_alone_beside_imitated_ones(folder: Path) -> None:
    def observed(rollout: Rollout) -> Rollout:
        mask = [bool(m) and not 1 <= i < 3 for i, m in enumerate(rollout.response_mask)]
        runs = ((1, 3),) if len(mask) > 3 else ()
        return msgspec.structs.replace(rollout, response_mask=TokenMask(mask), observations=runs)

    learned = TokenMask([False, False, True, True, True])
    demonstrations = (DrawnDemonstration(row=0, ids=TokenIds((1, 2, 3, 4, 5)), learned=learned),)
    for divergence, context in itertools.product(("reverse", "sampled"), ("", "hint")):
        batch = changed(make_batch(12), observed)
        batch = in_context(batch) if context else batch
        samples = tuple(msgspec.structs.replace(sample, imitates=True) for sample in batch.samples)
        teacher = {"divergence": divergence, "context": context}
        plain, imitates = service(folder, teacher), {"demonstrations": {"data": "rows.jsonl", "coefficient": 1e-9}}
        both = service(folder, teacher, **imitates)
        arrays = build_arrays(TrainBatch(step=0, samples=samples, demonstrations=demonstrations))
        assert arrays.imitated_n is not None
        close(gradient(both, arrays), gradient(plain, build_arrays(batch)))


def test_contexts_take_the_prompts_place_token_by_token() -> None:
    batch = in_context(make_batch(9))
    arrays = with_contexts(build_arrays(batch))
    starts = np.cumsum(arrays.lengths_s) - arrays.lengths_s
    for sample, start, length in zip(batch.samples, starts, arrays.lengths_s, strict=True):
        rollout = sample.rollout
        prompt = CONTEXTS.get(rollout.group, tuple(rollout.prompt_ids))
        assert arrays.token_ids_n[start : start + length].tolist() == [*prompt, *rollout.response_ids]
        assert arrays.loss_mask_n[start + len(prompt) : start + length].tolist() == list(rollout.response_mask)
        assert not arrays.loss_mask_n[start : start + len(prompt)].any()


def test_a_teacher_with_more_rows_is_compared_over_the_models(folder: Path) -> None:
    make_model(folder / "padded", seed=1, width=24, vocabulary=VOCABULARY + 9)
    trainer, arrays = service(folder, {"path": "padded"}), build_arrays(make_batch(10))
    (teacher,) = trainer.policy.teachers._models.values()
    assert isinstance(teacher, Decoder)
    other = service(folder, {})
    (plain,) = other.policy.teachers._models.values()
    with torch.no_grad():  # the same teacher, but for rows of padding
        named = dict(plain.named_parameters())
        for name, parameter in teacher.named_parameters():
            parameter[: len(named[name])] = named[name] if parameter.ndim > 1 else named[name][: len(parameter)]
    close(gradient(trainer, arrays), gradient(other, arrays))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("rows", [VOCABULARY - 4, VOCABULARY + 9])
def test_a_teacher_with_other_rows_scores_sampled_tokens(folder: Path, rows: int, keeps: bool) -> None:
    """An id that it lacks is as unlikely as can be, and read as its last one."""

    def kept(rollout: Rollout) -> Rollout:
        sets = [[]] * len(rollout.prompt_ids) + [sorted({i, (i + 5) % VOCABULARY, 2}) for i in rollout.response_ids]
        return msgspec.structs.replace(rollout, token_rows={KEPT: TokenRows.of(sets, 2)})

    batch = changed(make_batch(11), kept) if keeps else make_batch(11)
    path = f"of-{rows}"
    make_model(folder / path, seed=1, width=24, vocabulary=rows)
    rule = {"allow_truncated_sampling": keeps}
    trainer = service(folder, {"path": path, "divergence": "sampled"}, rule)
    progress = trainer.policy.accumulate_gradients(build_arrays(batch))
    teacher, expected = load_model(folder / path), list[float]()
    for rollout in (sample.rollout for sample in batch.samples):
        prompt, response = list(rollout.prompt_ids), list(rollout.response_ids)
        ids = torch.tensor([*prompt, *response]).clamp(max=rows - 1)
        with torch.no_grad():
            logits = teacher.head(teacher.forward_packed(ids, [len(ids)]))[len(prompt) - 1 : -1]
        for logits_v, token, behaviour in zip(logits, response, rollout.response_logprobs, strict=True):
            among = {token, (token + 5) % VOCABULARY, 2} if keeps else range(rows)
            mass = logits_v[[i for i in among if i < rows]].logsumexp(0)
            expected.append((float(logits_v[token] - mass) if token < rows else UNKNOWN) - behaviour)
    assert progress.prepared is not None
    arrays = build_arrays(batch)
    is_response = arrays.versions_n >= 0
    sampled = arrays.loss_mask_n[is_response]
    advantages = progress.prepared.advantages_n[is_response]
    np.testing.assert_allclose(advantages[sampled], np.array(expected)[sampled], atol=1e-4)
    assert all(bool(values.isfinite().all()) for values in trainer.learner.gradients())


def test_a_teacher_that_lacks_ids_is_compared_over_the_others(folder: Path) -> None:
    make_model(folder / "fewer", seed=1, width=24, vocabulary=VOCABULARY - 4)
    trainer = service(folder, {"path": "fewer"})
    progress = trainer.policy.accumulate_gradients(build_arrays(make_batch(11)))
    assert np.isfinite(progress.loss)
    assert all(bool(values.isfinite().all()) for values in trainer.learner.gradients())

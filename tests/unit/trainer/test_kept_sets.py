"""Kept sets in the trainer: log-probabilities and gradients over what tokens were sampled among, metrics, refusals."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tiny_trainer import VOCABULARY, Context, make_batch, make_experiment, make_model
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from headway.algorithms.samples import build_arrays, lay_out
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.loading import load_model, save_model
from headway.records.errors import ConfigurationError, KeptSetMismatch
from headway.records.generation import UpdateMode, VersionSpan
from headway.records.rollout import Branch, Rollout, Sample
from headway.records.tokens import EXPERTS, KEPT, TokenRows
from headway.records.training import TrainBatch
from headway.tokens import grammar as grammar_module
from headway.tokens.grammar import GRAMMAR_VERSION, GrammarRefused, Grammars, allowed_ids, json_grammar
from headway.tokens.tokenizer import Tokenizer
from headway.trainer import service as service_module
from headway.trainer.kept_sets import KeptSets
from headway.trainer.learner import token_logprobs
from headway.trainer.service import GRAMMAR_FILE, TrainerService
from tests.conformance.engine import VOCABULARY as ENGINE_VOCABULARY
from tests.conformance.engine import Session, model_of, request

torch.set_num_threads(1)
TEMPERATURE = 0.8
GRAMMAR = json_grammar({"type": "array", "items": {"enum": [1, 12, "ab", True]}})
PIECES = ["<end>", *'"ab12[],', "ab", '"a', 'b"', "tr", "ue", "true", "[1", "12", '",', "2]", "<s>"]


def with_tokenizer(folder: str) -> str:
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<s>"))
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<s>", special=True)])
    backend.save(f"{folder}/tokenizer.json")
    (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_tokenizer(make_model(tmp_path_factory.mktemp("kept") / "m"))


def service(model: str, /, **sections: Any) -> TrainerService:
    sections["rollout"] = {"temperature": TEMPERATURE, "max_response_tokens": 16, **sections.get("rollout", {})}
    return TrainerService(Context, experiment=make_experiment(model, Path("/nowhere"), **sections), run_id="test")


def over_sets(model: str, prompt: Sequence[int], response: Sequence[int], sets: Sequence[set[int]]) -> list[float]:
    """Log-probability of each response token among its set; the empty set is the whole vocabulary."""
    decoder, ids = load_model(model, torch.float32), torch.tensor([*prompt, *response])
    with torch.no_grad():
        logits = decoder.head(decoder.forward_packed(ids, [len(ids)]))[len(prompt) - 1 : -1] / TEMPERATURE
    found: list[float] = []
    for row, token, kept in zip(logits, response, sets, strict=True):
        among = sorted(kept) if kept else list(range(VOCABULARY))
        found.append(float(row[token] - row[among].logsumexp(0)))
    return found


def answer(chance: random.Random, grammars: Grammars) -> tuple[list[int], list[set[int]]]:
    """A random answer by GRAMMAR, with the ids that each of its tokens was sampled among."""
    matcher, ids, sets = grammars.matcher(GRAMMAR), list[int](), list[set[int]]()
    while len(ids) < 12 and not matcher.finished:
        allowed = allowed_ids(matcher.allowed()).tolist()
        ids.append(chance.choice(allowed))
        sets.append(set(allowed))
        matcher.advance(ids[-1])
    return ids, sets


def sampled(model: str, seed: int = 0, *, groups: int = 3, members: int = 4, prompt: int = 20) -> TrainBatch:
    """A batch of rollouts as an engine with this model samples them: of each group one over the whole vocabulary, two
    over stored sets and one by a grammar, of whose sets some were cut further; with a second answer behind a reply."""
    chance, grammars, samples = random.Random(seed), Grammars(Tokenizer.load(model), VOCABULARY), list[Sample]()
    for group in range(groups):
        asked = [chance.randrange(VOCABULARY) for _ in range(prompt)]
        for member in range(members):
            runs: list[tuple[int, int]] = []
            response: list[int] = []
            mask: list[bool] = []
            sets: list[set[int]] = []
            rows: list[list[int]] = []
            for turn in range(2):
                if turn:
                    reply = [chance.randrange(VOCABULARY) for _ in range(2)]
                    response, mask, sets = response + reply, [*mask, False, False], [*sets, set(), set()]
                    rows += [[], []]
                if member == 3:
                    ids, among = answer(chance, grammars)
                    runs.append((len(response), len(response) + len(ids)))
                    cut = [chance.random() < 0.3 for _ in ids]
                    halves = [
                        {one, *chance.sample(sorted(few), len(few) // 2)} for one, few in zip(ids, among, strict=True)
                    ]
                    stored = [sorted(some) if short else [] for some, short in zip(halves, cut, strict=True)]
                    among = [set(some) or few for some, few in zip(stored, among, strict=True)]
                else:
                    ids = [chance.randrange(VOCABULARY) for _ in range(5)]
                    stored = [
                        sorted({one, *chance.sample(range(VOCABULARY), chance.choice([0, 1, 4, 30]))}) for one in ids
                    ]
                    stored = [[] for _ in ids] if member == 0 else stored
                    among = list(map(set, stored))
                response, mask, sets, rows = response + ids, mask + [True] * len(ids), sets + among, rows + stored
            logprobs = over_sets(model, asked, response, sets)
            rollout = Rollout(
                group=group, member=member, prompt_ids=asked, response_ids=response, response_mask=mask,
                response_logprobs=[one if learned else 0.0 for one, learned in zip(logprobs, mask, strict=True)],
                versions=(VersionSpan(version=0, tokens=len(response)),),
                token_rows={KEPT: TokenRows.of([[]] * prompt + rows, 2)} if member else {},
                grammars={GRAMMAR: tuple(runs)} if runs else {},
            )  # fmt: skip
            samples.append(Sample(rollout=rollout, advantage=chance.uniform(-1, 1)))
    return TrainBatch(step=0, samples=tuple(samples))


def changed(batch: TrainBatch, **fields: Any) -> TrainBatch:
    samples = [
        msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, **fields)) for one in batch.samples
    ]
    return TrainBatch(step=batch.step, samples=tuple(samples))


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("tokens", [45, 1000])
def test_an_equal_engines_log_probabilities_are_replayed(
    model: str, shared_prefix: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is packed or computed together, in chunks of three tokens too; without replay they were far away."""
    batch, trainer = sampled(model), {"shared_prefix": shared_prefix, "micro_batch_tokens": tokens}
    if tokens == 45:
        monkeypatch.setattr("headway.trainer.learner.token_logprobs.__defaults__", (3 * VOCABULARY, None))
    metrics = service(model, trainer=trainer).train_step(lay_out(batch)).metrics
    assert metrics["mismatch_max"] < 1e-4
    assert abs(metrics["mismatch_k3"]) < 1e-7
    assert metrics["mismatch_k3_unreplayed"] > 0.05
    plain = changed(batch, token_rows={}, grammars={})
    other = service(model, trainer=trainer).train_step(lay_out(plain)).metrics
    assert metrics["mismatch_k3_unreplayed"] == pytest.approx(other["mismatch_k3"], rel=1e-4)
    assert not any(name.startswith("kept") or name.endswith("unreplayed") for name in other)


def test_metrics_count_the_ids_and_the_constrained_tokens(model: str) -> None:
    batch, grammars = sampled(model), Grammars(Tokenizer.load(model), VOCABULARY)
    sizes, constrained, tokens = list[int](), 0, 0
    for sample in batch.samples:
        rollout = sample.rollout
        stored = rollout.token_rows.get(KEPT, TokenRows.empty(99)).lengths.array[20:].tolist()
        by_grammar: dict[int, int] = {}
        for first, behind in rollout.grammars.get(GRAMMAR, ()):
            matcher = grammars.matcher(GRAMMAR)
            for at in range(first, behind):
                by_grammar[at] = len(allowed_ids(matcher.allowed()))
                matcher.advance(rollout.response_ids[at])
        sizes += [size for at in range(len(rollout.response_ids)) if (size := stored[at] or by_grammar.get(at, 0))]
        constrained, tokens = constrained + len(by_grammar), tokens + sum(rollout.response_mask)
    metrics = service(model).train_step(lay_out(batch)).metrics
    assert metrics["kept_ids"] == pytest.approx(sum(sizes) / len(sizes))
    assert metrics["kept_constrained_share"] == pytest.approx(constrained / tokens)


def test_every_pass_is_over_the_same_sets(model: str) -> None:
    """The reference (here the model itself), the proximal policy and the importance masks."""
    algorithm = {
        "kl_coefficient": 0.1,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "proximal": "recompute",
        "sequence_mask": [0.99, 1.01],
    }
    metrics = service(model, algorithm=algorithm).train_step(lay_out(sampled(model))).metrics
    assert abs(metrics["kl_reference"]) < 1e-8
    assert metrics["behaviour_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["masked_share"] == 0.0


def test_parts_and_minibatches_are_as_the_whole(model: str) -> None:
    batch, parts = sampled(model), service(model)
    whole = service(model).train_step(lay_out(batch)).metrics
    for at in range(0, 12, 4):
        parts.forward_backward(lay_out(TrainBatch(step=0, samples=batch.samples[at : at + 4])))
    together = parts.optim_step().metrics
    twice = service(model, trainer={"optimizer_steps_per_batch": 3, "learning_rate": 0.0}).train_step(lay_out(batch))
    for name in ("kept_ids", "kept_constrained_share", "mismatch_k3_unreplayed", "entropy"):
        assert together[name] == pytest.approx(whole[name], abs=1e-6)
        assert twice.metrics[name] == pytest.approx(whole[name], abs=1e-6)


@pytest.mark.parametrize(
    "sections", [{"adapter": {"rank": 4, "alpha": 8.0}}, {"implementation": "transformers"}], ids=["adapter", "hub"]
)
def test_adapters_and_models_of_transformers_replay_as_well(model: str, sections: dict[str, Any]) -> None:
    metrics = service(model, model=sections).train_step(lay_out(sampled(model, groups=1))).metrics
    assert metrics["mismatch_max"] < 1e-4 < metrics["mismatch_k3_unreplayed"]


def test_of_one_id_the_log_probability_and_all_gradients_are_zero(model: str) -> None:
    batch = make_batch(1)
    samples = [
        changed(TrainBatch(step=0, samples=(one,)), token_rows={KEPT: TokenRows.of([[i] for i in whole], 2)}).samples[0]
        for one in batch.samples
        if (whole := [*one.rollout.prompt_ids, *one.rollout.response_ids])
    ]
    trainer = service(model)
    progress = trainer.policy.accumulate_gradients(build_arrays(TrainBatch(step=0, samples=tuple(samples))))
    assert progress.seen_n.sum() > 20
    assert not progress.logprobs_n.any()
    assert not progress.entropies_n.any()
    assert not any(gradient.any() for gradient in trainer.learner.gradients())


def test_of_all_ids_everything_is_as_without_a_set(model: str) -> None:
    batch = make_batch(1)
    every = changed(batch, token_rows={KEPT: TokenRows.of(np.tile(np.arange(VOCABULARY), (20, 1)), 2)})
    one, other = service(model), service(model)
    metrics, plain = one.train_step(lay_out(batch)).metrics, other.train_step(lay_out(every)).metrics
    for a, b in zip(one.learner.parameters, other.learner.parameters, strict=True):
        assert torch.equal(a, b)
    assert {name: plain[name] for name in metrics} == metrics
    assert plain["mismatch_k3_unreplayed"] == metrics["mismatch_k3"]
    assert plain["kept_ids"] == VOCABULARY


@pytest.mark.parametrize("chunk", [1 << 20, 3 * VOCABULARY])
def test_gradients_are_finite_differences(model: str, chunk: int) -> None:
    arrays = build_arrays(sampled(model, groups=1))
    targets_m = np.flatnonzero(arrays.loss_mask_n)
    targets_m = targets_m[:: max(1, len(targets_m) // 8)]  # some of each response's
    kept = KeptSets(arrays, VOCABULARY, lambda: Grammars(Tokenizer.load(model), VOCABULARY)).of(
        targets_m, torch.device("cpu")
    )
    assert kept is not None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(targets_m), 4, dtype=torch.float64, generator=generator, requires_grad=True)
    matrix = torch.randn(4, VOCABULARY, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.from_numpy(arrays.token_ids_n[targets_m])

    def chosen(hidden_md: torch.Tensor, matrix_dv: torch.Tensor) -> torch.Tensor:
        head: Any = SimpleNamespace(head=lambda h: h @ matrix_dv, config=SimpleNamespace(vocabulary_size=VOCABULARY))
        return token_logprobs(head, hidden_md, targets, 0.7, chunk, kept)[0]

    assert torch.autograd.gradcheck(chosen, (hidden, matrix))


class Masks:
    """In the place of grammars: random masks that hold the token that comes next."""

    def __init__(self, ids: Sequence[int], seed: int, words: int) -> None:
        self.ids, self.words = ids, words
        self.chance = np.random.default_rng(seed)
        self.sets: list[set[int]] = []

    def masks(self, text: str, ids: Sequence[int]) -> Iterator[np.ndarray]:
        assert (text, list(ids)) == ("g", list(self.ids))
        yield from map(self.mask, ids)

    def mask(self, token: int) -> np.ndarray:
        few = self.chance.choice(3)  # equal masks are met again
        mask = np.random.default_rng(few).integers(0, 1 << 32, self.words, np.uint32)
        mask[token // 32] |= np.uint32(1 << token % 32)
        self.sets.append({i for i in range(32 * self.words) if mask[i // 32] >> np.uint32(i % 32) & 1})
        return mask


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_masks_are_the_sets(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 100))
    ids = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=2, max_size=12))
    some = st.one_of(st.just(set[int]()), st.sets(st.integers(0, vocabulary - 1)))
    rows = [sorted(row | {token}) if (row := data.draw(some)) else [] for token in ids]
    first = data.draw(st.integers(1, len(ids)))
    behind = data.draw(st.integers(first, len(ids)))
    rollout = Rollout(
        group=3, member=0, prompt_ids=ids[:1], response_ids=ids[1:], response_logprobs=[-1.0] * (len(ids) - 1),
        response_mask=[True] * (len(ids) - 1), versions=(VersionSpan(version=0, tokens=len(ids) - 1),),
        token_rows={KEPT: TokenRows.of(rows, 4)}, grammars={"g": ((first - 1, behind - 1),)} if first < behind else {},
    )  # fmt: skip
    masks = Masks(ids[first:behind], data.draw(st.integers(0, 9)), -(-vocabulary // 32))
    sets = KeptSets(build_arrays(TrainBatch(step=0, samples=(Sample(rollout=rollout, advantage=1.0),))), vocabulary,
                    lambda: masks)  # type: ignore[arg-type, return-value]  # fmt: skip
    kept = sets.of(np.arange(1, len(ids)), torch.device("cpu"))
    constrained = dict(zip(range(first, behind), masks.sets, strict=False))
    model = [set(rows[at]) or constrained.get(at) for at in range(1, len(ids))]
    if kept is None:
        assert model == [None] * len(model)
        return
    at = data.draw(st.integers(0, len(model)))
    outside = torch.cat([kept.outside(0, at), kept.outside(at, len(model))])
    for row, expected in zip(outside, model, strict=True):
        inside = set(torch.nonzero(~row).flatten().tolist())
        assert inside == (set(range(vocabulary)) if expected is None else expected & set(range(vocabulary)))
    assert kept.tokens == sum(expected is not None for expected in model)


def test_sets_without_their_tokens_end_the_step_by_name(model: str) -> None:
    batch = TrainBatch(step=0, samples=sampled(model).samples[4:8])
    wrong = {KEPT: TokenRows.of([[VOCABULARY - 1]] * 99, 2)}
    with pytest.raises(KeptSetMismatch, match=r"group 1: token \d+ isn't in the kept set recorded for it"):
        service(model).train_step(lay_out(changed(batch, token_rows=wrong)))
    wide = {KEPT: TokenRows.of([[*range(VOCABULARY + 1)]] * 99, 2)}
    with pytest.raises(KeptSetMismatch, match=f"id {VOCABULARY} in a vocabulary of {VOCABULARY}"):
        service(model).train_step(lay_out(changed(batch, token_rows=wide)))
    with pytest.raises(KeptSetMismatch, match=r"group 1: .* outside its grammar"):
        service(model).train_step(lay_out(changed(batch, token_rows={}, grammars={GRAMMAR: ((0, 5),)})))
    broken = {json_grammar({"type": "nonsense"}): ((0, 5),)}
    with pytest.raises(KeptSetMismatch, match="group 1: JSON schema"):
        service(model).train_step(lay_out(changed(batch, token_rows={}, grammars=broken)))


def test_responses_whose_grammar_has_too_few_states_for_all_of_them_are_replayed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'start: /a{1,250}/ "1" | /b{1,250}/ "1" | /2{1,250}/ "1"'
    ids = [[*[PIECES.index(letter)] * 200, PIECES.index("1"), 0] for letter in "ab2"]
    samples = [
        Sample(advantage=1.0, rollout=Rollout(
            group=0, member=member, prompt_ids=(1,), response_ids=one, response_logprobs=[-1.0] * len(one),
            response_mask=[True] * len(one), versions=(VersionSpan(version=0, tokens=len(one)),),
            grammars={text: ((0, len(one)),)},
        )) for member, one in enumerate(ids)
    ]  # fmt: skip
    arrays = build_arrays(TrainBatch(step=0, samples=tuple(samples)))

    def outside() -> torch.Tensor:
        grammars = Grammars(Tokenizer.load(model), VOCABULARY)
        kept = KeptSets(arrays, VOCABULARY, lambda: grammars).of(
            np.flatnonzero(arrays.loss_mask_n), torch.device("cpu")
        )
        assert kept is not None
        return kept.outside(0, len(kept.lengths_m))

    expected = outside()
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_limits", lambda states, fuel: limits)
    assert torch.equal(outside(), expected)


def test_a_trainer_takes_its_time_for_masks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may have computed them from states that others had left."""
    monkeypatch.setattr(grammar_module, "_STEP_FUEL", 10)
    text = json_grammar({"type": "string", "pattern": "^[a-b]*[ab][a-b]{25}$"})
    with pytest.raises(GrammarRefused, match="too many expressions"):
        Grammars(Tokenizer.load(model), VOCABULARY).matcher(text)
    assert not service(model).learner._grammars.matcher(text).ended


def test_a_checkpoint_pins_the_library_that_reads_grammars(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"environment": {"name": "agent", "agent": "a:b"}, "algorithm": {"allow_truncated_sampling": True}}
    trainer = service(model, **agent)
    path = tmp_path / "checkpoints" / "step_00000000"
    trainer.save_checkpoint(str(path), {})
    assert (path / GRAMMAR_FILE).read_text() == GRAMMAR_VERSION
    assert service(model, **agent).load_checkpoint(str(path)) == 0
    monkeypatch.setattr(service_module, "GRAMMAR_VERSION", "llguidance 99")
    with pytest.raises(ConfigurationError, match=f"{re.escape(GRAMMAR_VERSION)}; llguidance 99, which is installed"):
        service(model, **agent).load_checkpoint(str(path))
    plain = tmp_path / "checkpoints" / "step_00000001"
    service(model).save_checkpoint(str(plain), {})
    assert not (plain / GRAMMAR_FILE).exists()


def test_what_is_fed_has_no_sets_and_targets_keep_theirs(model: str) -> None:
    """Prompts are shared though kept sets differ; a branch's run of constrained tokens is where its response begins."""
    batch = sampled(model, groups=1)
    one = batch.samples[3]
    branch = Branch(
        prompt_ids=(1, 2, 3), response_ids=(4, 5), response_logprobs=(-1.0, -1.0), response_mask=(True, True),
        versions=(VersionSpan(version=0, tokens=2),), grammars={"other": ((0, 2),), GRAMMAR: ((1, 2),)},
    )  # fmt: skip
    more = msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, branches=(branch,)))
    arrays = lay_out(TrainBatch(step=0, samples=(*batch.samples[:3], more))).arrays()
    assert arrays.numbers_n is arrays.token_ids_n
    behind = arrays.tokens
    assert [run[1:] for run in arrays.grammars[-2:]] == [(behind - 2, behind), (behind - 1, behind)]
    first = int(arrays.lengths_s[:3].sum()) + 20
    runs = one.rollout.grammars[GRAMMAR]
    assert [run[1:] for run in arrays.grammars[:-2]] == [(first + a, first + b) for a, b in runs]
    assert len({id(text) for text, _, _ in arrays.grammars}) == 2
    assert EXPERTS not in arrays.token_rows


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_log_probabilities_are_the_engines_over_an_update_in_flight(
    model: str, tmp_path: Path, mode: UpdateMode
) -> None:
    """Grammar, top-p, top-k and both together, each token under the weights that sampled it."""
    tokenizer = Tokenizer.load(model)
    session = Session(TorchEngine(copy.deepcopy(model_of(0)), slots=6, max_context_tokens=96, tokenizer=tokenizer))
    ways: list[dict[str, Any]] = [
        {"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9, "top_k": 7}, {"grammar": GRAMMAR},
        {"grammar": GRAMMAR, "top_k": 2}, {},
    ]  # fmt: skip
    for number in range(12):
        asked = request(f"{number // 6}-{number % 6}", [5, 6, 7 + number // 6], max_tokens=12, temperature=TEMPERATURE)
        how = msgspec.structs.replace(
            asked.sampling, kept_sets=ENGINE_VOCABULARY, stop_token_ids=(0,), **ways[number % 6]
        )
        session.submit(msgspec.structs.replace(asked, sampling=how))
    session.step(4)
    session.update(1, mode)
    session.run()
    parked = {name: result for name, result in session.results.items() if result.finish_reason == "abort"}
    assert bool(parked) == (mode == "abort")
    for name, result in parked.items():
        del session.results[name]
        asked = session.requests[name]
        session.submit(msgspec.structs.replace(asked, partial=result.response))
    samples: list[Sample] = []
    for name, result in session.run().items():
        how, response = session.requests[name].sampling, result.response
        assert result.finish_reason in ("stop", "length"), result
        samples.append(Sample(advantage=1.0, rollout=Rollout(
            group=int(name[0]), member=int(name[2]), prompt_ids=session.requests[name].prompt_ids,
            response_ids=response.ids, response_logprobs=response.logprobs,
            response_mask=(True,) * len(response.ids), versions=response.versions, token_rows=response.token_rows,
            grammars={how.grammar: ((0, len(response.ids)),)} if how.grammar else {},
        )))  # fmt: skip
    arrays = build_arrays(TrainBatch(step=0, samples=tuple(sorted(samples, key=lambda one: one.rollout.rollout_id))))
    seen = 0
    for version in (0, 1):
        save_model(model_of(version), tmp_path / str(version))
        progress = service(with_tokenizer(str(tmp_path / str(version)))).policy.accumulate_gradients(arrays)
        at = np.flatnonzero(arrays.loss_mask_n & (arrays.versions_n == version))
        assert np.abs(progress.logprobs_n - arrays.behaviour_logprobs_n)[at].max() < 1e-4
        assert progress.masses_n[at].min() < -0.05
        seen += len(at)
    assert seen == np.count_nonzero(arrays.loss_mask_n) > 60

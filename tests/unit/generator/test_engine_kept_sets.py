"""Sampling among a part of the vocabulary: the kernels and plain torch against brute force, and what engines return."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.generator.engines.sampling import KeptRows, RowSampling, counter_uniform, sample_tokens
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.cpu import native
from headway.models.loading import weights_of
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, SamplingParameters
from headway.records.tokens import EXPERTS, KEPT
from tests.conformance.engine import Session
from tests.conformance.reference import random_model

torch.set_num_threads(1)
OFF = 2**31 - 1
NATIVE = pytest.mark.parametrize("fast", [False, True], ids=["torch", "native"])


def kernels(fast: bool) -> native.Kernels | None:
    if not fast:
        return None
    found = native.kernels_for(torch.float32, torch.device("cpu"))
    if found is None:
        pytest.skip(native.missing_reason(torch.float32, torch.device("cpu")))
    return found


def kept_ids(logits: Tensor, allowed: np.ndarray, top_p: float, top_k: int) -> list[int]:
    """By sorting, in double precision: of equals the first."""
    masses = torch.softmax(logits.double(), -1).tolist()
    order = sorted((i for i in range(len(logits)) if allowed[i]), key=lambda i: (-masses[i], i))[:top_k]
    goal, mass, kept = top_p * sum(masses[i] for i in order), 0.0, []
    for i in order:
        if mass >= goal:
            break
        kept.append(i)
        mass += masses[i]
    return sorted(kept)


def words_of(allowed: np.ndarray) -> Tensor:
    """[n, v] bool as masks."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), bool)
    padded[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def how_of(n: int, temperature: Tensor | None = None, **kept: Any) -> RowSampling:
    uniform = torch.from_numpy(counter_uniform(np.arange(n, dtype=np.uint64), np.arange(n)))
    rows = kept.pop("rows", torch.arange(n))
    m = len(rows)
    fields = {
        "rows": rows,
        "greedy": torch.zeros(m, dtype=torch.bool),
        "top_p": torch.ones(m, dtype=torch.float64),
        "top_k": torch.full((m,), OFF),
        "max_kept": torch.full((m,), OFF - 1),
        **kept,
    }
    return RowSampling(uniform, temperature, KeptRows(**fields))


@NATIVE
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 40, 700, 3000])
def test_sets_tokens_and_logprobs_are_those_of_brute_force(vocabulary: int, masked: bool, fast: bool):
    n, random = 120, np.random.default_rng(vocabulary)
    logits = torch.from_numpy(random.normal(0, [[0.1], [2], [4]] * (n // 3), (n, vocabulary))).float()
    logits[::5] = (logits[::5] * 2).round() / 2  # equals
    temperature = torch.linspace(0.5, 1.5, n)
    temperature[::2] = 1
    allowed = random.random((n, vocabulary)) < 0.6 if masked else np.ones((n, vocabulary), bool)
    allowed[:, 2] = True
    top_p = torch.from_numpy(random.choice([1.0, 0.95, 0.5, 1e-9], n))
    top_k = torch.from_numpy(random.choice([OFF, 1, 3, vocabulary // 2, vocabulary + 7], n))
    most = torch.from_numpy(random.choice([0, 2, OFF - 1], n))
    how = how_of(n, temperature, top_p=top_p, top_k=top_k, max_kept=most, masks=words_of(allowed) if masked else None)
    with native.using(kernels(fast)):
        sampled = sample_tokens(logits, how)
    tokens, logprobs, sets = sampled.host()
    scaled = logits / temperature[:, None]
    for row in range(n):
        ids = kept_ids(scaled[row], allowed[row], float(top_p[row]), int(top_k[row]))
        z = scaled[row].double()
        truncated = top_p[row] < 1 or top_k[row] < vocabulary
        if not truncated or not most[row]:
            assert row not in sets
        elif len(ids) > most[row]:
            assert sets[row] == len(ids)
        else:
            assert sets[row].tolist() == ids
        over = z[ids] if most[row] else z
        assert float(logprobs[row]) == pytest.approx(float(z[tokens[row]] - over.logsumexp(0)), abs=1e-5)
        cdf = torch.softmax(z[ids], 0).cumsum(0)
        place = int((cdf <= how.uniform_n[row] * cdf[-1]).sum())
        near = float((cdf - how.uniform_n[row]).abs().min()) < 1e-5  # between two roundings
        assert near or tokens[row] == ids[place]
        assert tokens[row] in ids


@NATIVE
def test_sets_of_one_and_of_all(fast: bool):
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0, 0.0]]).repeat(6, 1)
    allowed = np.ones((6, 5), bool)
    allowed[1] = [False, False, False, True, False]
    how = how_of(
        6,
        top_k=torch.tensor([1, OFF, OFF, OFF, OFF, 4]),
        top_p=torch.tensor([1, 1, 1 - 1e-12, 1, 0.3, 1 - 1e-12], dtype=torch.float64),
        greedy=torch.tensor([False, False, False, True, False, False]),
        masks=words_of(allowed),
    )
    with native.using(kernels(fast)):
        tokens, logprobs, sets = sample_tokens(logits, how).host()
    full = torch.log_softmax(logits[0], 0)
    assert [tokens[0], tokens[1], tokens[3]] == [1, 3, 1]
    assert logprobs[:2].tolist() == [0.0, 0.0]  # one token alone is certain
    assert logprobs[2] == pytest.approx(float(full[tokens[2]]), abs=1e-6)
    assert logprobs[3] == pytest.approx(float(full[1]), abs=1e-6)
    assert {row: ids.tolist() for row, ids in sets.items()} == {0: [1], 2: [0, 1, 2, 3, 4], 4: [1], 5: [0, 1, 2, 4]}


@NATIVE
def test_top_p_is_of_the_mass_that_top_k_keeps(fast: bool):
    how = how_of(1, top_k=torch.tensor([1500]), top_p=torch.tensor([0.5], dtype=torch.float64))
    with native.using(kernels(fast)):
        _, _, sets = sample_tokens(torch.zeros(1, 3000), how).host()
    assert sets[0].tolist() == list(range(750))


@NATIVE
def test_other_rows_stay_as_they_are(fast: bool):
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    plain, some = how_of(8)._replace(kept=None), torch.tensor([1, 4, 5])
    mixed = how_of(8, rows=some, top_p=torch.full((3,), 0.4, dtype=torch.float64))
    with native.using(kernels(fast)):
        alone, among = sample_tokens(logits, plain).tokens, sample_tokens(logits, mixed).tokens
    others = [0, 2, 3, 6, 7]
    assert torch.equal(alone[:, others], among[:, others])
    assert not torch.equal(alone[1, some], among[1, some])


@NATIVE
def test_rows_of_nan_and_of_nothing_show(fast: bool):
    logits = torch.zeros(6, 40)
    logits[0], logits[1, 3], logits[2] = math.nan, math.nan, -math.inf
    logits[3:5, 7] = math.nan  # of some ids alone: no set may come of the others
    logits[5, 7] = math.inf
    top_p = torch.tensor([0.5, 1.0, 0.9, 1.0, 0.9, 0.9], dtype=torch.float64)
    how = how_of(6, top_p=top_p, top_k=torch.tensor([OFF, OFF, OFF, 3, 3, 3]))
    with native.using(kernels(fast)):
        _, logprobs, sets = sample_tokens(logits, how).host()
    assert np.isnan(logprobs).all()
    assert not any(np.size(ids) and not isinstance(ids, int) for ids in sets.values())


# --- engines --------------------------------------------------------------------------------------------------------

PROMPT = (5, 6, 7)
VOCABULARY = 40


def model(seed: int = 0) -> Any:
    return random_model(100 + seed, vocabulary=VOCABULARY)


def make_engine(**options: Any) -> TorchEngine:
    options = {"slots": 4, "max_context_tokens": 96, **options}
    return TorchEngine(copy.deepcopy(model()), **options)


def request(name: str, *, partial: PartialResponse = PartialResponse(), rows_known: int = 0, **how: Any):
    sampling = SamplingParameters(**{"max_tokens": 20, "seed": sum(map(ord, name)), "kept_sets": 64, **how})
    return GenerationRequest(
        request_id=name, prompt_ids=PROMPT, sampling=sampling, partial=partial, rows_known=rows_known
    )


KINDS: dict[str, dict[str, Any]] = {
    "p": {"top_p": 0.8},
    "k": {"top_k": 3, "temperature": 1.3},
    "both": {"top_p": 0.9, "top_k": 7},
    "one": {"top_k": 1},
    "all": {"top_p": 1 - 1e-12},
}


def require_sets(result: GenerationResult, how: SamplingParameters, versions: dict[int, Any], first: int = 0) -> None:
    """Sets are those of each version's own forward pass, and log-probabilities those over them."""
    ids = [*PROMPT, *result.response.ids]
    rows = result.response.token_rows[KEPT]
    assert len(rows) == len(ids) - first
    assert rows.item_bytes == 2
    assert not rows.lengths.array[: len(PROMPT) - first].any()
    at = len(PROMPT)
    for span in result.response.versions:
        with torch.no_grad():
            decoder = versions[span.version]
            logits = decoder.head(decoder.forward_packed(torch.tensor(ids), [len(ids)]))
        for place in range(at, at + span.tokens):
            z = logits[place - 1].double() / how.temperature
            kept = rows[place - first : place - first + 1].values.tolist()
            assert kept == kept_ids(z, np.ones(VOCABULARY, bool), how.top_p, how.top_k or OFF)
            expected = z[ids[place]] - z[kept].logsumexp(0)
            assert result.response.logprobs[place - len(PROMPT)] == pytest.approx(float(expected), abs=1e-4)
        at += span.tokens
    assert at == len(ids)


@pytest.mark.parametrize("native_kernels", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sets_and_logprobs_of_responses(deterministic: bool, native_kernels: bool):
    session = Session(make_engine(slots=6, deterministic=deterministic, native_kernels=native_kernels))
    session.submit(*(request(name, **how) for name, how in KINDS.items()), request("plain"))
    session.run()
    for name in KINDS:
        require_sets(session.results[name], session.requests[name].sampling, {0: model()})
    assert session.results["plain"].response.token_rows == {}
    assert set(session.results["one"].response.token_rows[KEPT].lengths[3:]) == {1}
    assert set(session.results["one"].response.logprobs) == {0.0}
    assert set(session.results["all"].response.token_rows[KEPT].lengths[3:]) == {VOCABULARY}


def test_tokens_do_not_depend_on_neighbours_nor_on_what_is_returned():
    together = Session(make_engine(slots=8))
    together.submit(*(request(name, **how) for name, how in KINDS.items()), request("plain"))
    together.run()
    for name, how in KINDS.items():
        for kept_sets in (64, 0):
            alone = Session(make_engine(slots=1))
            alone.submit(request(name, **{**how, "kept_sets": kept_sets}))
            response = alone.run()[name].response
            assert response.ids == together.results[name].response.ids
            assert (KEPT in response.token_rows) == bool(kept_sets)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_sets_over_updates_in_flight_parking_and_moves(mode: Any):
    """ "keep": with equal weights, so that the old KV is the new one's."""
    versions = {0: model(0), 1: model(0 if mode == "keep" else 1)}
    session = Session(make_engine(slots=5))
    session.submit(*(request(name, **how) for name, how in KINDS.items()))
    session.step(7)
    session.engine.update_weights(weights_of(versions[1]), 1, mode)
    session.collect()
    if mode == "abort":  # parked, and moved to another engine with the tokens and sets so far
        assert session.results.keys() == KINDS.keys()
        parked, session = session.results, Session(TorchEngine(versions[1], slots=5, max_context_tokens=96, version=1))
        for name, how in KINDS.items():
            assert len(parked[name].response.token_rows[KEPT]) == len(PROMPT) + 7
            session.submit(request(name, partial=parked[name].response, **how))
    session.run()
    for name in KINDS:
        assert [span.tokens for span in session.results[name].response.versions] == [7, 13]
        require_sets(session.results[name], session.requests[name].sampling, versions)


def test_sets_of_preempted_requests():
    tight = Session(make_engine(slots=5, kv_capacity_tokens=60))
    tight.submit(*(request(name, max_tokens=30, **how) for name, how in KINDS.items()))
    tight.run()
    assert tight.engine.statistics().preemptions > 0
    for name in KINDS:
        require_sets(tight.results[name], tight.requests[name].sampling, {0: model()})


def test_rows_begin_behind_those_that_the_caller_has_and_stand_beside_experts():
    mixture = random_model(100, vocabulary=VOCABULARY, family="qwen3_moe")
    engine = TorchEngine(mixture, slots=2, max_context_tokens=96, return_experts=True)
    session = Session(engine)
    session.submit(request("a", top_k=2), request("b", top_k=2, rows_known=2))
    session.run()
    for name, known in (("a", 0), ("b", 2)):
        response = session.results[name].response
        assert len(response.token_rows[EXPERTS]) == len(PROMPT) + 20 - 1 - known
        assert response.token_rows[KEPT].lengths.array.tolist() == [0] * (3 - known) + [2] * 20


def test_a_set_that_is_too_large_ends_its_request_alone():
    session = Session(make_engine())
    session.submit(
        request("wide", top_p=0.95, kept_sets=2), request("narrow", top_k=2, kept_sets=2), request("free", kept_sets=0)
    )
    session.run()
    wide = session.results["wide"]
    assert (wide.finish_reason, wide.refused) == ("error", True)
    assert "kept_sets = 2: top_p and top_k keep" in wide.error
    assert len(wide.response.token_rows.get(KEPT, ())) in (0, len(PROMPT) + len(wide.response.ids))
    for name in ("narrow", "free"):
        assert session.results[name].finish_reason == "length"
    session.submit(request("bad", kept_sets=-1))
    assert "kept_sets = -1" in session.run()["bad"].error

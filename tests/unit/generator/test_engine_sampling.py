"""The torch engine's sampler: its random numbers, its distributions, and rows that leave their neighbours alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generator.engines.sampling import KeptRows, RowSampling, counter_uniform, sample_tokens
from headway.generator.engines.torch.engine import TorchEngine
from headway.records.generation import GenerationRequest, SamplingParameters
from tests.conformance.engine import Session, model_of, request
from tests.conformance.reference import forced_logprobs

torch.set_num_threads(1)


def make_engine(*, slots: int = 4, max_context_tokens: int = 96, model: Any = None, **options: Any) -> TorchEngine:
    model = copy.deepcopy(model_of(0)) if model is None else model
    return TorchEngine(model, slots=slots, max_context_tokens=max_context_tokens, **options)


def uniforms(seed: int, positions: Any) -> np.ndarray:
    positions = np.asarray(positions, dtype=np.int64)
    return counter_uniform(np.full(len(positions), seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64), positions)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
@settings(deadline=None, max_examples=200)
def test_uniform_is_inside_the_open_interval_and_reproducible(seed, position):
    first = uniforms(seed, [position])[0]
    assert 0 < first < 1
    assert uniforms(seed, [position + 1, position])[1] == first


def test_uniform_golden():
    """These numbers are part of a run's reproducibility: a change breaks every recorded seed."""
    assert [round(float(u), 9) for u in uniforms(7, [0, 1, 2])] == [0.455897081, 0.721508181, 0.649704337]


@pytest.mark.parametrize("axis", ["seeds", "positions", "both"])
def test_uniform_is_uniform_and_uncorrelated(axis):
    """Neighbouring seeds, neighbouring positions: chi-square over 64 bins and over pairs on an 8 x 8 grid."""
    n = 64_000
    index = np.arange(n, dtype=np.int64)
    seeds = index.astype(np.uint64) if axis != "positions" else np.full(n, 5, np.uint64)
    positions = index if axis != "seeds" else np.full(n, 9, np.int64)
    values = counter_uniform(seeds, positions)
    for cells in (np.floor(values * 64), np.floor(values[:-1] * 8) * 8 + np.floor(values[1:] * 8)):
        counts = np.bincount(cells.astype(int), minlength=64)
        chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 20 < chi_square < 120  # 63 degrees of freedom: mean 63, standard deviation 11


def chi_square(tokens: np.ndarray, expected: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom over tokens of non-zero probability; no other may occur."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    share = expected.double().numpy()
    assert counts[share == 0].sum() == 0
    kept = share > 0
    wanted = share[kept] / share.sum() * len(tokens)
    return float(((counts[kept] - wanted) ** 2 / wanted).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.6, 1.0, 0),
        (1.5, 1.0, 0),
        (1.0, 0.7, 0),
        (1.0, 1.0, 5),
        (0.8, 0.9, 6),
        (1.0, 1e-9, 0),
        (1.0, 1.0, 1),
    ],
)
def test_sampled_distribution(temperature, top_p, top_k):
    """40,000 draws follow the renormalised distribution; log-probabilities are the full softmax's."""
    n = 40_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    full = torch.log_softmax(logits / temperature, -1)
    expected = full.exp()
    order = expected.argsort(descending=True)
    kept = order[: top_k or len(order)]
    mass = expected[kept] / expected[kept].sum()
    kept = kept[(mass.cumsum(0) - mass) < top_p]
    masked = torch.zeros_like(expected)
    masked[kept] = expected[kept]
    engine = make_engine(slots=1)
    rows = KeptRows(
        torch.arange(n),
        torch.zeros(n, dtype=torch.bool),
        torch.full((n,), top_p, dtype=torch.float64),
        torch.full((n,), top_k or 2**31 - 1),
        torch.zeros(n, dtype=torch.int64),
    )
    how = RowSampling(
        torch.from_numpy(uniforms(11, np.arange(n))),
        torch.full((n,), temperature),
        rows if top_p < 1 or top_k else None,
    )
    sampled = sample_tokens(logits.expand(n, -1), how).tokens
    tokens = sampled[0].long()
    statistic, freedom = chi_square(tokens.numpy(), masked)
    assert statistic <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5
    assert torch.allclose(sampled[1], full[tokens], atol=1e-6)
    assert engine.statistics().running == 0


def test_tokens_are_the_inverse_cdf_at_seed_and_position():
    """Token i of a response is where the i-th uniform number falls in its own distribution."""
    session = Session(make_engine())
    session.submit(request("a", max_tokens=20, seed=-3, temperature=0.9))
    ids = session.run()["a"].response.ids
    sequence = torch.tensor([5, 6, 7, *ids])
    with torch.no_grad():
        logits = model_of(0)(sequence, [len(sequence)])[2:-1]
    cdf = torch.softmax(logits / 0.9, -1).double().cumsum(-1)
    expected = [int((row <= u * row[-1]).sum()) for row, u in zip(cdf, uniforms(-3, np.arange(20)), strict=True)]
    assert list(ids) == expected


def test_truncated_and_greedy_rows_leave_their_neighbours_alone():
    plain = [request(f"p{i}", max_tokens=15, seed=i) for i in range(3)]
    alone = Session(make_engine(slots=6))
    alone.submit(*plain)
    alone.run()
    mixed = Session(make_engine(slots=6))
    others = [
        SamplingParameters(max_tokens=25, top_p=0.5, seed=1),
        SamplingParameters(max_tokens=25, top_k=3, seed=2),
        SamplingParameters(max_tokens=25, temperature=0.0, top_k=3),
    ]
    mixed.submit(
        *(GenerationRequest(request_id=f"o{i}", prompt_ids=(5, 6, 7), sampling=how) for i, how in enumerate(others)),
        *plain,
    )
    mixed.run()
    for one in plain:
        assert mixed.results[one.request_id].response.ids == alone.results[one.request_id].response.ids
    for name in ("o0", "o1", "o2"):
        response = mixed.results[name].response
        expected = forced_logprobs(model_of(0), (5, 6, 7), response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)

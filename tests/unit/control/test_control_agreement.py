"""Limits of log-probabilities by precision, and the layer where hidden states part."""

from __future__ import annotations

import numpy as np
import pytest

from headway.control.logprob_limits import LIMITS, coarser, compare, disagreement, divergent_layer
from headway.records.generation import PROBE_TOKENS, PathScores, Probe, ProbeScores, probe_ids

EXPECTED = [-1.0, -2.0, -3.0]


def test_the_probes_tokens_are_the_same_everywhere_and_fit() -> None:
    assert probe_ids(3, 40, 1000) == probe_ids(3, 40, 1000) != probe_ids(4, 40, 1000)
    assert len(probe_ids(1, 40, 1000)) == PROBE_TOKENS
    assert len(probe_ids(1, 40, 8)) == 7
    assert set(probe_ids(1, 3, 1000)) == {0, 1, 2}


def test_log_probabilities_are_compared_as_their_precision_allows() -> None:
    assert compare([-1.00005, -2.0, -3.0], EXPECTED, "float32").wrong == ""
    assert "differ by up to 0.01 and" in compare([-1.01, -2.0, -3.0], EXPECTED, "float32").wrong
    assert compare([-1.0005, -2.0, -3.0], EXPECTED, "tf32").wrong == ""
    assert compare([-1.05, -2.0, -3.05], EXPECTED, "bfloat16").wrong == ""
    assert "the limits are 0.5 and 0.1" in compare([-1.2, -2.2, -3.2], EXPECTED, "bfloat16").wrong
    assert compare([-1.2, -2.2, -3.2], EXPECTED, "fp8").wrong == ""
    assert compare([*[-1.0] * 31, -1.6], [-1.0] * 32, "bfloat16").wrong  # a single token, too
    assert "2 log-probabilities came back, 3 were expected" in compare(EXPECTED[:2], EXPECTED, "float32").wrong


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_differs_and_has_a_figure(value: float) -> None:
    found = compare([value, -2.0, -3.0], EXPECTED, "fp8")
    assert "positions 1" in found.wrong
    assert np.isfinite(found.largest)  # the ledger holds no infinities


def test_a_difference_names_positions_and_their_share() -> None:
    got = np.asarray([-1.0, -2.5, -3.0, -1.7])
    found = compare(got, [-1.0, -2.0, -3.0, -1.0], "float32")
    assert found.largest == pytest.approx(0.7)
    assert "2 of 4 tokens (50%)" in found.wrong
    assert found.wrong.endswith("at positions 2, 4")
    assert compare(np.zeros(20), np.ones(20), "float32").wrong.endswith("at positions 1, 2, 3, 4, 5, 6, 7, 8 …")


def test_precisions_are_ordered_from_fine_to_coarse() -> None:
    assert coarser("bfloat16", "float32", "tf32") == "bfloat16"
    assert [one.largest for one in LIMITS.values()] == sorted(one.largest for one in LIMITS.values())
    assert [one.mean for one in LIMITS.values()] == sorted(one.mean for one in LIMITS.values())
    assert [one.rounding for one in LIMITS.values()] == sorted(one.rounding for one in LIMITS.values())


def states(layers: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((layers + 1, 16, 8)).astype(np.float32)


def changed_from(at: int, share: float, rounding: float) -> np.ndarray:
    found, noise = states(), np.random.default_rng(1).standard_normal(states().shape)
    shares = np.full(len(found), rounding)
    shares[at:] += share
    return (found + noise * shares[:, None, None]).astype(np.float32)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", range(5))
def test_the_layer_that_makes_the_difference_grow_is_named(precision: str, at: int) -> None:
    got = changed_from(at, 0.3, 2 * LIMITS[precision].rounding)
    where = "at the embedding" if at == 0 else f"in layer {at - 1} of 4 (model.layers.{at - 1})"
    assert f"hidden states diverge {where}" in divergent_layer(got, states(), precision)


def test_hidden_states_that_agree_point_to_the_head() -> None:
    assert "the output head" in divergent_layer(changed_from(5, 0.3, 1e-7), states(), "float32")
    broken = states()
    broken[3:, 5] = np.nan
    assert "in layer 2 of 4" in divergent_layer(broken, states(), "float32")
    assert "one side has 3 layers, the other 4" in divergent_layer(states(3), states(), "float32")


def scores(paths: dict[str, list[float]], precision: str = "float32") -> ProbeScores:
    arrays = {name: PathScores(logprobs=np.asarray(values)) for name, values in paths.items()}
    return ProbeScores(probe=Probe(ids=(1, 2, 3, 4)), precision=precision, paths=arrays)


TRAINER = scores({"alone": EXPECTED, "packed": EXPECTED})


def test_each_pair_of_ways_is_compared() -> None:
    off = [-1.0, -2.0, -3.2]
    good = disagreement(TRAINER, scores({"prefill": EXPECTED, "decode": EXPECTED}), "float32")
    assert good == ({"packed": 0.0, "prefill": 0.0, "decode": 0.0}, "")
    for trainer, engine, named in [
        (scores({"alone": EXPECTED, "packed": off}), scores({"prefill": EXPECTED}), "the trainer's packed sequences"),
        (TRAINER, scores({"prefill": off, "decode": off}), "the engine's prefill and the trainer"),
        (TRAINER, scores({"prefill": EXPECTED, "decode": off}), "the engine's decoding on its cache"),
    ]:
        assert disagreement(trainer, engine, "float32").wrong.startswith(named)


def test_the_coarser_side_sets_the_limit_between_both() -> None:
    off = [-1.0, -2.0, -3.2]
    assert disagreement(TRAINER, scores({"prefill": off}, "bfloat16"), "float32").wrong == ""
    assert disagreement(TRAINER, scores({"prefill": off}), "bfloat16").wrong == ""  # weights rounded, products not
    # ... and not within one side
    assert disagreement(TRAINER, scores({"prefill": EXPECTED, "decode": off}), "bfloat16").wrong

"""Tests whether log-probabilities, or hidden states, of two implementations agree up to rounding.

The limits of every probe are those of the coarser side's precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headway.records.generation import PathScores, ProbeScores

_LISTED = 8  # positions in a message
_NOT_FINITE = 1e30  # a difference that isn't finite
_DIVERGENCE_FACTOR = 4.0  # growth of the difference over the previous layer's, or over rounding, at a divergence
_ROUNDING_FACTOR = 4.0  # times the rounding of one value: hidden states after a layer of correct arithmetic


class ProbeLimits(NamedTuple):
    """Limits on the difference of correct log-probabilities, in nats, and the relative rounding error of one value."""

    largest: float
    mean: float
    rounding: float


# From the finest precision to the coarsest. A forward pass rounds each of its products and sums by `rounding` of their
# value; after all layers hidden states, and so logits, are off by two to four times as much. The figures "seen" are of
# random models of four layers (tests/unit/orchestrator/test_agreement.py), in nats; the largest of 31 tokens is some
# five times the mean. The errors of a wrong scale, layer or cache start at a hundred times the figures of float32.
LIMITS: Mapping[str, ProbeLimits] = {
    # 24 bits, so only the order of sums differs. Seen: 2e-6, mean 6e-7; a hundred layers have some ten times as much.
    "float32": ProbeLimits(1e-4, 1e-4, 2.0**-24),
    # vLLM in float32: its attention may multiply with 11 bits, where a GPU is allowed to.
    "tf32": ProbeLimits(1e-3, 1e-3, 2.0**-11),
    # 11 bits. Seen: 0.007, mean 0.002.
    "float16": ProbeLimits(0.1, 0.02, 2.0**-11),
    # 8 bits. Seen: 0.07, mean 0.015; more layers and unlikelier tokens have a multiple.
    "bfloat16": ProbeLimits(0.5, 0.1, 2.0**-8),
    # A mixture of experts in 8 or 11 bits: a router whose scores are nearly equal sends a token to another expert, and
    # the tokens after it see that one. Seen: 1.6, mean 0.12.
    "mixture": ProbeLimits(4.0, 0.3, 2.0**-6),
    # 4 bits (E4M3) of weights, or another format that `quantization` names: tells one model from another, not one step
    # from the next. Not measured: sixteen times bfloat16's rounding, of which scales for each row or block save a part.
    "fp8": ProbeLimits(4.0, 0.5, 2.0**-4),
}


def precision_of(dtype: str, *, quantised: bool = False, mixture: bool = False) -> str:
    """Return the key of `LIMITS` for arithmetic or weights of ``dtype``."""
    if quantised:
        return "fp8"
    return "mixture" if mixture and dtype in ("float16", "bfloat16") else dtype


def coarser(*precisions: str) -> str:
    """Return the coarsest of these precisions, keys of `LIMITS`."""
    return max(precisions, key=list(LIMITS).index)


class ProbeComparison(NamedTuple):
    """Result of comparing log-probabilities. ``wrong``: a description of the difference; "" within the limits."""

    largest: float
    mean: float
    wrong: str


def compare(
    got: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray, precision: str
) -> ProbeComparison:
    """Compare log-probabilities of the same tokens, one by one, within the limits of ``precision``."""
    if len(got) != len(expected):
        reason = f"{len(got)} log-probabilities came back, {len(expected)} were expected"
        return ProbeComparison(_NOT_FINITE, _NOT_FINITE, reason)
    differences = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    differences[~np.isfinite(differences)] = _NOT_FINITE
    limits, worst, mean = LIMITS[precision], float(differences.max()), float(differences.mean())
    if worst <= limits.largest and mean <= limits.mean:
        return ProbeComparison(worst, mean, "")
    above_indices = np.flatnonzero(differences > limits.mean)
    share_text = f"{len(above_indices)} of {len(differences)} tokens ({len(above_indices) / len(differences):.0%})"
    named = ", ".join(map(str, (above_indices[:_LISTED] + 1).tolist())) + (" …" if len(above_indices) > _LISTED else "")
    return ProbeComparison(
        worst,
        mean,
        f"log-probabilities of a probe differ by up to {worst:.2g} and {mean:.2g} on average; the limits are "
        f"{limits.largest:g} and {limits.mean:g} ({precision}). {share_text} differ by more than {limits.mean:g}, "
        f"at positions {named}",
    )


def divergent_layer(got: np.ndarray, expected: np.ndarray, precision: str) -> str:
    """Describe the layer where hidden states diverge: the one at which their difference grows most.

    ``got``, ``expected``: `PathScores.hidden`, [L + 1, N, P]."""
    rounding_error = LIMITS[precision].rounding
    layer_count = len(expected) - 1
    if got.shape != expected.shape:
        return f"one side has {len(got) - 1} layers, the other {layer_count}"
    expected_norms = np.maximum(np.linalg.norm(expected.astype(np.float64), axis=-1), 1 / _NOT_FINITE)
    relative_errors = np.linalg.norm(got - expected.astype(np.float64), axis=-1) / expected_norms
    state_errors = np.nan_to_num(relative_errors.mean(axis=-1), nan=_NOT_FINITE, posinf=_NOT_FINITE)
    growth = state_errors / np.maximum([0.0, *state_errors[:-1]], _ROUNDING_FACTOR * rounding_error)
    if growth.max() <= _DIVERGENCE_FACTOR:
        return f"hidden states agree through all {layer_count} layers: the final norm or the output head differs"
    state_index = int(growth.argmax())
    location_text = (
        "at the embedding (model.embed_tokens)"
        if state_index == 0
        else f"in layer {state_index - 1} of {layer_count} (model.layers.{state_index - 1})"
    )
    return f"hidden states diverge {location_text}, by {state_errors[state_index]:.2g} of their size"


class Disagreement(NamedTuple):
    """Result of the agreement check: the largest difference of each pair of passes in nats, and what disagrees."""

    largest: dict[str, float]
    wrong: str  # "": all agree


def disagreement(trainer: ProbeScores, engine: ProbeScores, precision: str) -> Disagreement:
    """Compare the trainer's packed pass, its pass of a sequence alone, and the engine's prefill and decoding.

    Compared are the packed pass with the pass alone, prefill with that pass, and decoding on the cache with prefill.
    ``precision``: of the weights that the engine receives."""
    alone, prefill = trainer.paths["alone"], engine.paths["prefill"]
    trainer_precision, engine_precision, weight_precision = (
        precision_of(dtype, mixture=trainer.mixture) for dtype in (trainer.precision, engine.precision, precision)
    )
    coarsest_precision = coarser(trainer_precision, engine_precision, weight_precision)
    checks = {
        "packed": ("the trainer's packed sequences and one alone", trainer.paths["packed"], alone, trainer_precision),
        "prefill": ("the engine's prefill and the trainer", prefill, alone, coarsest_precision),
    }
    if (decode := engine.paths.get("decode")) is not None:
        checks["decode"] = ("the engine's decoding on its cache and its prefill", decode, prefill, engine_precision)
    largest_by_pair, problems = dict[str, float](), list[str]()
    condition_suffix = " behind a prompt with pictures" if trainer.probe.pixels else ""
    for pair_name, (subject, got, expected, limits) in checks.items():
        comparison = compare(got.logprobs, expected.logprobs, limits)
        largest_by_pair[pair_name] = comparison.largest
        if comparison.wrong:
            problems.append(f"{subject} disagree{condition_suffix}: {comparison.wrong}{_layer(got, expected, limits)}")
    return Disagreement(largest_by_pair, "; ".join(problems))


def _layer(got: PathScores, expected: PathScores, precision: str) -> str:
    if got.hidden is None or expected.hidden is None:
        return ""
    return f". Their {divergent_layer(got.hidden, expected.hidden, precision)}"

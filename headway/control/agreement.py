"""Whether two sets of log-probabilities, or two models' hidden states, are equal but for rounding: the limits of every
probe, by the precision of the coarser side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headway.records.generation import PathScores, ProbeScores

_NAMED = 8  # positions in a message
_ENDLESS = 1e30  # a difference that isn't finite
_PARTED = 4.0  # times the difference before it, or that of rounding: a layer where hidden states part
_ROUNDED = 4.0  # times the rounding of one value: hidden states after a layer of correct arithmetic


class ProbeLimits(NamedTuple):
    """Most that correct log-probabilities differ by, in nats, and the relative rounding error of one value."""

    largest: float
    mean: float
    rounding: float


# From the finest precision to the coarsest. A forward pass rounds each of its products and sums by `rounding` of their
# value; after all layers hidden states, and so logits, are off by two to four times as much. The figures "seen" are of
# random models of four layers (tests/unit/orchestrator/test_agreement.py), in nats; the largest of 31 tokens is some
# five times the mean. What a wrong scale, layer or cache does starts at a hundred times the figures of float32.
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
    # 4 bits (E4M3) of weights, or whatever else `quantization` names: tells one model from another, not one step from
    # the next. Not measured: sixteen times bfloat16's rounding, of which scales for each row or block save a part.
    "fp8": ProbeLimits(4.0, 0.5, 2.0**-4),
}


def precision_of(dtype: str, *, quantised: bool = False, mixture: bool = False) -> str:
    """The row of `LIMITS` for arithmetic or weights of ``dtype``."""
    if quantised:
        return "fp8"
    return "mixture" if mixture and dtype in ("float16", "bfloat16") else dtype


def coarser(*precisions: str) -> str:
    """The coarsest of these precisions, keys of `LIMITS`."""
    return max(precisions, key=list(LIMITS).index)


class ProbeComparison(NamedTuple):
    """Log-probabilities compared. ``wrong``: a description of the difference; "" within the limits."""

    largest: float
    mean: float
    wrong: str


def compare(
    got: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray, precision: str
) -> ProbeComparison:
    """Compare log-probabilities of the same tokens, one by one, within the limits of ``precision``."""
    if len(got) != len(expected):
        what = f"{len(got)} log-probabilities came back, {len(expected)} were expected"
        return ProbeComparison(_ENDLESS, _ENDLESS, what)
    found = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    found[~np.isfinite(found)] = _ENDLESS
    limits, largest, mean = LIMITS[precision], float(found.max()), float(found.mean())
    if largest <= limits.largest and mean <= limits.mean:
        return ProbeComparison(largest, mean, "")
    far = np.flatnonzero(found > limits.mean)
    share = f"{len(far)} of {len(found)} tokens ({len(far) / len(found):.0%})"
    named = ", ".join(map(str, (far[:_NAMED] + 1).tolist())) + (" …" if len(far) > _NAMED else "")
    return ProbeComparison(
        largest,
        mean,
        f"log-probabilities of a probe differ by up to {largest:.2g} and {mean:.2g} on average; allowed are "
        f"{limits.largest:g} and {limits.mean:g} ({precision}). {share} differ by more than {limits.mean:g}, "
        f"at positions {named}",
    )


def parting_layer(got: np.ndarray, expected: np.ndarray, precision: str) -> str:
    """Name the layer where hidden states part (`PathScores.hidden`, [L + 1, N, P]): the one that makes their
    difference grow most."""
    rounding = LIMITS[precision].rounding
    layers = len(expected) - 1
    if got.shape != expected.shape:
        return f"one side has {len(got) - 1} layers, the other {layers}"
    sizes = np.maximum(np.linalg.norm(expected.astype(np.float64), axis=-1), 1 / _ENDLESS)
    shares = np.linalg.norm(got - expected.astype(np.float64), axis=-1) / sizes
    parts = np.nan_to_num(shares.mean(axis=-1), nan=_ENDLESS, posinf=_ENDLESS)
    growth = parts / np.maximum([0.0, *parts[:-1]], _ROUNDED * rounding)
    if growth.max() <= _PARTED:
        return f"hidden states agree through all {layers} layers: it is the final norm or the output head"
    at = int(growth.argmax())
    where = (
        "at the embedding (model.embed_tokens)" if at == 0 else f"in layer {at - 1} of {layers} (model.layers.{at - 1})"
    )
    return f"hidden states part {where}, by {parts[at]:.2g} of their size"


class Disagreement(NamedTuple):
    """Result of the agreement check: the largest difference in nats of each pair of ways, and what is wrong."""

    largest: dict[str, float]
    wrong: str  # "": nothing


def disagreement(trainer: ProbeScores, engine: ProbeScores, precision: str) -> Disagreement:
    """Compare the trainer's packed pass with that of a sequence alone, the engine's prefill with that, and its decoding
    on the cache with its prefill. ``precision``: that of the weights which the engine is given."""
    alone, prefill = trainer.paths["alone"], engine.paths["prefill"]
    own, its, weights = (
        precision_of(one, mixture=trainer.mixture) for one in (trainer.precision, engine.precision, precision)
    )
    both = coarser(own, its, weights)
    pairs = {
        "packed": ("the trainer's packed sequences and one alone", trainer.paths["packed"], alone, own),
        "prefill": ("the engine's prefill and the trainer", prefill, alone, both),
    }
    if (decode := engine.paths.get("decode")) is not None:
        pairs["decode"] = ("the engine's decoding on its cache and its prefill", decode, prefill, its)
    largest, problems = dict[str, float](), list[str]()
    where = " behind a prompt with pictures" if trainer.probe.pixels else ""
    for name, (what, got, expected, within) in pairs.items():
        found = compare(got.logprobs, expected.logprobs, within)
        largest[name] = found.largest
        if found.wrong:
            problems.append(f"{what} disagree{where}: {found.wrong}{_layer(got, expected, within)}")
    return Disagreement(largest, "; ".join(problems))


def _layer(got: PathScores, expected: PathScores, precision: str) -> str:
    if got.hidden is None or expected.hidden is None:
        return ""
    return f". Their {parting_layer(got.hidden, expected.hidden, precision)}"

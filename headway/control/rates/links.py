"""Seconds that a version takes over a link, whole or by what has changed, and the budget that hides them."""

from __future__ import annotations

import math

# Bits of a changed value's difference from its base, coded: most are one step of bfloat16 up or down. Measured on a
# model of 48 M parameters: benchmarks/weight_update.py --delta. Where more change, by longer steps; this is estimated.
_DIFFERENCE_BITS, _MORE_BITS = 2.0, 6.0
_CODING = 1.1  # times the entropy
_ENCODED_BYTES_PER_S = 0.4e9  # of a version's bytes, by one core
_MOST_OF_WHOLE = 0.4  # that deltas may take
# Shares of values that change in a step, by learning rate: bfloat16 published from float32, later than step 5.
_CHANGED_SHARES = ((1e-6, 0.018), (1e-5, 0.11), (1e-4, 0.43))


def changed_share(learning_rate: float, dtype: str) -> float:
    """The share of published values that a step changes, as measured on a model of 43 M parameters; between measured
    rates by their logarithms. All change in float32."""
    if dtype != "bfloat16":
        return 1.0
    (low_rate, low_share), (middle_rate, middle_share), (high_rate, high_share) = _CHANGED_SHARES
    if learning_rate <= middle_rate:
        slope = math.log(middle_share / low_share) / math.log(middle_rate / low_rate)
        return low_share * (max(learning_rate, 1e-12) / low_rate) ** slope
    slope = math.log(high_share / middle_share) / math.log(high_rate / middle_rate)
    return min(1.0, middle_share * (learning_rate / middle_rate) ** slope)


def delta_bytes(version_bytes: float, changed: float, value_bytes: int = 2) -> float:
    """Bytes of a delta of a version in which a share of the values has ``changed``: near the entropy of positions and
    differences; the whole version where that is more than 0.4 of it."""
    if not 0 < changed < 1:
        return version_bytes if changed else 0.0
    position_bits = -(changed * math.log2(changed) + (1 - changed) * math.log2(1 - changed))
    difference_bits = _DIFFERENCE_BITS + _MORE_BITS * changed
    share = _CODING * (position_bits + changed * difference_bits) / (8 * value_bytes)
    return version_bytes * (share if share <= _MOST_OF_WHOLE else 1.0)


def update_s(version_bytes: float, link_bytes_per_s: float, changed: float = 1.0, encoders: int = 4) -> float:
    """Seconds until a version is behind a link, beside both sides' work. ``changed``: as of `delta_bytes`; 1: it goes
    whole. ``encoders``: cores that find what has changed, of all ranks together."""
    sent_bytes = delta_bytes(version_bytes, changed)
    encode_s = version_bytes / (_ENCODED_BYTES_PER_S * encoders) if sent_bytes < version_bytes else 0.0
    return encode_s + sent_bytes / link_bytes_per_s


def hiding_budget(seconds: float, step_s: float) -> int:
    """The smallest budget η at which updates that take so long hold up no step: versions on their way, and one more
    that is sampled from meanwhile."""
    return math.ceil(seconds / step_s) + 1

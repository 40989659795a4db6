"""Formats numbers for people."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.records.ledger import KernelShare


def duration(seconds: float) -> str:
    """Format a duration as 12 ms, 3.4 s, 5 min 07 s or 2 h 05 min; – if not finite."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 59.95 else "1 min 00 s"
    rounded_s = round(seconds)
    if rounded_s < 3600:
        return f"{rounded_s // 60} min {rounded_s % 60:02d} s"
    return f"{rounded_s // 3600} h {rounded_s % 3600 // 60:02d} min"


def quantity(value: float) -> str:
    """Format a number with three significant digits, thousands as k, millions as M; – if not finite."""
    if not math.isfinite(value):
        return "–"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'T': 1e12, 'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def score(rate: float | None, error: float | None = None) -> str:
    """Format a solve rate with its standard error; – without data (None or NaN)."""
    if rate is None or not math.isfinite(rate):
        return "–"
    return f"{rate:.3f}" if error is None else f"{rate:.3f} ± {error:.3f}"


def percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def format_kernel_shares(shares: Mapping[str, KernelShare]) -> dict[str, str]:
    """Format an evaluation's shares of kernels by name, each with its 95 % interval and counts."""
    return {
        name: f"{share.value:.3f} [{share.interval[0]:.3f}, {share.interval[1]:.3f}] ({share.count} of {share.rollouts}"
        + (f", {share.untimed} correct ones untimed)" if share.untimed else ")")
        for name, share in shares.items()
    }

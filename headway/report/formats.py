"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.records.ledger import KernelShare


def duration(seconds: float) -> str:
    """A duration in the form 12 ms, 3.4 s, 5 min 07 s or 2 h 05 min; – if not finite."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 59.95 else "1 min 00 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def quantity(value: float) -> str:
    """A number with three significant digits, thousands as k, millions as M; – if not finite."""
    if not math.isfinite(value):
        return "–"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'T': 1e12, 'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def score(rate: float | None, error: float | None = None) -> str:
    """A solve rate with its standard error; – without data (None or NaN)."""
    if rate is None or not math.isfinite(rate):
        return "–"
    return f"{rate:.3f}" if error is None else f"{rate:.3f} ± {error:.3f}"


def percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def shown_kernels(found: Mapping[str, KernelShare]) -> dict[str, str]:
    """An evaluation's shares of kernels in words, by name: value, 95 % interval, counts."""
    return {
        name: f"{one.value:.3f} [{one.interval[0]:.3f}, {one.interval[1]:.3f}] ({one.count} of {one.rollouts}"
        + (f", {one.untimed} correct ones untimed)" if one.untimed else ")")
        for name, one in found.items()
    }

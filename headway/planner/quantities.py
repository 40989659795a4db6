"""Quantities of a scenario: a number, a distribution, or values by training step; drawn from keys, without a state."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.config.section import Section

_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)
_MASK = (1 << 64) - 1
_KEYS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "lognormal": ("median", "p99"),
    "quantiles": ("at",),
    "steps": ("values",),
}


class Quantity(Section):
    """A number stands for ``{kind = "constant", value = NUMBER}``."""

    kind: Literal["constant", "lognormal", "quantiles", "steps"]  # which of the keys below count
    value: float | None = None  # constant
    median: Annotated[float, Field(gt=0)] | None = None  # lognormal
    p99: Annotated[float, Field(gt=0)] | None = None  # lognormal: 99 of 100 values are at most this
    at: tuple[tuple[float, float], ...] = ()  # quantiles: [share, value] pairs, both rising; straight lines between
    values: tuple[float, ...] = ()  # steps: of training step 0, 1, ...; the last one holds from then on
    least: float | None = None  # smaller values become this
    most: float | None = None  # larger values become this

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, raw: Any) -> Any:
        return {"kind": "constant", "value": raw} if isinstance(raw, (int, float)) else raw

    @model_validator(mode="after")
    def _complete(self) -> Quantity:
        needed_keys = _KEYS[self.kind]
        missing_keys = [name for name in needed_keys if not getattr(self, name) and getattr(self, name) != 0]
        if missing_keys:
            raise ValueError(f"kind = {self.kind!r} needs {' and '.join(missing_keys)}")
        others = sorted({name for names in _KEYS.values() for name in names} & self.model_fields_set - set(needed_keys))
        if others:
            raise ValueError(f"kind = {self.kind!r} takes {', '.join(needed_keys)}, not {', '.join(others)}")
        if self.median is not None and self.p99 is not None and self.p99 < self.median:
            raise ValueError(f"p99 = {self.p99:g} is below the median {self.median:g}")
        shares, values = [share for share, _ in self.at], [value for _, value in self.at]
        if self.at and (shares != sorted(set(shares)) or values != sorted(values)):
            raise ValueError("at: [share, value] pairs, shares rising from 0 to 1, values never falling")
        if self.at and (shares[0] != 0 or shares[-1] != 1):
            raise ValueError(f"at: the first share must be 0 and the last 1, not {shares[0]:g} and {shares[-1]:g}")
        return self

    @model_serializer(mode="wrap")
    def _serialize_kind(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialise only the keys of this kind, so that the result can be read again."""
        keys = {"kind", *_KEYS[self.kind]} | {name for name in ("least", "most") if getattr(self, name) is not None}
        return {name: value for name, value in written(self).items() if name in keys}

    def at_normal(self, z: float, step: int = 0) -> float:
        """The value at the same quantile of this distribution as ``z`` is of the standard normal one."""
        if self.value is not None:
            unclamped = self.value
        elif self.median is not None:
            unclamped = self.median * math.exp(self._sigma * z)
        elif self.values:
            unclamped = self.values[min(step, len(self.values) - 1)]
        else:
            unclamped = self._interpolated(_NORMAL.cdf(z))
        if self.least is not None and unclamped < self.least:
            return self.least
        return self.most if self.most is not None and unclamped > self.most else unclamped

    def draw(self, key: int, step: int = 0) -> float:
        """The value that belongs to ``key``."""
        return self.at_normal(0.0 if self.fixed else normal(key), step)

    @property
    def fixed(self) -> bool:
        return self.kind in ("constant", "steps")

    @cached_property
    def _sigma(self) -> float:
        assert self.median is not None
        assert self.p99 is not None
        return math.log(self.p99 / self.median) / _P99

    def _interpolated(self, share: float) -> float:
        position = min(bisect_right(self.at, (share, math.inf)), len(self.at) - 1)
        (low_share, low_value), (high_share, high_value) = self.at[position - 1], self.at[position]
        return low_value + (high_value - low_value) * min(1.0, (share - low_share) / (high_share - low_share))


def constant(value: float) -> Quantity:
    return Quantity(kind="constant", value=value)


def mix(*parts: int) -> int:
    """64 bits that depend on ``parts`` alone (the finaliser of SplitMix64, Steele et al. 2014, over each in turn)."""
    mixed = 0
    for part in parts:
        mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
    return mixed


def uniform(key: int) -> float:
    """A uniform number in (0, 1), determined by ``key``."""
    return ((mix(key) >> 11) + 0.5) * 2.0**-53


def normal(key: int) -> float:
    """A standard normal number, determined by ``key``."""
    return _NORMAL.inv_cdf(uniform(key))

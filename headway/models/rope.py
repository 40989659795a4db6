"""Rotary frequencies, and their scaling for contexts longer than the original training context; torch-free."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from headway.records.errors import ConfigurationError


class RopeScaling(ABC):
    """A scaling of rotary frequencies. The fields of subclasses are named as in ``config.json``."""

    rope_type: ClassVar[str]

    @abstractmethod
    def frequencies(self, theta: float, head_dim: int) -> list[float]:
        """The scaled angular frequency of each rotary pair (see `unscaled`)."""

    @property
    def magnitude(self) -> float:
        """The factor on rotated queries and keys."""
        return 1.0

    def to_mapping(self) -> dict[str, Any]:
        return {"rope_type": self.rope_type, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation, which divides every frequency by the same factor (Chen et al. 2023)."""

    rope_type = "linear"

    factor: float

    def frequencies(self, theta: float, head_dim: int) -> list[float]:
        return [frequency / self.factor for frequency in unscaled(theta, head_dim)]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3's frequency scaling, which stretches long wavelengths, keeps short ones and blends those between."""

    rope_type = "llama3"

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, head_dim: int) -> list[float]:
        return [self._scale(frequency) for frequency in unscaled(theta, head_dim)]

    def _scale(self, frequency: float) -> float:
        wavelength, original = 2 * math.pi / frequency, self.original_max_position_embeddings
        if wavelength < original / self.high_freq_factor:
            return frequency
        if wavelength > original / self.low_freq_factor:
            return frequency / self.factor
        blend = (original / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023). Pairs that turn more than ``beta_fast`` times within the original context keep their
    frequency, pairs that turn less than ``beta_slow`` times are interpolated, and those between are blended. Queries
    and keys are each multiplied by ``attention_factor``. The computation is transformers', to agree with its models."""

    rope_type = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ends of the blend are rounded outwards to whole pairs

    def frequencies(self, theta: float, head_dim: int) -> list[float]:
        low, high = (self._pair_that_turns(turns, theta, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 0.001
        blends = [min(max((pair - low) / span, 0.0), 1.0) for pair in range(head_dim // 2)]
        plain_frequencies = unscaled(theta, head_dim)
        return [f * (1 - blend) + f / self.factor * blend for f, blend in zip(plain_frequencies, blends, strict=True)]

    def _pair_that_turns(self, turns: float, theta: float, head_dim: int) -> float:
        """The (fractional) index of the rotary pair that turns ``turns`` times within the original context."""
        original_positions = self.original_max_position_embeddings
        return head_dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def magnitude(self) -> float:
        return self.attention_factor


def unscaled(theta: float, head_dim: int) -> list[float]:
    """Angular frequency of each rotary pair, [head_dim / 2], radians per position (RoFormer, Eq. 15)."""
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> list[float]:
    return unscaled(theta, head_dim) if scaling is None else scaling.frequencies(theta, head_dim)


def read_rope(raw: dict[str, Any], theta: float, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from one ``rope_parameters`` or ``rope_scaling``; ``theta`` is the default.

    Raises ConfigurationError for an unsupported type or a missing value.
    """
    theta = float(raw.get("rope_theta") or theta)
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError("partial_rotary_factor: only whole-head rotation (1.0) is supported")
    if rope_type == "default":
        return theta, None
    if rope_type not in _READERS:
        supported_names = ", ".join(("default", *_READERS))
        raise ConfigurationError(f"rope type {rope_type!r} is not supported; supported: {supported_names}")
    try:
        return theta, _READERS[rope_type](raw, max_positions)
    except KeyError as error:
        raise ConfigurationError(f"rope type {rope_type!r} needs {error.args[0]!r}") from None


def _linear(raw: dict[str, Any], _: int) -> LinearScaling:
    return LinearScaling(factor=float(raw["factor"]))


def _llama3(raw: dict[str, Any], max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(raw["factor"]),
        low_freq_factor=float(raw["low_freq_factor"]),
        high_freq_factor=float(raw["high_freq_factor"]),
        original_max_position_embeddings=int(raw.get("original_max_position_embeddings") or max_positions),
    )


def _yarn(raw: dict[str, Any], max_positions: int) -> YarnScaling:
    original_positions = int(raw.get("original_max_position_embeddings") or max_positions)
    factor = float(raw["factor"]) if raw.get("factor") is not None else max_positions / original_positions
    attention_factor = raw.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = raw.get("mscale"), raw.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = _growth(factor, mscale) / _growth(factor, mscale_all)
        else:
            attention_factor = _growth(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original_positions,
        attention_factor=float(attention_factor),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        truncate=bool(raw.get("truncate", True)),
    )


def _growth(factor: float, weight: float) -> float:
    """The factor by which queries and keys grow with the context (YaRN, Eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_READERS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}

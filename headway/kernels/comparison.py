"""Comparison of a candidate's outputs with those expected, as arrays. Nothing here runs a source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]
Tolerances = Mapping[str, tuple[float, float]]
NUMPY_TYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")},
    "bool": np.dtype(np.bool_),
    "bfloat16": np.dtype(np.uint16),  # as bits: NumPy has no such type
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
MOST_DIMENSIONS = 16
# Relative; more is a lower precision.
LEAST_ERROR = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
HOLLOW_ERROR = 0.5  # of outputs that have nothing of the expected values


class TensorShape(msgspec.Struct, frozen=True):
    """Type and shape of a tensor, as a guest tells them: checked."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_TYPES:
            raise ValueError(f"tensors of {self.dtype} can't be compared; valid: {', '.join(NUMPY_TYPES)}")
        if len(self.shape) > MOST_DIMENSIONS or any(size < 0 for size in self.shape):
            raise ValueError(f"no shape: {self.shape}")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Tensor:
    """A tensor's values outside of torch: bfloat16 as bits."""

    def __init__(self, shape: TensorShape, raw: Array) -> None:
        self.shape = shape
        self.raw = raw.view(NUMPY_TYPES[shape.dtype]).reshape(shape.shape)

    @property
    def is_float(self) -> bool:
        return self.shape.dtype in FLOATS

    def values(self) -> Array:
        """As numbers that NumPy can compare: bfloat16 as float32."""
        if self.shape.dtype == "bfloat16":
            return (self.raw.astype(np.uint32) << 16).view(np.float32)
        return self.raw

    def scaled(self, factor: Array | float) -> Tensor:
        """Its product with ``factor``, in its own type."""
        values = self.values()
        return self.replaced(values * np.asarray(factor, values.dtype))

    def replaced(self, values: Array) -> Tensor:
        """A tensor of its type and shape with other values, as `values` has them; bfloat16 is rounded towards zero."""
        if self.shape.dtype == "bfloat16":
            values = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return Tensor(self.shape, np.ascontiguousarray(values, self.raw.dtype))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one tensor. ``text``: where it differs, "" where it is within the tolerance."""

    text: str = ""
    error: float = 0.0  # root mean square, relative to the expected values'


def compare(
    expected: Tensor, found: Tensor, tolerances: Tolerances, *, scaled: bool = False, hollow: bool = False
) -> Comparison:
    """Compare values. ``tolerances``: absolute and relative, by dtype; 0 for others. ``scaled``: the absolute one grows
    with the expected values, for inputs that are larger than the task's own. ``hollow``: within it values need have
    nothing of the expected ones, which may be rounding errors."""
    if expected.shape != found.shape:
        return Comparison(text=f"output of {found.shape}, not {expected.shape}")
    if not expected.is_float:
        same = expected.raw == found.raw
        return Comparison() if bool(same.all()) else Comparison(text=_where(expected.raw, found.raw, ~same), error=1.0)
    with np.errstate(invalid="ignore"):  # signalling ones
        wanted, got = expected.values().astype(np.float64), found.values().astype(np.float64)
    if wanted.size == 0:
        return Comparison()
    finite = np.isfinite(wanted)
    whole = bool(finite.all())
    size = float(np.sqrt(np.mean(np.square(wanted if whole else wanted[finite])))) if finite.any() else 0.0
    absolute, relative = tolerances.get(expected.shape.dtype, (0.0, 0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(got - wanted)
        bad = ~(difference <= absolute * (max(1.0, size) if scaled else 1.0) + relative * np.abs(wanted))
    if not whole:  # not a number in the same places, infinite with the same sign
        same = (np.isnan(wanted) & np.isnan(got)) | (wanted == got)
        bad = np.where(finite, bad, ~same)
    error = float(np.sqrt(np.mean(np.square(difference if whole else difference[finite])))) if finite.any() else 0.0
    error, text = error / (size or 1.0), _where(wanted, got, bad) if bad.any() else ""
    if not (text or hollow) and size and error >= HOLLOW_ERROR:
        text = f"within the absolute tolerance, but with a relative error of {error:.2g}"
    return Comparison(text=text, error=error)


def _where(wanted: Array, got: Array, bad: Array) -> str:
    place = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.shape else ()
    at = ", ".join(str(int(index)) for index in place)
    count = int(np.count_nonzero(bad))
    what = f"{count} of {bad.size} values differ; first at [{at}]: {got[place]:.6g}, expected {wanted[place]:.6g}"
    if got.dtype.kind == "f" and np.isnan(got).any() and not np.isnan(wanted).any():
        what += "; some are not a number"
    return what

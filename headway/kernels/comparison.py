"""Comparison of a candidate's outputs with the expected ones, as arrays. No source runs in this module."""

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
MAX_DIMENSIONS = 16
# Relative; more is a lower precision.
LEAST_ERROR = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
HOLLOW_ERROR = 0.5  # relative error of outputs that share nothing with the expected values


class TensorShape(msgspec.Struct, frozen=True):
    """Type and shape of a tensor that a guest reports; the constructor validates them."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_TYPES:
            raise ValueError(f"tensors of {self.dtype} can't be compared; valid: {', '.join(NUMPY_TYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
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
        """Values as numbers that NumPy can compare: bfloat16 as float32."""
        if self.shape.dtype == "bfloat16":
            return (self.raw.astype(np.uint32) << 16).view(np.float32)
        return self.raw

    def scaled(self, factor: Array | float) -> Tensor:
        """The tensor's product with ``factor``, in the tensor's type."""
        values = self.values()
        return self.replaced(values * np.asarray(factor, values.dtype))

    def replaced(self, values: Array) -> Tensor:
        """A tensor of the same type and shape with other values, as `values` has them; bfloat16 rounds towards zero."""
        if self.shape.dtype == "bfloat16":
            values = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return Tensor(self.shape, np.ascontiguousarray(values, self.raw.dtype))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one tensor. ``text``: the first difference; "": the tensor is within the tolerance."""

    text: str = ""
    error: float = 0.0  # root mean square, relative to the expected values'


def compare(
    expected: Tensor, actual: Tensor, tolerances: Tolerances, *, scaled: bool = False, hollow: bool = False
) -> Comparison:
    """Compare values. ``tolerances``: absolute and relative, by dtype; 0 for others. ``scaled``: the absolute tolerance
    grows with the expected values, for inputs that are larger than the task's own. ``hollow``: values within the
    absolute tolerance pass at any relative error, since the expected values may be rounding errors."""
    if expected.shape != actual.shape:
        return Comparison(text=f"output of {actual.shape}, not {expected.shape}")
    if not expected.is_float:
        equal = expected.raw == actual.raw
        return Comparison() if equal.all() else Comparison(text=_mismatch(expected.raw, actual.raw, ~equal), error=1.0)
    with np.errstate(invalid="ignore"):  # signalling ones
        target, output = expected.values().astype(np.float64), actual.values().astype(np.float64)
    if target.size == 0:
        return Comparison()
    finite = np.isfinite(target)
    all_finite = bool(finite.all())
    expected_rms = float(np.sqrt(np.mean(np.square(target if all_finite else target[finite])))) if finite.any() else 0.0
    absolute, relative = tolerances.get(expected.shape.dtype, (0.0, 0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        deviation = np.abs(output - target)
        wrong_mask = ~(deviation <= absolute * (max(1.0, expected_rms) if scaled else 1.0) + relative * np.abs(target))
    if not all_finite:  # not a number in the same places, infinite with the same sign
        equal = (np.isnan(target) & np.isnan(output)) | (target == output)
        wrong_mask = np.where(finite, wrong_mask, ~equal)
    rms = float(np.sqrt(np.mean(np.square(deviation if all_finite else deviation[finite])))) if finite.any() else 0.0
    error, text = rms / (expected_rms or 1.0), _mismatch(target, output, wrong_mask) if wrong_mask.any() else ""
    if not (text or hollow) and expected_rms and error >= HOLLOW_ERROR:
        text = f"within the absolute tolerance, but with a relative error of {error:.2g}"
    return Comparison(text=text, error=error)


def _mismatch(target: Array, output: Array, bad: Array) -> str:
    position = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.shape else ()
    index_text = ", ".join(str(int(coordinate)) for coordinate in position)
    wrong_count, actual, expected = int(np.count_nonzero(bad)), output[position], target[position]
    text = f"{wrong_count} of {bad.size} values differ; first at [{index_text}]: {actual:.6g}, expected {expected:.6g}"
    if output.dtype.kind == "f" and np.isnan(output).any() and not np.isnan(target).any():
        text += "; some are not a number"
    return text

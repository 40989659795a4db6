"""A frozen matrix in 4 or 8 bits: see `quantization`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.config.adapter import Quantization
from headway.runtime.imports import import_extra


class QuantizedMatrix:
    """A matrix [f, d], or all experts' [x, f, d], without gradients, as codes and the scale of each block: computed
    when a product needs it."""

    def __init__(self, weight: Tensor, how: Quantization) -> None:
        self.shape, self._how = weight.shape, how
        functional, flat = _functional(), weight.detach().float().reshape(-1, weight.shape[-1]).contiguous()
        if how == "4bit":
            self._codes, self._state = functional.quantize_4bit(flat, blocksize=64, quant_type="nf4")
        else:
            self._codes, self._state = functional.quantize_blockwise(flat, blocksize=256)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedMatrix:
        return self

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self._codes.nbytes + self._state.absmax.nbytes

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the codes stand for."""
        functional = _functional()
        expand = functional.dequantize_4bit if self._how == "4bit" else functional.dequantize_blockwise
        return expand(self._codes, self._state).view(self.shape).to(dtype)


def _functional() -> Any:
    return import_extra("bitsandbytes", "qlora", "model.quantization").functional

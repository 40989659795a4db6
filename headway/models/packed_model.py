"""The interface of a model under training: the project's decoder, or an architecture that transformers runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headway.config.schema import Checkpointing
from headway.models.parallel.division import Division

T = TypeVar("T")


class PackedConfig(Protocol):
    """The sizes of a model that the trainer reads."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def has_experts(self) -> bool: ...

    def flops(self, lengths: list[int], head_tokens: int | None = None, continues: list[int] | None = None) -> float:
        """Model FLOP of one forward pass over documents of ``lengths`` tokens."""
        ...

    def product_flops(self, tokens: int, head_tokens: int) -> int:
        """The part of `flops` in products with weights."""
        ...


class PackedModel(nn.Module, ABC):
    """A causal language model that computes concatenated documents.

    `forward_packed` computes each token's hidden state, `head` the logits of selected hidden states.
    """

    config: PackedConfig
    layers: nn.ModuleList  # of the decoder, first to last
    placeholders: Sequence[int] = ()  # ids that stand for pictures and other media, which are never sampled
    packs = True  # documents are computed as one row, in their order
    shares_prefixes = True  # `forward_packed` takes ``continues``
    # Computed again in the backward: nothing; norms, rotations and gates; or layers, of which only inputs are kept
    checkpointing: Checkpointing
    division = Division()
    most_calls: Callable[[int], int] = staticmethod(int)  # calls of the layers in a pass -> most of any rank's

    def compute(self, function: Callable[[], T]) -> T:
        """Call ``function``, the only place where `forward_packed` and `head` may be called if ranks divide the
        weights: they are complete in it, and with gradients enabled until the backward of what it returns."""
        return function()

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    def divide(self, division: Division) -> None:
        """Compute together with the ranks of ``division``, before parameters are sharded or taken by an optimiser: this
        rank's experts are new parameters. Raises ConfigurationError if the ranks can't divide heads or experts."""
        self.division = division

    @abstractmethod
    def forward_packed(self, ids_n: Tensor, lengths: list[int], continues: list[int] | None = None) -> Tensor:
        """Hidden states [N, d] of token ids [N], as input of `head`. Every document begins at position 0 and attends to
        itself alone. Ranks that divide the tokens are given all of them, and each returns the rows of its slice."""

    @abstractmethod
    def head(self, x_nd: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, d]."""

    def forward(self, ids_n: Tensor, lengths: list[int]) -> Tensor:
        """Logits [N, V] of concatenated documents."""
        return self.head(self.forward_packed(ids_n, lengths))


class WithoutAdapter(PackedModel):
    """A model that computes every call without its adapter, with the same weights."""

    def __init__(self, model: PackedModel, disabled: Callable[[], AbstractContextManager[Any]]) -> None:
        """``disabled``: the context in which ``model`` computes without it."""
        super().__init__()
        self.config, self.checkpointing, self.shares_prefixes = model.config, "none", model.shares_prefixes
        self.division = model.division
        self._model, self._disabled = (model,), disabled  # in a tuple, so that no parameter is counted twice

    @property
    def device(self) -> torch.device:
        return self._model[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._model[0].dtype

    def compute(self, function: Callable[[], T]) -> T:
        """See `PackedModel.compute`."""
        return self._model[0].compute(function)

    def forward_packed(self, *inputs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See the model's."""
        with self._disabled():
            return self._model[0].forward_packed(*inputs)

    def head(self, x_nd: Tensor) -> Tensor:
        """See the model's."""
        with self._disabled():
            return self._model[0].head(x_nd)

"""Adapters of the torch engine: registered revisions by name, and the products of batches whose rows differ in them.

Shape suffixes: n rows, d input and f output features, m (row, expert) pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.revisions import Revision, Revisions
from headway.generator.engines.torch.native_decode import AdapterPanels, NativeDecode
from headway.models.decoder import Decoder
from headway.models.lora import LayerLora, Lora, use
from headway.records.errors import ConfigurationError


@dataclass(frozen=True)
class AdapterRevision(Revision):
    """A revision as the decoder computes it."""

    lora: Lora
    panels: AdapterPanels | None  # for the native decode step


class AdapterRevisions(Revisions[AdapterRevision]):
    """The adapters that the torch engine serves."""

    def __init__(self, model: Decoder, fixed_shapes: bool) -> None:
        super().__init__()
        self._model = model
        self.rows = RowAdapters(self._by_update, fixed_shapes)

    def register(self, name: str, lora: Lora, version: int, update: int, decode: NativeDecode | None) -> None:
        """Make ``lora``, which the caller must not change any more, the newest revision of ``name``."""
        panels = None if decode is None else decode.adapter_panels(lora)
        if not self._by_update:
            layer_numbers = range(len(self._model.layers))
            use(self._model, {number: _MixedLayer(self.rows, number) for number in layer_numbers})
        self.add(AdapterRevision(name, version, update, lora, panels))

    def revised(self, name: str, tensors: Mapping[str, Tensor]) -> Lora:
        """Return a copy of the adapter with other weights. Raises ConfigurationError when it isn't registered, or has
        other names or shapes."""
        if name not in self._newest:
            raise ConfigurationError(f"an update of adapter {name!r}, which isn't registered; {self.known}")
        lora = copy.deepcopy(self._newest[name].lora)
        lora.copy_weights(tensors)
        return lora


class RowAdapters:
    """The revisions that the rows of a forward pass are computed with.

    With ``fixed_shapes`` each revision is computed on all rows and then chosen from, so that the shapes of products,
    and with them a row's bits, don't depend on what its neighbours have.
    """

    def __init__(self, revisions: Mapping[int, AdapterRevision], fixed_shapes: bool) -> None:
        self._revisions = revisions
        self._fixed_shapes = fixed_shapes
        self._updates_n = np.zeros(0, np.int64)
        self._parts: dict[int, list[tuple[Lora, Tensor | None]]] = {}

    def assign(self, updates_n: np.ndarray) -> None:
        """Set the rows of the next pass: numbers of updates; one that is no revision's means none."""
        self._updates_n, self._parts = updates_n, {}

    def groups(self) -> tuple[np.ndarray | None, list[tuple[AdapterPanels, int, int]]]:
        """Return (order, groups): an order of all rows in which those of one revision are neighbours (None: as they
        are), and the panels, first row and count of rows of each revision in it."""
        updates_n, order = self._updates_n, None
        if not self._revisions:
            return None, []
        if (updates_n[1:] < updates_n[:-1]).any():
            order = np.argsort(updates_n, kind="stable")
            updates_n = updates_n[order]
        groups: list[tuple[AdapterPanels, int, int]] = []
        for update, first_row, count in zip(*np.unique(updates_n, return_index=True, return_counts=True), strict=True):
            revision = self._revisions.get(int(update))
            if revision is not None and revision.panels is not None:
                groups.append((revision.panels, int(first_row), int(count)))
        return order, groups

    def parts(self, rows: int, device: torch.device) -> list[tuple[Lora, Tensor | None]]:
        """Return each adapter of the first ``rows`` rows with the mask of its rows, bool [n]; None: all rows."""
        if rows not in self._parts:
            updates_n = self._updates_n[:rows]
            masked_loras: list[tuple[Lora, Tensor | None]] = []
            for update in np.unique(updates_n).tolist():
                if (revision := self._revisions.get(update)) is not None:
                    mask_n = updates_n == update
                    covers_all = mask_n.all() and not self._fixed_shapes
                    masked_loras.append((revision.lora, None if covers_all else torch.from_numpy(mask_n).to(device)))
            self._parts[rows] = masked_loras
        return self._parts[rows]

    def added(self, add: Callable[..., Tensor], mask: Tensor, out: Tensor, *by_row: Tensor) -> Tensor:
        """Return ``out`` with the addition of ``add(out, *by_row)`` in the rows of ``mask`` alone."""
        if self._fixed_shapes:
            return torch.where(mask[:, None], add(out.clone(), *by_row), out)
        row_indices = mask.nonzero()[:, 0]
        return out.index_copy(0, row_indices, add(*(tensor.index_select(0, row_indices) for tensor in (out, *by_row))))


class _MixedLayer:
    """A decoder layer's `LayerAdapter` whose rows have different adapters."""

    def __init__(self, rows: RowAdapters, number: int) -> None:
        self._rows = rows
        self._number = number

    def add(self, product: str, out_nf: Tensor, x_nd: Tensor) -> Tensor:
        """See `LayerLora.add`."""
        for layer_lora, mask_n in self._parts(product, len(x_nd), x_nd.device):
            add = partial(layer_lora.add, product)
            out_nf = add(out_nf, x_nd) if mask_n is None else self._rows.added(add, mask_n, out_nf, x_nd)
        return out_nf

    def add_experts(self, product: str, out_mf: Tensor, x_md: Tensor, expert_m: Tensor, row_m: Tensor) -> Tensor:
        """See `LayerLora.add_experts`."""
        for layer_lora, mask_n in self._parts(product, int(row_m.max()) + 1, x_md.device):
            add, row_tensors = partial(layer_lora.add_experts, product), (out_mf, x_md, expert_m, row_m)
            out_mf = add(*row_tensors) if mask_n is None else self._rows.added(add, mask_n[row_m], *row_tensors)
        return out_mf

    def _parts(self, product: str, rows: int, device: torch.device) -> Iterator[tuple[LayerLora, Tensor | None]]:
        for lora, mask_n in self._rows.parts(rows, device):
            layer_lora = lora.layers.get(self._number)
            if layer_lora is not None and product in layer_lora.products:
                yield layer_lora, mask_n

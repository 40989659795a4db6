"""Kept sets: the ids among which tokens were sampled, stored with the tokens or computed again from their grammars.

Legend: ``_n`` one value per token of the batch, ``_m`` per token that carries loss, ``_c`` per token of a chunk of
these, ``_u`` per different mask of grammars, ``b`` bytes of such a mask, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.algorithms.samples import IntArray, SampleArrays
from headway.records.errors import KeptSetMismatch
from headway.records.tokens import KEPT, TokenRows, outside_kept
from headway.tokens.grammar import GrammarRefused, Grammars


@dataclass(frozen=True, kw_only=True)
class MicroBatchSets:
    """The kept sets of a micro-batch's tokens: ids, or masks of grammars, or neither for the complete vocabulary."""

    lengths_m: IntArray  # [M] stored ids
    values: NDArray[np.int64]  # these ids, token after token
    masks_m: IntArray  # [M] index into masks_ub, or -1
    masks_ub: Tensor  # uint8; bit i of a mask, from the lowest of its first byte, is id i
    vocabulary: int
    masses_m: Tensor  # [M] log of each set's probability in the complete vocabulary, filled in by the forward pass
    tokens: int  # that have a set
    ids: int  # in all sets together
    constrained: int  # tokens that a grammar constrained

    def outside(self, first: int, stop: int) -> Tensor:
        """[C, V] whether each id is outside the set of each token from ``first`` to ``stop``."""
        lengths_c, masks_c = self.lengths_m[first:stop], self.masks_m[first:stop]
        device, first_id = self.masses_m.device, int(self.lengths_m[:first].sum())
        outside_cv = torch.zeros(len(lengths_c), self.vocabulary, dtype=torch.bool, device=device)
        outside_cv[torch.from_numpy(lengths_c > 0).to(device)] = True
        rows_i = torch.from_numpy(np.repeat(np.arange(len(lengths_c)), lengths_c)).to(device)
        outside_cv[rows_i, torch.from_numpy(self.values[first_id : first_id + len(rows_i)]).to(device)] = False
        if len(masked_rows := np.flatnonzero(masks_c >= 0)):
            mask_cb = self.masks_ub[torch.from_numpy(masks_c[masked_rows]).to(device)]
            bits_cb8 = mask_cb[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
            outside_cv[torch.from_numpy(masked_rows).to(device)] = bits_cb8.flatten(1)[:, : self.vocabulary] == 0
        return outside_cv


class KeptSets:
    """The kept sets of a batch. The masks of a constrained run (consecutive tokens sampled under one grammar) are
    computed when one of its tokens is first requested, and equal masks are stored once."""

    def __init__(self, arrays: SampleArrays, vocabulary: int, grammars: Callable[[], Grammars]) -> None:
        self.arrays = arrays
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._rows = arrays.token_rows.get(KEPT, TokenRows.empty(arrays.tokens))
        self._run_n = np.full(arrays.tokens, -1, np.int64)  # the constrained run that each token is in
        for run_index, (_, first, stop) in enumerate(arrays.grammars):
            self._run_n[first:stop] = run_index
        self._mask_n = np.full(arrays.tokens, -1, np.int64)  # number of each token's mask, where its run is computed
        self._numbers: dict[bytes, int] = {}  # of the masks ...
        self._masks: list[bytes] = []  # ... by number
        self._sizes: list[int] = []  # ids of each

    def of(self, targets_m: IntArray, device: torch.device) -> MicroBatchSets | None:
        """The sets of these tokens of the batch; None: all are the complete vocabulary. Raises KeptSetMismatch."""
        ids_m = self.arrays.token_ids_n[targets_m]
        lengths_m, values = self._rows.take(targets_m)
        if int(values.max(initial=0)) >= self._vocabulary:
            raise KeptSetMismatch(f"a kept set has id {values.max()} in a vocabulary of {self._vocabulary}")
        if len(wrong_indices := outside_kept(lengths_m, values, ids_m)):
            position, token = int(targets_m[wrong_indices[0]]), ids_m[wrong_indices[0]]
            raise self._mismatch(position, f"token {token} isn't in the kept set recorded for it")
        runs_m = self._run_n[targets_m]
        for run_index in np.unique(runs_m[(lengths_m == 0) & (runs_m >= 0)]).tolist():
            if self._mask_n[self.arrays.grammars[run_index][1]] < 0:
                self._compute(run_index)
        numbers_m = np.where(lengths_m == 0, self._mask_n[targets_m], -1)
        if not len(values) and (numbers_m < 0).all():
            return None
        used_u = np.unique(numbers_m[numbers_m >= 0])
        masks = [np.frombuffer(self._masks[number], np.uint8) for number in used_u.tolist()]
        masks_ub = np.stack(masks) if masks else np.zeros((0, 0), np.uint8)
        return MicroBatchSets(
            lengths_m=lengths_m,
            values=values.astype(np.int64),
            masks_m=np.where(numbers_m >= 0, np.searchsorted(used_u, numbers_m), -1),
            masks_ub=torch.from_numpy(masks_ub).to(device),
            vocabulary=self._vocabulary,
            masses_m=torch.zeros(len(targets_m), device=device),
            tokens=int(((lengths_m > 0) | (numbers_m >= 0)).sum()),
            ids=len(values) + int(np.array(self._sizes, np.int64)[numbers_m[numbers_m >= 0]].sum()),
            constrained=int((runs_m >= 0).sum()),
        )

    def _compute(self, run: int) -> None:
        """Follow a constrained run from its first token and store the mask of each token."""
        grammar_text, first, stop = self.arrays.grammars[run]
        try:
            ids = self.arrays.token_ids_n[first:stop].tolist()
            for position, mask in enumerate(self._grammars().masks(grammar_text, ids), first):
                mask_number = self._numbers.setdefault(mask_bytes := mask.tobytes(), len(self._masks))
                if mask_number == len(self._masks):
                    self._masks.append(mask_bytes)
                    self._sizes.append(int(np.bitwise_count(mask).sum()))
                self._mask_n[position] = mask_number
        except GrammarRefused as error:
            raise self._mismatch(first, str(error)) from None

    def _mismatch(self, position: int, reason: str) -> KeptSetMismatch:
        ends_s = np.cumsum(self.arrays.lengths_s)
        group = self.arrays.groups_s[np.searchsorted(ends_s, position, "right")]
        return KeptSetMismatch(f"group {group}: {reason}: its log-probability can't be replayed")

"""Rows of numbers beside tokens, as engines return them and the trainer reads them again: the experts of each token.

A row belongs to a token that a model read: row i to token i of the whole sequence, its prompt included. Tokens behind
the last row, and those whose row is empty, have none. A call is asked for those that its caller hasn't got
(``rows_known``), so that rows of calls that extend one another are joined, and a token keeps its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.records.tokens import RowBytes, RowLengths

EXPERTS = "experts"  # kind of rows: ids of the experts that a token went through, layer after layer


class TokenRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of unsigned numbers, one for each of some consecutive tokens, of any length each.

    Invariant: ``data`` has ``item_bytes * sum(lengths)`` bytes, little-endian, row after row.

    Example: ``rows = TokenRows.of([[3, 1], [], [2]]); rows[:2].joined((rows[:2], rows[2:])) == rows``
    """

    lengths: RowLengths = RowLengths()  # [N] numbers in each row
    data: RowBytes = RowBytes()
    item_bytes: int = 1  # of one number: 1, 2 or 4

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]] | NDArray[Any], item_bytes: int = 1) -> TokenRows:
        """Make rows of numbers, all of one length where ``rows`` is an array [N, R]."""
        if isinstance(rows, np.ndarray):
            lengths, values = RowLengths.filled(rows.shape[1], len(rows)), rows.reshape(-1)
        else:
            lengths, values = RowLengths([len(row) for row in rows]), np.array([one for row in rows for one in row])
        return cls(lengths, RowBytes.view(values.astype(f"<u{item_bytes}").view(RowBytes.dtype)), item_bytes)

    @classmethod
    def joined(cls, parts: Iterable[TokenRows]) -> TokenRows:
        """The rows of all ``parts``, one after another."""
        parts = [part for part in parts if len(part)]
        if len(parts) <= 1:
            return parts[0] if parts else cls()
        item_bytes = max(part.item_bytes for part in parts)
        values = [part.values.astype(f"<u{item_bytes}", copy=False).view(RowBytes.dtype) for part in parts]
        lengths = RowLengths.joined([part.lengths for part in parts])
        return cls(lengths, RowBytes.view(np.concatenate(values)), item_bytes)

    @property
    def values(self) -> NDArray[Any]:
        """The numbers of all rows, one after another."""
        return self.data.array.view(f"<u{self.item_bytes}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, key: slice) -> TokenRows:
        first, end, _ = key.indices(len(self))
        return self.cut([first], [max(0, end - first)])

    def cut(self, starts: Sequence[int] | NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> TokenRows:
        """The rows from each of ``starts`` on, as many as ``lengths`` says, one run after another. Beyond the last row
        they are empty."""
        ends = np.concatenate([[0], np.cumsum(self.lengths.array, dtype=np.int64)])
        runs: list[TokenRows] = []
        for start, length in zip(starts, lengths, strict=True):
            first, end = (min(int(at), len(self)) for at in (start, start + length))
            data = self.data[int(ends[first]) * self.item_bytes : int(ends[end]) * self.item_bytes]
            runs.append(TokenRows(self.lengths[first:end], data, self.item_bytes))
            runs.append(TokenRows(RowLengths.filled(0, int(length) - (end - first))))
        return TokenRows.joined(runs)

    def table(self, width: int) -> NDArray[np.int32]:
        """All rows as an array, [N, width]; -1 where a row is empty or a number has all bits set. Raises ValueError for
        a row of another length."""
        lengths = self.lengths.array
        if wrong := set(lengths[lengths > 0].tolist()) - {width}:
            raise ValueError(f"a row of {wrong.pop()} numbers where {width} are needed")
        table = np.full((len(self), width), -1, np.int32)
        values = self.values.reshape(-1, width)
        table[lengths > 0] = np.where(values == np.iinfo(values.dtype).max, -1, values.astype(np.int32))
        return table


class ExpertRouting(msgspec.Struct, frozen=True):
    """The shape of a mixture's recorded experts: a token's row has ``per_token`` ids for each of ``layers``."""

    layers: int  # with experts
    per_token: int
    experts: int  # of a layer

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.layers * self.per_token

    @property
    def item_bytes(self) -> int:
        """Bytes of an id. All bits set mean that none is known."""
        return 1 if self.experts < 256 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row, its length included."""
        return self.width * self.item_bytes + RowLengths.dtype.itemsize

    def fault(self, rows: TokenRows) -> str:
        """Why these experts can't be this mixture's; "" when they can."""
        try:
            table = rows.table(self.width)
        except ValueError as error:
            return f"{error}: {self.layers} layers with {self.per_token} experts of a token"
        if table.size and (highest := int(table.max())) >= self.experts:
            return f"expert {highest} of a layer that has {self.experts}"
        return ""

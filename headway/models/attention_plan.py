"""The grouping of a packed micro-batch's pieces into few padded attention calls (`attention.py` runs them).

A packed micro-batch is a row of concatenated *pieces*, which are the nodes of trees: a piece may continue another,
which may continue a third. The pieces that a piece continues are its *prefix*. A document is a piece that no other
continues, after its prefix. A piece attends causally to itself and to all of its prefix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headway.models.configuration import prefix_lengths

PADDING_RATIO = 1.25  # a bucket holds documents at least 1/1.25 as long as its longest
NOTHING = -1  # in the place of a piece's index: the piece continues no other


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents computed together, each padded on the right to ``length`` tokens."""

    documents: int
    length: int
    gather_bl: Tensor  # [b*l] packed index of each position; padding points at the document's last token
    outputs: tuple[Tensor, Tensor]  # (packed index, index into b*l) of each row whose result is kept; no padding
    first: int | None  # packed index of the first token if the documents are contiguous without padding

    def take(self, rows: Tensor) -> Tensor:
        """Packed rows [N, x] as [b, l, x], a view if the documents are contiguous. Padding repeats the last token."""
        shape = (self.documents, self.length, rows.shape[1])
        if self.first is not None:
            return rows[self.first : self.first + self.documents * self.length].view(shape)
        return rows.index_select(0, self.gather_bl).view(shape)

    def take_zeroed(self, rows: Tensor) -> Tensor:
        """Packed rows [N, x] as [b, l, x] with zeros for padding, the gradient of unused outputs."""
        if self.first is not None:
            return self.take(rows)
        padded = rows.new_zeros(self.documents * self.length, rows.shape[1])
        padded.index_copy_(0, self.outputs[1], rows.index_select(0, self.outputs[0]))
        return padded.view(self.documents, self.length, -1)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Write [b, l, x] without padding to packed rows [N, x] (any strides)."""
        flat_rows = values.reshape(self.documents * self.length, -1)
        if self.first is not None:
            rows[self.first : self.first + len(flat_rows)] = flat_rows
        else:
            rows.index_copy_(0, self.outputs[0], flat_rows.index_select(0, self.outputs[1]))


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A prefix and the pieces that continue it, as packed rows."""

    keys: tuple[slice, ...]  # rows of the prefix, piece by piece
    queries: slice  # rows of the pieces that continue its last piece, one after another


class Sequences(NamedTuple):
    """Queries and keys of several lengths, in the order of flash attention's arguments."""

    query_ends: Tensor  # int32 [sequences + 1], on the device: 0 and where each ends
    key_ends: Tensor
    most_queries: int  # of a sequence
    most_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Sequences:
        ends = ([0, *itertools.accumulate(lengths)] for lengths in (queries, keys))
        query_ends, key_ends = (torch.tensor(end, dtype=torch.int32, device=device) for end in ends)
        # With one query of each sequence, torch would compute grouped heads by another kernel, which splits the keys.
        return cls(query_ends, key_ends, max(2, *queries), max(2, *keys))


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The grouping of one micro-batch's pieces; computed once and shared by all layers."""

    lengths: tuple[int, ...]  # tokens of each piece
    continues: tuple[int, ...]  # for each piece the index of the piece it continues, or NOTHING
    tokens: int
    positions_n: Tensor  # [N] position of each token inside its document
    shared: tuple[SharedPrefix, ...]

    @classmethod
    def build(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", continues: Sequence[int] | None = None
    ) -> AttentionPlan:
        """Group pieces of ``lengths`` (each >= 1) into few buckets of nearly equal length.

        ``continues``: for each piece the index of the piece it continues, or NOTHING (default: all pieces are complete
        documents). Pieces that continue nothing come first, every piece comes after the piece it continues, and pieces
        that continue the same one are neighbours. Raises ValueError otherwise.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every document needs at least one token; lengths = {list(lengths)}")
        prefix_pieces = (NOTHING,) * len(lengths) if continues is None else tuple(continues)
        sizes, starts = _sizes_and_starts(lengths)
        shared = _shared_prefixes(sizes.tolist(), starts.tolist(), prefix_pieces)
        prefixes = torch.tensor(prefix_lengths(lengths, prefix_pieces))
        rows = torch.arange(int(sizes.sum()))
        return cls(
            lengths=tuple(lengths),
            continues=prefix_pieces,
            tokens=len(rows),
            positions_n=(rows + torch.repeat_interleave(prefixes - starts, sizes)).to(device),
            shared=shared,
        )

    @property
    def first_continued(self) -> int:
        """Packed index of the first token that continues a prefix; ``tokens`` if no token does."""
        return self.shared[0].queries.start if self.shared else self.tokens

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The pieces, each attending to itself."""
        return self._buckets[0]

    @property
    def scatter_n(self) -> Tensor:
        """[N] index of each packed token in the concatenation of all buckets."""
        return self._buckets[1]

    @cached_property
    def _buckets(self) -> tuple[tuple[Bucket, ...], Tensor]:
        rows = torch.arange(self.tokens)
        all_kept = torch.ones_like(rows, dtype=torch.bool)
        return _buckets(rows, all_kept, torch.tensor(self.lengths), self.positions_n.device)

    @cached_property
    def sequences(self) -> Sequences:
        """All pieces, each attending to itself, for kernels of variable lengths."""
        return Sequences.of(self.lengths, self.lengths, self.positions_n.device)

    @cached_property
    def shared_sequences(self) -> Sequences:
        """Likewise the queries that continue shared prefixes, and the prefixes' keys, which are at `shared_spans`."""
        queries = [prefix.queries.stop - prefix.queries.start for prefix in self.shared]
        keys = [sum(span.stop - span.start for span in prefix.keys) for prefix in self.shared]
        return Sequences.of(queries, keys, self.positions_n.device)

    @cached_property
    def shared_spans(self) -> tuple[slice, ...]:
        """The rows of all shared prefixes, one after another."""
        spans: list[slice] = []
        for span in itertools.chain.from_iterable(prefix.keys for prefix in self.shared):
            if spans and spans[-1].stop == span.start:
                span = slice(spans.pop().start, span.stop)
            spans.append(span)
        return tuple(spans)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest document, including its prefix."""
        return max(map(sum, zip(self.lengths, prefix_lengths(self.lengths, self.continues), strict=True)))

    @cached_property
    def copies(self) -> tuple[Bucket, ...]:
        """Buckets of complete documents, each with its own copy of its prefix, for attention kernels that can't merge
        parts. No bucket has more rows, including padding, than are packed."""
        continued_pieces, copied_pieces = set(self.continues), set[int]()
        pieces: list[int] = []  # of all documents, one after another
        is_first: list[bool] = []  # whether this document is the first with the piece, which keeps its results
        document_tokens: list[int] = []  # tokens of each
        for last in range(len(self.lengths)):
            if last not in continued_pieces:
                path = _path(self.continues, last)
                pieces += path
                is_first += [piece not in copied_pieces for piece in path]
                copied_pieces.update(path)
                document_tokens.append(sum(self.lengths[piece] for piece in path))
        sizes, starts = (x[torch.tensor(pieces)] for x in _sizes_and_starts(self.lengths))
        rows = torch.arange(sum(document_tokens)) + torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
        kept_mask = torch.repeat_interleave(torch.tensor(is_first), sizes)
        return _buckets(rows, kept_mask, torch.tensor(document_tokens), self.positions_n.device, self.tokens)[0]


def _sizes_and_starts(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return sizes, torch.cumsum(sizes, 0) - sizes


def _path(continues: Sequence[int], piece: int) -> list[int]:
    """The pieces of ``piece``'s prefix in order, followed by ``piece``."""
    path = [piece]
    while (piece := continues[piece]) != NOTHING:
        path.append(piece)
    return path[::-1]


def _shared_prefixes(sizes: list[int], starts: list[int], continues: tuple[int, ...]) -> tuple[SharedPrefix, ...]:
    """The shared prefixes. Raises ValueError for pieces in another order than `AttentionPlan.build` requires."""
    if len(continues) != len(sizes):
        raise ValueError(f"{len(sizes)} pieces, but continues has {len(continues)} entries")
    prefixes: list[SharedPrefix] = []
    seen_prefixes: set[int] = set()
    for prefix, pieces in itertools.groupby(range(len(continues)), key=continues.__getitem__):
        members = list(pieces)
        if prefix == NOTHING and not seen_prefixes:
            continue
        if prefix in seen_prefixes or not 0 <= prefix < members[0]:
            raise ValueError(
                f"piece {members[0]} continues piece {prefix}: a piece stands behind the one it continues, beside the "
                f"others that do, and those that continue nothing come first; continues = {list(continues)}"
            )
        seen_prefixes.add(prefix)
        key_slices = tuple(slice(starts[piece], starts[piece] + sizes[piece]) for piece in _path(continues, prefix))
        query_slice = slice(starts[members[0]], starts[members[-1]] + sizes[members[-1]])
        prefixes.append(SharedPrefix(keys=key_slices, queries=query_slice))
    return tuple(prefixes)


def _buckets(
    rows: Tensor, kept: Tensor, documents: Tensor, device: torch.device | str, max_rows: float = math.inf
) -> tuple[tuple[Bucket, ...], Tensor]:
    """Buckets of documents, and each packed row's index in their concatenation. ``documents``: the tokens of each;
    ``rows``: their packed rows, document after document; ``kept``: whether the result at that index is the row's;
    ``max_rows``: limit of a bucket with several documents."""
    firsts = documents.cumsum(0) - documents
    scatter = torch.empty(int(kept.sum()), dtype=torch.int64)
    buckets: list[Bucket] = []
    offset = 0
    for members in _split(documents, torch.argsort(documents, stable=True, descending=True), max_rows):
        length = int(documents[members[0]])
        columns, total = torch.arange(length), documents[members, None]
        indices = firsts[members, None] + torch.minimum(columns, total - 1)
        gather = rows[indices].flatten()
        used_rows = ((columns < total) & kept[indices]).flatten().nonzero().squeeze(1)
        scatter[gather[used_rows]] = offset + used_rows
        end_to_end = len(used_rows) == len(gather) and bool((gather.diff() == 1).all())
        buckets.append(
            Bucket(
                documents=len(members),
                length=length,
                gather_bl=gather.to(device),
                outputs=(gather[used_rows].to(device), used_rows.to(device)),
                first=int(gather[0]) if end_to_end else None,
            )
        )
        offset += len(gather)
    return tuple(buckets), scatter.to(device)


def _split(sizes: Tensor, order: Tensor, max_rows: float) -> list[Tensor]:
    """Split the documents, longest first, where the padding to the bucket's longest would exceed PADDING_RATIO, or the
    bucket's rows ``max_rows``."""
    ordered_sizes = sizes[order].tolist()
    cut_positions = [0]
    for i, size in enumerate(ordered_sizes):
        longest = ordered_sizes[cut_positions[-1]]
        if longest > PADDING_RATIO * size + 1 or (i + 1 - cut_positions[-1]) * longest > max_rows:
            cut_positions.append(i)
    cut_positions.append(len(ordered_sizes))
    return [order[a:b] for a, b in itertools.pairwise(cut_positions)]

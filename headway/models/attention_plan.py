"""The grouping of a packed micro-batch's pieces into few padded attention calls (`attention.py` runs them).

A packed micro-batch is a row of *pieces* laid end to end: whole documents, prefixes shared by several documents and,
last, the continuations of those prefixes. A piece attends causally to itself and, if it continues a prefix, to all of
that prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PADDING_RATIO = 1.25  # a bucket holds documents at least 1/1.25 as long as its longest
NOTHING = -1  # stands for a piece's index: the piece continues no prefix


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents computed together, each padded on the right to ``length`` tokens."""

    documents: int
    length: int
    gather_bl: Tensor  # [b*l] packed index of each position; padding points at the document's last token
    outputs: tuple[Tensor, Tensor]  # (packed index, index into b*l) of each row whose result is kept: no padding
    first: int | None  # packed index of the first token where the documents lie end to end and nothing is padded

    def take(self, rows: Tensor) -> Tensor:
        """Packed rows [N, x] as [b, l, x]: a view where nothing has to be moved. Padding repeats the last token."""
        size = (self.documents, self.length, rows.shape[1])
        if self.first is not None:
            return rows[self.first : self.first + self.documents * self.length].view(size)
        return rows.index_select(0, self.gather_bl).view(size)

    def take_zeroed(self, rows: Tensor) -> Tensor:
        """Packed rows [N, x] as [b, l, x] with zeros for padding: the gradient of unused outputs."""
        if self.first is not None:
            return self.take(rows)
        padded = rows.new_zeros(self.documents * self.length, rows.shape[1])
        padded.index_copy_(0, self.outputs[1], rows.index_select(0, self.outputs[0]))
        return padded.view(self.documents, self.length, -1)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Write [b, l, x] to packed rows [N, x] (any strides), padding dropped."""
        flat = values.reshape(self.documents * self.length, -1)
        if self.first is not None:
            rows[self.first : self.first + len(flat)] = flat
        else:
            rows.index_copy_(0, self.outputs[0], flat.index_select(0, self.outputs[1]))


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A prefix and the pieces that continue it, as packed rows."""

    keys: slice  # rows of the prefix
    queries: slice  # rows of all its continuations, one after another


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The grouping of one micro-batch's pieces; computed once and shared by all layers."""

    lengths: tuple[int, ...]  # tokens of each piece
    continues: tuple[int, ...]  # for each piece, the index of the piece it continues, or NOTHING
    tokens: int
    positions_n: Tensor  # [N] position of each token inside its document
    buckets: tuple[Bucket, ...]  # pieces, each attending to itself
    scatter_n: Tensor  # [N] index of each packed token in the concatenation of all buckets
    shared: tuple[SharedPrefix, ...]

    @classmethod
    def build(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", continues: Sequence[int] | None = None
    ) -> AttentionPlan:
        """Group pieces of ``lengths`` (each >= 1) into few buckets of nearly equal length.

        ``continues``: for each piece the index of the piece it continues, or NOTHING (default: all are whole
        documents). Continuations come after all other pieces, those of one prefix side by side; ValueError otherwise.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every document needs at least one token; lengths = {list(lengths)}")
        chosen = (NOTHING,) * len(lengths) if continues is None else tuple(continues)
        sizes, starts = _sizes_and_starts(lengths)
        shared = _shared_prefixes(sizes, starts, chosen)
        before = torch.tensor([0 if prefix == NOTHING else lengths[prefix] for prefix in chosen])
        positions = torch.arange(int(sizes.sum())) + torch.repeat_interleave(before - starts, sizes)
        nothing = torch.zeros_like(sizes)
        buckets, scatter = _buckets(starts, sizes, nothing, nothing, nothing == 0, device)
        return cls(
            lengths=tuple(lengths),
            continues=chosen,
            tokens=len(positions),
            positions_n=positions.to(device),
            buckets=buckets,
            scatter_n=scatter,
            shared=shared,
        )

    @property
    def first_continued(self) -> int:
        """Packed index of the first token that continues a prefix; ``tokens`` when there is none."""
        return self.shared[0].queries.start if self.shared else self.tokens

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document, its prefix included."""
        pieces = zip(self.lengths, self.continues, strict=True)
        return max(length + (0 if prefix == NOTHING else self.lengths[prefix]) for length, prefix in pieces)

    @cached_property
    def whole(self) -> tuple[tuple[Bucket, ...], Tensor]:
        """Buckets and scatter index of whole documents, each with its own copy of its prefix: for attention kernels
        that can't merge two parts."""
        if not self.shared:
            return self.buckets, self.scatter_n
        sizes, starts = _sizes_and_starts(self.lengths)
        prefixes, parents = set(self.continues), torch.tensor(self.continues)
        documents = torch.tensor([i for i in range(len(self.lengths)) if i not in prefixes])
        parents = parents[documents]
        continues, at = parents != NOTHING, parents.clamp(min=0)
        owns_prefix = torch.ones_like(continues)  # of documents that share a prefix, one keeps its results
        owns_prefix[1:] = parents[1:] != parents[:-1]
        return _buckets(
            starts[documents],
            sizes[documents],
            torch.where(continues, starts[at], 0),
            torch.where(continues, sizes[at], 0),
            owns_prefix,
            self.scatter_n.device,
        )


def _sizes_and_starts(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return sizes, torch.cumsum(sizes, 0) - sizes


def _shared_prefixes(sizes: Tensor, starts: Tensor, continues: tuple[int, ...]) -> tuple[SharedPrefix, ...]:
    """The shared prefixes. Raises ValueError where the pieces are in another order than `AttentionPlan.build` says."""
    if len(continues) != len(sizes):
        raise ValueError(f"{len(sizes)} pieces, but {len(continues)} say what they continue")
    found: list[SharedPrefix] = []
    seen: set[int] = set()
    for prefix, run in itertools.groupby(range(len(continues)), key=continues.__getitem__):
        members = list(run)
        if prefix == NOTHING and not seen:
            continue
        if prefix in seen or not 0 <= prefix < len(continues) or continues[prefix] != NOTHING:
            raise ValueError(
                f"piece {members[0]} continues piece {prefix}: continuations stand behind all other pieces, those of "
                f"one prefix side by side; continues = {list(continues)}"
            )
        seen.add(prefix)
        first, last = members[0], members[-1]
        keys = slice(int(starts[prefix]), int(starts[prefix] + sizes[prefix]))
        found.append(SharedPrefix(keys=keys, queries=slice(int(starts[first]), int(starts[last] + sizes[last]))))
    return tuple(found)


def _buckets(
    starts: Tensor,
    sizes: Tensor,
    prefix_starts: Tensor,
    prefix_sizes: Tensor,
    owns_prefix: Tensor,
    device: torch.device | str,
) -> tuple[tuple[Bucket, ...], Tensor]:
    """Buckets of documents made of ``prefix_sizes`` rows from ``prefix_starts`` on, then ``sizes`` rows from
    ``starts`` on, and each packed row's index in their concatenation. A prefix's results come from its owner."""
    totals = prefix_sizes + sizes
    rows = int((sizes + torch.where(owns_prefix, prefix_sizes, 0)).sum())
    scatter = torch.empty(rows, dtype=torch.int64)
    buckets: list[Bucket] = []
    offset = 0
    for members in _split(totals, torch.argsort(totals, stable=True, descending=True)):
        length = int(totals[members[0]])
        columns = torch.arange(length)
        own, total = prefix_sizes[members, None], totals[members, None]
        at = torch.minimum(columns, total - 1)
        gather = torch.where(at < own, prefix_starts[members, None] + at, starts[members, None] - own + at).flatten()
        kept = ((columns < total) & ((columns >= own) | owns_prefix[members, None])).flatten().nonzero().squeeze(1)
        scatter[gather[kept]] = offset + kept
        end_to_end = len(kept) == len(gather) and bool((gather.diff() == 1).all())
        buckets.append(
            Bucket(
                documents=len(members),
                length=length,
                gather_bl=gather.to(device),
                outputs=(gather[kept].to(device), kept.to(device)),
                first=int(gather[0]) if end_to_end else None,
            )
        )
        offset += len(gather)
    return tuple(buckets), scatter.to(device)


def _split(sizes: Tensor, order: Tensor) -> list[Tensor]:
    """Cut the documents, longest first, where the padding to the bucket's longest would exceed the ratio."""
    ordered = sizes[order].tolist()
    cuts = [0]
    for i, size in enumerate(ordered):
        if ordered[cuts[-1]] > PADDING_RATIO * size + 1:
            cuts.append(i)
    cuts.append(len(ordered))
    return [order[a:b] for a, b in itertools.pairwise(cuts)]

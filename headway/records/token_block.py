"""A response while its tokens come: what engines stream is appended, and whoever looks gets it as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headway.records.generation import PartialResponse, VersionSpan
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask

_ID_BYTES = TokenIds.dtype.itemsize


class TokenBlock:
    """Ids, log-probabilities, mask and version spans of consecutive tokens, growing at its end in O(1) a token.

    Invariant: all four describe the same tokens; neighbouring spans differ in their version. What was handed out stays
    as it was.

    Example, a turn, the environment's reply to it (masked, log-probability 0, of the version before) and a turn::

        block.extend((5, 6), (-0.5, -1.0), (VersionSpan(version=3, tokens=2),))
        block.append_reply((9,))
        block.append(delta.id_data, delta.logprob_data, version=4)  # one token
        block.mask == (True, True, False, True)
        block.versions == (VersionSpan(version=3, tokens=3), VersionSpan(version=4, tokens=1))
    """

    __slots__ = ("_ids", "_logprobs", "_replies", "_spans", "_version")

    def __init__(self, begun: PartialResponse | None = None) -> None:
        """``begun``: the tokens it begins with."""
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._replies: list[tuple[int, int]] = []  # [first, behind) of each
        self._spans: list[tuple[int, int]] = []  # (version, first token)
        self._version: int | None = None  # of the last one
        if begun is not None:
            self.extend(begun.ids, begun.logprobs, begun.versions)

    def __len__(self) -> int:
        return len(self._ids) // _ID_BYTES

    def append(self, id_data: bytes | memoryview, logprob_data: bytes | memoryview, version: int) -> None:
        """Sampled tokens of one version, at least one, as a `TokenDelta` has them."""
        if version != self._version:
            self._spans.append((version, len(self)))
            self._version = version
        self._ids += id_data
        self._logprobs += logprob_data

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], versions: Iterable[VersionSpan]) -> None:
        """Sampled tokens of several versions. Raises ValueError where the parts differ in length."""
        versions, id_data, logprob_data = tuple(versions), TokenIds(ids).array.data, TokenLogprobs(logprobs).array.data
        if not len(ids) == len(logprobs) == sum(span.tokens for span in versions):
            raise ValueError(f"{len(ids)} ids, {len(logprobs)} log-probabilities, {versions}: equal numbers are needed")
        at = 0
        for span in versions:
            behind = at + span.tokens
            self.append(id_data[at:behind], logprob_data[at:behind], span.version)
            at = behind

    def append_reply(self, ids: Sequence[int]) -> None:
        """Tokens of an environment's reply: no loss, and the version of the token before (-1 where there is none)."""
        if ids:
            first, version = len(self), -1 if self._version is None else self._version
            self.append(TokenIds(ids).array.data, bytes(TokenLogprobs.dtype.itemsize * len(ids)), version)
            self._replies.append((first, len(self)))

    @property
    def ids(self) -> TokenIds:
        return TokenIds.view(bytes(self._ids))

    @property
    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs.view(bytes(self._logprobs))

    @property
    def mask(self) -> TokenMask:
        mask = np.ones(len(self), TokenMask.dtype)
        for first, behind in self._replies:
            mask[first:behind] = False
        return TokenMask.view(mask)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        ends = [first for _, first in self._spans[1:]] + [len(self)]
        spans = zip(self._spans, ends, strict=False)
        return tuple(VersionSpan(version=version, tokens=end - first) for (version, first), end in spans)

    def response(self) -> PartialResponse:
        """All but the mask: enough to go on elsewhere."""
        return PartialResponse(ids=self.ids, logprobs=self.logprobs, versions=self.versions)

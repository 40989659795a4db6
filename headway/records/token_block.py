"""A response while its tokens arrive: engines' deltas are appended, and readers get arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.records.generation import PartialResponse, VersionSpan
from headway.records.tokens import SAMPLED, TokenIds, TokenLogprobs, TokenMask, TokenRows, sampled

_BYTES = SAMPLED.itemsize


class TokenBlock:
    """Ids, log-probabilities, mask and version spans of consecutive tokens; appending costs O(1) a token.

    Invariant: all four describe the same tokens; neighbouring spans differ in their version. Arrays that were returned
    never change. Beside them are rows of the sequence's tokens, which may lag behind: the prompt's first.

    Example, a turn, the environment's reply to it (masked, log-probability 0, of the version before) and a turn::

        block.extend((5, 6), (-0.5, -1.0), (VersionSpan(version=3, tokens=2),))
        block.append_reply((9,))
        block.append(delta.data, version=4)  # one token
        block.mask == (True, True, False, True)
        block.versions == (VersionSpan(version=3, tokens=3), VersionSpan(version=4, tokens=1))
    """

    __slots__ = ("_masked", "_pieces", "_rows", "_spans", "_version", "tokens")

    def __init__(self, prefix: PartialResponse | None = None) -> None:
        """Start with the tokens of ``prefix``; None: empty."""
        self._pieces: list[bytes] = []  # of SAMPLED, joined on access
        self.tokens = 0  # so far
        self._masked: list[tuple[int, int]] = []  # [first, behind) of each run without loss
        self._spans: list[tuple[int, int]] = []  # (version, first token)
        self._version: int | None = None  # of the last one
        self._rows: dict[str, list[TokenRows]] = {}  # by kind, joined on access
        if prefix is not None:
            if prefix.ids:
                self.extend(prefix.ids, prefix.logprobs, prefix.versions)
            self.append_rows(prefix.token_rows)

    def __len__(self) -> int:
        return self.tokens

    def append(self, data: bytes, version: int) -> None:
        """Append sampled tokens of one version, at least one, in the format of `TokenDelta.data`."""
        if version != self._version:
            self._spans.append((version, self.tokens))
            self._version = version
        self._pieces.append(data)
        self.tokens += len(data) // _BYTES

    def extend(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Iterable[VersionSpan], *, learned: bool = True
    ) -> None:
        """Append sampled tokens of several versions; ``learned`` False masks them. Raises ValueError where the parts
        differ in length."""
        tokens, end, first_masked = sampled(ids, logprobs), 0, len(self)
        for span in versions:
            end, first = end + span.tokens, end
            self.append(tokens[first:end].tobytes(), span.version)
        if end != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, and version spans of {end}: the counts must be equal")
        if not learned:
            self._masked.append((first_masked, len(self)))

    def append_reply(self, ids: Sequence[int]) -> None:
        """Append an environment's reply: masked, with the version of the token before (-1 where there is none)."""
        if ids:
            first, version = len(self), -1 if self._version is None else self._version
            self.append(sampled(ids, TokenLogprobs.filled(0.0, len(ids))).tobytes(), version)
            self._masked.append((first, len(self)))

    def append_rows(self, token_rows: Mapping[str, TokenRows], known: int | None = None) -> None:
        """Append rows to the sequence's next tokens without any. ``known``: number of tokens before the first of these
        rows; default: as many as have rows of the same kind. Repeated rows are left out, missing ones are empty."""
        for kind, rows in token_rows.items():
            parts = self._rows.setdefault(kind, [])
            offset = 0 if known is None else sum(map(len, parts)) - known
            if offset:
                rows = rows[offset:] if offset > 0 else TokenRows.joined((TokenRows.empty(-offset), rows))
            parts.append(rows)

    @property
    def rows(self) -> int:
        """Tokens of the sequence that have rows of every kind."""
        return min((sum(map(len, parts)) for parts in self._rows.values()), default=0)

    @property
    def token_rows(self) -> dict[str, TokenRows]:
        for parts in self._rows.values():
            parts[:] = [TokenRows.joined(parts)]
        return {kind: parts[0] for kind, parts in self._rows.items()}

    def _tokens(self) -> NDArray[Any]:
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return np.frombuffer(self._pieces[0], SAMPLED)

    @property
    def ids(self) -> TokenIds:
        return TokenIds.view(self._tokens()["id"].copy())

    @property
    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs.view(self._tokens()["logprob"].copy())

    @property
    def mask(self) -> TokenMask:
        mask = np.ones(len(self), TokenMask.dtype)
        for first, stop in self._masked:
            mask[first:stop] = False
        return TokenMask.view(mask)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        ends = [first for _, first in self._spans[1:]] + [self.tokens]
        spans = zip(self._spans, ends, strict=False)
        return tuple([VersionSpan(version=version, tokens=end - first) for (version, first), end in spans])

    def response(self, *, with_rows: bool = True) -> PartialResponse:
        """Return everything but the mask, which is enough to continue the response on another replica. ``with_rows``
        False leaves out the rows, which are large."""
        tokens = self._tokens()
        return PartialResponse(
            ids=TokenIds.view(tokens["id"].copy()),
            logprobs=TokenLogprobs.view(tokens["logprob"].copy()),
            versions=self.versions,
            token_rows=self.token_rows if with_rows else {},
        )

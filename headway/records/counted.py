"""Sequences that are counted, not stored, for simulated responses of any length.

Each stands in for the tuple of a record's field. It is a tuple, so that types and encoders need no exception; what it
stores is the few numbers that describe its items. Two are equal when those are. A decoder gives the numbers back as a
plain tuple, so records that hold these can be stored and counted, not read again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headway.records.tokens import TokenMask

_PERIOD = 991  # the tokens of a response repeat after this many; prime, so that seeds differ
_FIRST_ID = 8
_ALL_IDS = tuple(range(_FIRST_ID, _FIRST_ID + _PERIOD))


def token_at(seed: int, position: int) -> int:
    """Id of a made-up token: a function of seed and position alone, in 8 .. 998."""
    return _FIRST_ID + (seed % _PERIOD + position) % _PERIOD


def tokens_from(seed: int, first: int, count: int) -> tuple[int, ...]:
    """Ids at ``count`` positions from ``first`` on."""
    start_index = (seed % _PERIOD + first) % _PERIOD
    return (_ALL_IDS * (1 + (start_index + count) // _PERIOD))[start_index : start_index + count]


_stored: Callable[[Any, int], Any] = vars(tuple)["__getitem__"]  # past the subclass's own


class _Counted(tuple[Any, ...]):
    """A tuple whose storage is (length, ...); subclasses compute the item at a position."""

    __slots__ = ()

    @abstractmethod
    def _item(self, position: int) -> Any: ...

    def __len__(self) -> int:
        return _stored(self, 0)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(len(self)))

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Any: ...
    @overload
    def __getitem__(self, key: slice, /) -> tuple[Any, ...]: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> Any:
        """An item, or those of a slice as a plain tuple: O(items of the slice)."""
        positions = range(len(self))[key]
        return self._item(positions) if isinstance(positions, int) else tuple(map(self._item, positions))

    def __contains__(self, value: object) -> bool:
        return any(item == value for item in self)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(list(self), dtype=dtype)  # never what is stored


class CountedTokens(_Counted):
    """Token ids of one response: those of ``token_at``, with ``last`` as the last one where given.

    ``sampled``: how many of them the policy sampled; the rest are an environment's replies.

    Example: ``CountedTokens.of(100_000, seed=7) + CountedTokens.of(5, seed=7)`` has 100,005 items and stores five
    numbers.
    """

    __slots__ = ()

    @classmethod
    def of(cls, count: int, seed: int, sampled: int | None = None, last: int = -1) -> CountedTokens:
        """``last``: id of the last token; -1: as any other."""
        return cls((count, seed, count if sampled is None else sampled, last))

    @property
    def seed(self) -> int:
        return _stored(self, 1)

    @property
    def sampled(self) -> int:
        return _stored(self, 2)

    def _item(self, position: int) -> int:
        last_token: int = _stored(self, 3)
        if last_token >= 0 and position == len(self) - 1:
            return last_token
        return token_at(self.seed, position)

    def __add__(self, other: tuple[Any, ...], /) -> Any:
        """Tokens that follow under the same seed; those of a plain tuple only when there are none."""
        if isinstance(other, CountedTokens):
            last_token: int = _stored(other, 3)
            return CountedTokens.of(len(self) + len(other), self.seed, self.sampled + other.sampled, last_token)
        return self if not other else tuple(self) + other

    def __radd__(self, other: tuple[Any, ...]) -> Any:
        return self if not other else other + tuple(self)


class Repeated(_Counted):
    """A sequence of one value, ``count`` times."""

    __slots__ = ()

    @classmethod
    def of(cls, value: float, count: int) -> Repeated:
        return cls((count, value))

    @property
    def value(self) -> float:
        return _stored(self, 1)

    def _item(self, position: int) -> Any:
        return self.value

    def __add__(self, other: tuple[Any, ...], /) -> Any:
        if isinstance(other, Repeated) and other.value == self.value:
            return Repeated.of(self.value, len(self) + len(other))
        return self if not other else tuple(self) + tuple(other)

    def __radd__(self, other: tuple[Any, ...]) -> Any:
        return self if not other else other + tuple(self)


class SampledMask(_Counted):
    """Loss mask of a counted response: which positions are replies is not kept, only how many."""

    __slots__ = ()

    @classmethod
    def of(cls, count: int, sampled: int) -> SampledMask:
        return cls((count, sampled))

    @property
    def sampled(self) -> int:
        return _stored(self, 1)

    def _item(self, position: int) -> bool:
        return position < self.sampled


def joined(first: Sequence[Any], second: Sequence[Any]) -> Any:
    """Concatenate two sequences: arrays to an array, counted ones to a counted one."""
    untyped_second: Any = second
    return first + untyped_second if first and second else first or second  # type: ignore[operator]


def sampled_mask(ids: Sequence[int]) -> Sequence[bool]:
    """The loss mask of a response: True for every token the policy sampled."""
    return SampledMask.of(len(ids), ids.sampled) if isinstance(ids, CountedTokens) else TokenMask.filled(True, len(ids))


def sampled_tokens(mask: Sequence[bool]) -> int:
    """How many tokens of a mask carry loss."""
    return mask.sampled if isinstance(mask, SampledMask) else int(np.count_nonzero(mask))


def all_finite(values: Sequence[float]) -> bool:
    return bool(np.isfinite(values.value if isinstance(values, Repeated) else np.asarray(values, np.float64)).all())

"""Tokens as arrays: read-only sequences of ids, log-probabilities and loss masks, and how they are stored and sent.

To a reader each is a tuple of Python numbers; in memory, in frames and in the buffer it is one contiguous array:
4 bytes an id, 4 a log-probability, 1 a mask value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import total_ordering
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

SAMPLED = np.dtype([("id", "<i4"), ("logprob", "<f4")])  # a sampled token with its log-probability, as deltas have it

T = TypeVar("T", int, float, bool, covariant=True)


@total_ordering
class TokenArray(Sequence[T]):
    """An immutable sequence over ``array``, a read-only one-dimensional NumPy array. Items are Python numbers, slices
    are views, truth is being non-empty, and it equals, orders and hashes like the tuple of its items.

    Example: ``ids = TokenIds((5, 6, 7)); ids[1:] == (6, 7) and list(ids) == [5, 6, 7] and ids.array.sum() == 18``
    """

    __slots__ = ("_hash", "array")
    dtype: ClassVar[np.dtype[Any]]  # little-endian: also the format on disk and in frames
    kinds: ClassVar[str]  # NumPy's letters for what items may be given as

    array: NDArray[Any]

    def __init__(self, values: Iterable[T] = ()) -> None:
        """Copy or wrap ``values``. Raises ValueError for items of another kind, and for ids beyond 32 bits."""
        given = values.array if isinstance(values, TokenArray) else values
        raw = np.asarray(given if isinstance(given, np.ndarray) else list(given))
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in self.kinds):
            raise ValueError(f"{type(self).__name__}: {raw.dtype} in {raw.ndim} dimensions: a row of numbers is needed")
        if (
            raw.size
            and raw.dtype.kind in "iu"
            and raw.dtype.itemsize > 4
            and not -(2**31) <= raw.min() <= raw.max() < 2**31
        ):
            raise ValueError(f"{type(self).__name__}: {raw.min()} to {raw.max()}: 32 bits are needed to hold each")
        shared = raw is given and (raw.flags.writeable or not raw.flags.c_contiguous)  # by its owner, or strided
        array = raw.astype(self.dtype, order="C", copy=shared)
        array.setflags(write=False)
        self.array = array
        self._hash: int | None = None

    @classmethod
    def view(cls, data: bytes | bytearray | memoryview | NDArray[Any]) -> Self:
        """Wrap ``data``, which must not be written to any more, without a copy."""
        made = cls.__new__(cls)
        array: NDArray[Any] = data if isinstance(data, np.ndarray) else np.frombuffer(data, cls.dtype)
        array.setflags(write=False)
        made.array, made._hash = array, None
        return made

    @classmethod
    def filled(cls, value: float, count: int) -> Self:
        """``value``, ``count`` times."""
        return cls.view(np.full(count, value, cls.dtype))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[Any]]) -> Self:
        """The items of all ``parts``, one after another."""
        return cls.view(cls.concatenated(parts))

    @classmethod
    def concatenated(cls, parts: Iterable[Sequence[Any]], kind: DTypeLike | None = None) -> NDArray[Any]:
        """The items of all ``parts`` as a new NumPy array, of dtype ``kind`` where it is given."""
        arrays = [part.array if isinstance(part, cls) else cls(part).array for part in parts]
        return np.concatenate(arrays or [cls().array], dtype=kind or cls.dtype)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[T]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, key: slice, /) -> Self: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> T | Self:
        if isinstance(key, slice):
            return self.view(np.ascontiguousarray(self.array[key]))
        return self.array.item(key.__index__())

    def __add__(self, other: Sequence[Any]) -> Self:
        return self.joined((self, other))

    def __radd__(self, other: Sequence[Any]) -> Self:
        return self.joined((other, self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            array: NDArray[Any] = other.array  # pyright: ignore[reportUnknownMemberType]
            return len(self) == len(array) and bool((self.array == array).all())
        if isinstance(other, np.ndarray | tuple | list):
            items: list[Any] = other.tolist() if isinstance(other, np.ndarray) else list(other)  # pyright: ignore[reportUnknownArgumentType]
            return len(self) == len(items) and self.array.tolist() == items
        return NotImplemented

    def __lt__(self, other: Sequence[Any]) -> bool:
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self.array.tolist()))
        return self._hash

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.array.tolist()})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle the array out of band where the protocol has buffers (runtime.framing)."""
        if protocol.__index__() < 5:
            return type(self), (self.array.tolist(),)
        return _viewed, (type(self), PickleBuffer(self.array.data))


class TokenIds(TokenArray[int]):
    """Token ids."""

    __slots__ = ()
    dtype, kinds = np.dtype("<i4"), "iu"


class TokenLogprobs(TokenArray[float]):
    """Log-probabilities of tokens, nats: single precision, as engines compute them and trainers read them."""

    __slots__ = ()
    dtype, kinds = np.dtype("<f4"), "fiu"


class TokenMask(TokenArray[bool]):
    """True for every token that the policy sampled and that may carry loss."""

    __slots__ = ()
    dtype, kinds = np.dtype("?"), "b"


class RowLengths(TokenArray[int]):
    """Counts of numbers in the rows beside tokens (`records.token_rows`)."""

    __slots__ = ()
    dtype, kinds = np.dtype("<u4"), "iu"


class RowBytes(TokenArray[int]):
    """The bytes of such rows."""

    __slots__ = ()
    dtype, kinds = np.dtype("u1"), "iu"


_KINDS = frozenset((TokenIds, TokenLogprobs, TokenMask, RowLengths, RowBytes))

if TYPE_CHECKING:  # a record may be made of anything that reads like a tuple; read again, it has arrays
    IdSequence = Sequence[int]
    LogprobSequence = Sequence[float]
    MaskSequence = Sequence[bool]
else:
    IdSequence, LogprobSequence, MaskSequence = TokenIds, TokenLogprobs, TokenMask


def sampled(ids: Sequence[int], logprobs: Sequence[float]) -> NDArray[Any]:
    """Tokens with their log-probabilities as an array, [N] of SAMPLED. Raises ValueError where their lengths differ."""
    found = np.empty(len(ids), SAMPLED)
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities: as many are needed")
    found["id"], found["logprob"] = TokenIds(ids).array, TokenLogprobs(logprobs).array
    return found


def _viewed(kind: type[TokenArray[Any]], data: bytes | bytearray | memoryview) -> TokenArray[Any]:
    return kind.view(data)


def plain(value: Any) -> list[Any]:
    """msgspec's ``enc_hook`` for output that people read: an array as a list of numbers."""
    if isinstance(value, TokenArray):
        return value.array.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    raise NotImplementedError(f"{type(value).__name__} can't be encoded")


def _packed(value: Any) -> memoryview:
    if type(value) in _KINDS:  # isinstance asks abc, which takes longer than the rest
        return value.array.data
    raise NotImplementedError(f"{type(value).__name__} can't be encoded")


def restored(kind: type, value: Any) -> Any:
    """msgspec's ``dec_hook``: an array from its bytes, or from a list of numbers (JSON, and records from before Headway
    stored arrays)."""
    if not issubclass(kind, TokenArray):
        raise NotImplementedError(f"{kind.__name__} can't be decoded")
    if isinstance(value, bytes):
        return kind.view(value)  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, list):
        raise ValueError(f"{kind.__name__}: bytes or a list is needed, not {type(value).__name__}")
    return kind(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def encoder() -> msgspec.msgpack.Encoder:
    """Make a MessagePack encoder of records, arrays as bytes."""
    return msgspec.msgpack.Encoder(enc_hook=_packed)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make the MessagePack decoder of `encoder`'s output; arrays are views of its bytes."""
    return msgspec.msgpack.Decoder(kind, dec_hook=restored)

"""Tokens as arrays: read-only sequences of ids, log-probabilities and loss masks, and how they are stored and sent.

To a reader each is a tuple of Python numbers; in memory, in frames and in the buffer it is one contiguous array:
4 bytes an id, 4 a log-probability, 1 a mask value.

Beside tokens may stand *rows* of numbers, as engines return them and the trainer reads them again: the experts of each
token, or the ids that it was sampled among. Row i belongs to token i of the whole sequence, its prompt included. Tokens
behind the last row, and those whose row is empty, have none. A request asks only for the rows that its caller lacks
(``rows_known``), so that the rows of calls that extend one another are joined, and a token keeps its first row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import total_ordering
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

SAMPLED = np.dtype([("id", "<i4"), ("logprob", "<f4")])  # a sampled token with its log-probability, as deltas have it

# Kinds of rows: ids of the experts that a token went through when it was read, layer after layer, of which the last one
# sampled has none yet; and the vocabulary ids that a token was sampled among by top-p and top-k, ascending: empty for
# one that was given, or sampled among the whole vocabulary or all that its grammar allows.
EXPERTS = "experts"
KEPT = "kept"
TEACHER = "teacher"  # of sampled tokens: a teacher's scores of each (`algorithms.teacher_scores`)
CONTEXT = "context"  # of a prompt's first token: the ids that a teacher in the trainer reads in the prompt's place
TARGET_KINDS = frozenset((KEPT, TEACHER, CONTEXT))  # rows that aren't of a token as the model's input
PIXELS = "pixels"  # kind of rows: a prompt's first token has the content hash of its pictures' pixel arrays

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
        plain_values = values.array if isinstance(values, TokenArray) else values
        raw = np.asarray(plain_values if isinstance(plain_values, np.ndarray) else list(plain_values))
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in self.kinds):
            raise ValueError(f"{type(self).__name__}: {raw.dtype} in {raw.ndim} dimensions: a row of numbers is needed")
        if (
            raw.size
            and raw.dtype.kind in "iu"
            and raw.dtype.itemsize > 4
            and not -(2**31) <= raw.min() <= raw.max() < 2**31
        ):
            raise ValueError(f"{type(self).__name__}: {raw.min()} to {raw.max()}: 32 bits are needed to hold each")
        shared = raw is plain_values and (raw.flags.writeable or not raw.flags.c_contiguous)  # by its owner, or strided
        array = raw.astype(self.dtype, order="C", copy=shared)
        array.setflags(write=False)
        self.array = array
        self._hash: int | None = None

    @classmethod
    def view(cls, data: bytes | bytearray | memoryview | NDArray[Any]) -> Self:
        """Wrap ``data``, which must not be written to any more, without a copy."""
        instance = cls.__new__(cls)
        array: NDArray[Any] = data if isinstance(data, np.ndarray) else np.frombuffer(data, cls.dtype)
        array.setflags(write=False)
        instance.array, instance._hash = array, None
        return instance

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


_MIX = 0x5851F42D4C957F2D  # Knuth's multiplier of a linear congruential generator modulo 2^64
_ROWS_AT_ONCE = 1 << 14


class RowLengths(TokenArray[int]):
    """Counts of numbers in the rows beside tokens (`TokenRows`)."""

    __slots__ = ()
    dtype, kinds = np.dtype("<u4"), "iu"


class RowBytes(TokenArray[int]):
    """The bytes of rows beside tokens."""

    __slots__ = ()
    dtype, kinds = np.dtype("u1"), "iu"


class TokenRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of unsigned numbers, one for each of some consecutive tokens, of any length each.

    Invariant: ``data`` has ``item_bytes * sum(lengths)`` bytes, little-endian, row after row.

    Example: ``rows = TokenRows.of([[3, 1], [], [2]]); TokenRows.joined((rows[:2], rows[2:])) == rows``
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
            lengths, values = RowLengths([len(row) for row in rows]), np.array([num for row in rows for num in row])
        return cls(lengths, RowBytes.view(values.astype(f"<u{item_bytes}").view(RowBytes.dtype)), item_bytes)

    @classmethod
    def empty(cls, count: int) -> TokenRows:
        """``count`` rows without a number."""
        return cls(RowLengths.filled(0, count))

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
        """The rows from each of ``starts`` on, ``lengths`` of them each, concatenated; rows beyond the last are
        empty."""
        row_ends = np.concatenate([[0], np.cumsum(self.lengths.array, dtype=np.int64)])
        runs: list[TokenRows] = []
        for start, length in zip(starts, lengths, strict=True):
            first, end = (min(int(bound), len(self)) for bound in (start, start + length))
            cut_bytes = self.data[int(row_ends[first]) * self.item_bytes : int(row_ends[end]) * self.item_bytes]
            runs.append(TokenRows(self.lengths[first:end], cut_bytes, self.item_bytes))
            runs.append(TokenRows.empty(int(length) - (end - first)))
        return TokenRows.joined(runs)

    def take(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The lengths, [M], of the rows with these ``rows``, and their numbers, row after row."""
        ends, lengths = np.cumsum(self.lengths.array, dtype=np.int64)[rows], self.lengths.array[rows].astype(np.int64)
        shifts = np.repeat(ends - np.cumsum(lengths), lengths)
        return lengths, self.values[np.arange(len(shifts)) + shifts]

    def hashes(self) -> NDArray[np.uint64]:
        """Hash each row, [N]: equal rows have equal hashes, different rows almost never."""
        lengths, data = self.lengths.array.astype(np.int64), self.data.array
        ends, hashes = np.cumsum(lengths * self.item_bytes), lengths.astype(np.uint64)
        for length in np.unique(lengths[lengths > 0]).tolist():  # eight bytes of all rows of a length at once
            row_indices, row_bytes = np.flatnonzero(lengths == length), length * self.item_bytes
            for chunk in np.array_split(row_indices, len(row_indices) // _ROWS_AT_ONCE + 1):
                words = np.zeros((len(chunk), -(-row_bytes // 8)), np.uint64)
                words.view(np.uint8)[:, :row_bytes] = data[(ends[chunk] - row_bytes)[:, None] + np.arange(row_bytes)]
                for word in words.T:
                    hashes[chunk] = hashes[chunk] * np.uint64(_MIX) + word
        return hashes

    def table(self, width: int) -> NDArray[np.int32]:
        """All rows as an array, [N, width]; -1 where a row is empty or a number has all bits set. Raises ValueError for
        a row of another length."""
        lengths = self.lengths.array
        if len(wrong_lengths := lengths[(lengths > 0) & (lengths != width)]):
            raise ValueError(f"a row of {wrong_lengths[0]} numbers where {width} are needed")
        table = np.full((len(self), width), -1, np.int32)
        values = self.values.reshape(-1, width)
        table[lengths > 0] = np.where(values == np.iinfo(values.dtype).max, -1, values.astype(np.int32))
        return table


def pixel_rows(digest: str) -> dict[str, TokenRows]:
    """The rows of a prompt whose pictures' pixel arrays have the content hash ``digest``, in hex; none for ""."""
    return {PIXELS: TokenRows.of([list(bytes.fromhex(digest))])} if digest else {}


def pixels_of(token_rows: Mapping[str, TokenRows], token: int = 0) -> str:
    """The content hash in the rows of the sequence that begins at ``token``; "": it has none."""
    rows = token_rows.get(PIXELS, TokenRows())[token : token + 1]
    return rows.data.array.tobytes().hex()


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
        """Return why these experts can't be those of this mixture; "" when they can."""
        lengths, values = rows.lengths.array, rows.values
        if len(wrong_lengths := lengths[(lengths != 0) & (lengths != self.width)]):
            layers_text = f"{self.layers} layers with {self.per_token} experts of a token"
            return f"a row of {wrong_lengths[0]} numbers where {self.width} are needed: {layers_text}"
        expert_ids = values[values != np.iinfo(values.dtype).max]
        if (highest := int(expert_ids.max(initial=0))) >= self.experts:
            return f"expert {highest} of a layer that has {self.experts}"
        return ""


def outside_kept(lengths: NDArray[np.int64], values: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
    """Indices of the rows, as `TokenRows.take` gives them, that are kept sets without the token of ``ids``, [M]."""
    holding_rows = np.repeat(np.arange(len(ids)), lengths)[values == np.repeat(ids, lengths)]
    return np.flatnonzero((lengths > 0) & (np.bincount(holding_rows, minlength=len(ids)) == 0))


_KINDS = frozenset((TokenIds, TokenLogprobs, TokenMask, RowLengths, RowBytes))

if TYPE_CHECKING:  # a record may be made of any sequence; a decoded one has arrays
    IdSequence = Sequence[int]
    LogprobSequence = Sequence[float]
    MaskSequence = Sequence[bool]
else:
    IdSequence, LogprobSequence, MaskSequence = TokenIds, TokenLogprobs, TokenMask


def sampled(ids: Sequence[int], logprobs: Sequence[float]) -> NDArray[Any]:
    """Tokens with their log-probabilities as an array, [N] of SAMPLED. Raises ValueError where their lengths differ."""
    tokens = np.empty(len(ids), SAMPLED)
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities: the counts must be equal")
    tokens["id"], tokens["logprob"] = TokenIds(ids).array, TokenLogprobs(logprobs).array
    return tokens


def _viewed(kind: type[TokenArray[Any]], data: bytes | bytearray | memoryview) -> TokenArray[Any]:
    return kind.view(data)


def plain(value: Any) -> list[Any]:
    """msgspec's ``enc_hook`` for output that people read: an array as a list of numbers."""
    if isinstance(value, TokenArray):
        return value.array.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    raise NotImplementedError(f"{type(value).__name__} can't be encoded")


def _packed(value: Any) -> memoryview:
    if type(value) in _KINDS:  # isinstance calls abc's hook, which takes longer than the rest
        return value.array.data
    raise NotImplementedError(f"{type(value).__name__} can't be encoded")


def restored(kind: type, value: Any) -> Any:
    """msgspec's ``dec_hook``: an array from its bytes, or from a list of numbers, as JSON has it."""
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

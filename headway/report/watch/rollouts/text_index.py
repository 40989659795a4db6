"""Indexes the text of all rollouts of a run as a file of bytes, which a search reads.

An index of words would find neither pieces of code nor parts of words, and would be as large. Tokens become bytes by a
gather from a table of the vocabulary. Search ignores case where both cases of a character have equally many bytes
(nearly always; not: İ, ẞ, and scripts beyond the Basic Multilingual Plane), so that offsets in the folded text are
offsets in the text itself.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.report.watch.rollouts.columns import StreamPosition, StreamTail
from headway.runtime.user_cache import write_cached
from headway.telemetry.rollouts.columns import FINISHED

BORDER = b"\xff"  # after each sequence of a rollout; never occurs in UTF-8
COLUMNS = ["prompt_ids", "response_ids", "branches"]  # columns from which the text is made
_TEXT, _ENDS, _STATE, _LOCK = "texts.bytes", "texts.ends", "texts.json", "texts.lock"
_COMMIT_BATCHES = 16  # batches between two writes of the index's state
_SLICE_ROWS = 128  # converted to text at a time, to bound memory
_READ_BYTES = 1 << 20  # read at a time, to bound a search's memory
_GAP_BYTES = 1 << 16  # largest gap between two rows that share a read
_FIRST_ROWS, _ROWS_FACTOR = 1 << 12, 16  # rows of the first chunk of a search, and the growth of further chunks

Array = NDArray[Any]


class TokenTable:
    """The texts of a tokenizer's tokens as bytes. ``identity`` differs for another vocabulary."""

    def __init__(self, texts: Sequence[bytes], special_ids: Collection[int] = ()) -> None:
        """Build the table. ``texts``: of each id; ``special_ids``: ids that a preview leaves out."""
        self.special = np.array(sorted(special_ids), np.int64)
        self._size = len(texts)
        self._texts = pa.array([*texts, BORDER, b""], pa.binary())  # after the ids: the border, an unknown token
        self.identity = hashlib.sha256(msgspec.msgpack.encode(list(texts))).hexdigest()

    def joined(self, ids: Array) -> tuple[Array, Array]:
        """Return the bytes of ``ids``, of which -1 is a border, and the end of each id's bytes."""
        known_ids = np.where((ids >= 0) & (ids < self._size), ids, np.where(ids == -1, self._size, self._size + 1))
        _, offsets, text_buffer = self._texts.take(pa.array(known_ids)).buffers()
        ends = np.frombuffer(offsets, np.int32)[1 : len(ids) + 1]
        return np.frombuffer(text_buffer or b"", np.uint8, ends[-1] if len(ends) else 0), ends

    def strings(self, ids: Array, context: Array) -> list[str]:
        """Return the text of each of ``ids``, which follow ``context``. A character of several tokens belongs to the
        last of them; bytes that aren't UTF-8 are written \\xNN."""
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        byte_array, ends = self.joined(np.concatenate([context, ids]))
        raw_bytes, boundaries = byte_array.tobytes(), [0, *ends.tolist()]
        texts = [decoder.decode(raw_bytes[a:b]) for a, b in pairwise(boundaries)]
        return [*texts[:-1], texts[-1] + decoder.decode(b"", final=True)][len(context) :] if texts else []


def fold(text: Array) -> Array:
    """Convert the letters of a text of UTF-8 bytes to lower case, in place; incomplete characters stay."""
    text |= (text - np.uint8(65) < 26).view(np.uint8) << np.uint8(5)
    lower_table = _lower_case()
    lead = np.flatnonzero((text >= 0xC3) & (text <= 0xDF))
    lead = lead[lead < len(text) - 1]
    lead = lead[text[lead + 1] >> 6 == 2]
    changed = lower_table[(text[lead].astype(np.int32) & 31) << 6 | text[lead + 1] & 63]
    text[lead], text[lead + 1] = 0xC0 | changed >> 6, 0x80 | changed & 63
    lead = np.flatnonzero(text >> 4 == 14)
    lead = lead[lead < len(text) - 2]
    lead = lead[(text[lead + 1] >> 6 == 2) & (text[lead + 2] >> 6 == 2)]
    first, second = text[lead].astype(np.int32), text[lead + 1].astype(np.int32)
    changed = lower_table[(first & 15) << 12 | (second & 63) << 6 | text[lead + 2] & 63]
    text[lead], text[lead + 1], text[lead + 2] = 0xE0 | changed >> 12, 0x80 | changed >> 6 & 63, 0x80 | changed & 63
    return text


def folded(text: str) -> bytes:
    """Convert a text to search for to the form in which the index stores texts."""
    return fold(np.frombuffer(text.encode("utf-8", "replace"), np.uint8).copy()).tobytes()


@cache
def _lower_case() -> Array:
    """Return the code of each character's lower case where it has equally many bytes, else of the character."""
    lower_codes = np.arange(1 << 16, dtype=np.int32)
    for code in range(128, 1 << 16):
        lower = chr(code).lower()
        if len(lower) == 1 and ord(lower) != code and (code < 2048) == (ord(lower) < 2048) and ord(lower) > 127:
            lower_codes[code] = ord(lower)
    return lower_codes


def texts_of(batch: pa.RecordBatch, tokens: TokenTable) -> tuple[Array, Array]:
    """Return the text of a batch's rollouts, and the end of each rollout in it. A rollout's text is prompt, response
    and the responses of branches, each followed by a border."""
    count = batch.num_rows
    id_lists, owners = [batch["prompt_ids"], batch["response_ids"]], [np.arange(count)] * 2
    branches = batch["branches"]
    if branches.null_count < count:
        owners.append(np.repeat(np.arange(count), branches.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)))
        id_lists.append(branches.flatten().field("response_ids"))
    owner_of_sequence = np.concatenate(owners)
    sequences = pa.concat_arrays(id_lists).take(pa.array(np.argsort(owner_of_sequence, kind="stable")))
    ids, ends = sequences.values.to_numpy(zero_copy_only=False), sequences.offsets.to_numpy()[1:]
    text, token_ends = tokens.joined(np.insert(np.where(ids < 0, np.iinfo(np.int32).max, ids), ends, -1))
    last_sequence = np.cumsum(np.bincount(owner_of_sequence, minlength=count)) - 1  # sequence of each rollout
    return text, token_ends[(ends + np.arange(len(ends)))[last_sequence]].astype(np.int64)


class _State(msgspec.Struct, frozen=True):
    """The valid extent of the index's files; bytes after it are torn."""

    record: str = ""  # identity of the record
    tokens: str = ""  # ... and of the vocabulary
    rows: int = 0
    size_bytes: int = 0
    position: StreamPosition = StreamPosition()


class TextIndex:
    """The folded text of a run's rollouts in the cache.

    Lifecycle: *made* -> ``extend`` any number of times, which starts a thread of low priority where there is text to
    add -> ``close``. Among several watchers a single one writes, and the others read its files. Rows never change, so a
    reader needs no lock.
    """

    def __init__(self, record: Path, cache: Path, tokens: TokenTable) -> None:
        self.problem = ""
        self._tail = StreamTail(record / "finished", FINISHED)
        self._cache, self._tokens = cache, tokens
        self._state = _State()
        self._ends: Array = np.zeros(1, np.int64)  # element i: start of row i; the last one: the end
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def rows(self) -> int:
        """Return the number of rollouts whose text can be searched."""
        return self._state.rows

    def extend(self, rows: int, wait_s: float) -> None:
        """Index the text of the record's first ``rows`` rows, in the background if it takes more than ``wait_s``."""
        if self._thread is None or not self._thread.is_alive():
            self._read_state()
            if self.rows >= rows or self._closing:
                return
            self._thread = threading.Thread(target=self._run, daemon=True, name="watch-texts")
            self._thread.start()
        self._thread.join(wait_s)

    def close(self) -> None:
        """End the thread; a second call is a no-op."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def matching(self, text: bytes, rows: Array) -> Iterator[int]:
        """Yield those of ``rows``, in their order, that contain ``text``, which is `folded`; negative ones do."""
        chunk_size = _FIRST_ROWS
        while len(rows):
            chunk, rows, chunk_size = rows[:chunk_size], rows[chunk_size:], chunk_size * _ROWS_FACTOR
            is_contained = chunk < 0
            indexed = np.flatnonzero(~is_contained & (chunk < self.rows))
            indexed = indexed[np.argsort(chunk[indexed], kind="stable")]
            if len(indexed):
                is_contained[indexed] = self._contain(text, chunk[indexed])
            yield from chunk[is_contained].tolist()

    def _contain(self, text: bytes, rows: Array) -> Array:
        """Return whether each of ``rows``, which ascend, contains ``text``. Only their bytes are read, in chunks."""
        begins, stops = self._ends[rows], self._ends[rows + 1]
        gaps_bytes = begins[1:] - stops[:-1]
        begins_read = np.append(True, (gaps_bytes > _GAP_BYTES) | (np.diff(begins // _READ_BYTES) > 0))
        begins_run = np.append(True, gaps_bytes > 0) | begins_read
        read_starts = np.append(np.flatnonzero(begins_read), len(rows)).tolist()
        run_starts = np.append(np.flatnonzero(begins_run), len(rows))
        first_runs = np.searchsorted(run_starts, read_starts).tolist()  # the first run of each read
        is_contained, buffer = np.zeros(len(rows), bool), bytearray()
        with open(self._cache / _TEXT, "rb", buffering=0) as file:
            for number, (low, high) in enumerate(pairwise(read_starts)):
                base = int(begins[low])
                size = int(stops[high - 1]) - base
                if size > len(buffer):
                    buffer = bytearray(size)
                if os.preadv(file.fileno(), [memoryview(buffer)[:size]], base) < size:
                    break  # truncated by another watcher, which rebuilds the index
                starts, ends = (begins[low:high] - base).tolist(), (stops[low:high] - base).tolist()
                read_runs = (run_starts[first_runs[number] : first_runs[number + 1] + 1] - low).tolist()
                for first, next_first in pairwise(read_runs):
                    match_start = buffer.find(text, starts[first], ends[next_first - 1])
                    while match_start >= 0:
                        row = bisect_right(starts, match_start, first, next_first) - 1
                        is_contained[low + row] = True
                        match_start = buffer.find(text, ends[row], ends[next_first - 1])
        return is_contained

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # another watcher may have deleted it
            with open(self._cache / _LOCK, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._read_state()
                self._write()
                self.problem = ""
        except BlockingIOError:
            pass  # another watcher writes it
        except Exception as error:  # the boundary of the thread: the page shows the error, and its other views work
            self.problem = f"texts can't be indexed: {type(error).__name__}: {error}"

    def _write(self) -> None:
        """Append the text of the rows that the record has and the index lacks."""
        state = self._state
        self._tail.position = state.position
        for path in (self._cache / _TEXT, self._cache / _ENDS):
            path.touch(0o600)
        with open(self._cache / _TEXT, "r+b") as text_file, open(self._cache / _ENDS, "r+b") as ends_file:
            for file, size in ((text_file, state.size_bytes), (ends_file, 8 * state.rows)):
                file.truncate(size)
                file.seek(size)
            further_ends: list[Array] = []
            for number, (position, row, batch) in enumerate(self._tail.batches(COLUMNS), start=1):
                if self._closing:
                    break
                missing_ends = np.full(max(0, row - state.rows), state.size_bytes)  # lost in a damaged segment
                size_bytes = state.size_bytes
                for first_row in range(max(0, state.rows - row), batch.num_rows, _SLICE_ROWS):
                    text, ends = texts_of(batch.slice(first_row, _SLICE_ROWS), self._tokens)
                    further_ends += [missing_ends, ends + size_bytes]
                    size_bytes, missing_ends = size_bytes + len(text), missing_ends[:0]
                    text_file.write(fold(text.copy()).data)
                    ends_file.write(np.concatenate(further_ends[-2:]).data)
                self._tail.position = position
                rows = max(position.rows, state.rows)
                state = msgspec.structs.replace(state, position=position, rows=rows, size_bytes=size_bytes)
                if number % _COMMIT_BATCHES == 0:
                    text_file.flush()
                    ends_file.flush()
                    self._commit_state(state, further_ends)
        if further_ends:
            self._commit_state(state, further_ends)

    def _commit_state(self, state: _State, further: list[Array]) -> None:
        write_cached(self._cache / _STATE, lambda file: file.write(msgspec.json.encode(state)))
        self._ends, self._state = np.concatenate([self._ends, *further]), state
        further.clear()

    def _read_state(self) -> None:
        """Load the files that this or another watcher wrote; start empty if they are damaged or of another record."""
        fresh_state = _State(record=self._tail.identity(), tokens=self._tokens.identity)
        try:
            state = msgspec.json.decode((self._cache / _STATE).read_bytes(), type=_State)
            if (state.record, state.tokens) != (fresh_state.record, fresh_state.tokens):
                raise ValueError("of another record")
            for name, size in ((_TEXT, state.size_bytes), (_ENDS, 8 * state.rows)):
                if (self._cache / name).stat().st_size < size:
                    raise ValueError("cut off")
            if state == self._state:
                return
            text_ends = np.append(0, np.fromfile(self._cache / _ENDS, np.int64, state.rows))
            if text_ends[-1] != state.size_bytes or (np.diff(text_ends) < 0).any() or not self._bordered(text_ends):
                raise ValueError("damaged")
            self._ends, self._state = text_ends, state
        except (OSError, ValueError, msgspec.MsgspecError):
            self._ends, self._state = np.zeros(1, np.int64), fresh_state

    def _bordered(self, ends: Array) -> bool:
        """Return whether the rollouts, or a sample of many, end with a border in the text."""
        ends = ends[1:][np.diff(ends) > 0]
        with open(self._cache / _TEXT, "rb", buffering=0) as file:
            return all(os.pread(file.fileno(), 1, int(end) - 1) == BORDER for end in ends[:: len(ends) // 64 + 1])

"""Segments of a record: append-only Arrow IPC streams, which can be read while they are written.

A stream of a run is a folder of segments, ``NUMBER-FIRST.arrow``: NUMBER counts the segments, FIRST is the row or step
with which the segment begins (docs/rollouts.md). No file is ever truncated or replaced, since a reader may have it
mapped.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from headway.records.errors import StorageFailed

FOLDER = "rollouts"  # of a run's
SEGMENT_BYTES = 64 << 20
RESERVE_BYTES = 1 << 30  # of the disk, reserved for checkpoints and the accounting
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an IPC stream
_METADATA = b"headway"


class StreamSegment(NamedTuple):
    """The parsed name of a stream's file."""

    number: int
    first: int  # row, or step, that it begins with
    path: Path


def list_segments(folder: Path) -> list[StreamSegment]:
    """The segments of a stream, oldest first; [] if the folder doesn't exist."""
    segments: list[StreamSegment] = []
    for path in folder.glob("*-*.arrow"):
        number_text, _, first_text = path.stem.partition("-")
        if number_text.isdigit() and first_text.isdigit():
            segments.append(StreamSegment(int(number_text), int(first_text), path))
    return sorted(segments)


class SegmentWriter:
    """The writer of a stream.

    Lifecycle: *open* (``append``, which seals a segment of ``segment_bytes`` and begins the next) -> *closed*. Each
    batch is one ``write``, so that a kill tears at most the last one, which readers leave out.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        *,
        first: int = 0,
        metadata: Mapping[str, Any] | None = None,
        max_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """Begin a segment at ``first``, after those in ``folder``. ``metadata``: JSON types, stored in each segment.
        ``max_bytes``: limit of all streams of the record together. Raises StorageFailed."""
        self._folder = folder
        self._schema = schema.with_metadata({_METADATA: json.dumps(dict(metadata or {}))})
        self._max_bytes, self._segment_bytes, self._reserve_bytes = max_bytes, segment_bytes, reserve_bytes
        self._fd = -1
        self._size = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(f"{folder} can't be made: {error.strerror}") from None
        self._begin(first)

    def append(self, batch: pa.RecordBatch, first: int) -> None:
        """Write ``batch``, which begins at ``first``. Raises StorageFailed, after which the writer is closed."""
        if self._size >= self._segment_bytes:
            self.close()
            self._begin(first)
        self._write(batch.serialize())

    def close(self) -> None:
        """Seal the segment; a second call is a no-op. Never raises, since an unsealed segment is readable too."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, _END)
            self._release()

    def _begin(self, first: int) -> None:
        self._require_quota()
        segments = list_segments(self._folder)
        number = segments[-1].number + 1 if segments else 1
        path = self._folder / f"{number:06d}-{first:010d}.arrow"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageFailed(f"{path} can't be made: {error.strerror}") from None
        self._size = 0
        self._write(self._schema.serialize())

    def _require_quota(self) -> None:
        root = self._folder.parent
        if self._max_bytes is not None and (used_bytes := stored_bytes(root)) >= self._max_bytes:
            raise StorageFailed(f"{root} has {used_bytes} bytes, and ledger.rollouts_max_bytes = {self._max_bytes}")

    def _write(self, data: pa.Buffer) -> None:
        written_bytes, reason = 0, "no space left"
        try:
            disk_status = os.fstatvfs(self._fd)
            if (free_space := disk_status.f_bavail * disk_status.f_frsize) < self._reserve_bytes + data.size:
                reason = f"{free_space >> 20} MiB are free, and {self._reserve_bytes >> 20} MiB are left to checkpoints"
            else:
                written_bytes = os.write(self._fd, data)  # pyright: ignore[reportArgumentType]  # it has the buffer protocol
        except OSError as error:
            reason = error.strerror or str(error)
        self._size += written_bytes
        if written_bytes < data.size:
            self._release()
            raise StorageFailed(f"{self._folder} can't be written to: {reason}")

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def stored_bytes(root: Path) -> int:
    """The size of all segments of a record, in bytes."""
    return sum(path.stat().st_size for path in root.glob("*/*.arrow"))


class SegmentFile:
    """The reader of a segment, which may still be written. A torn, damaged or missing batch ends the reading and sets
    ``problem``."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """``schema``: of its stream; a segment with another schema yields nothing."""
        self.path = path
        self.problem = ""
        self._known = schema

    def batches(self, columns: Sequence[str] | None = None, offset: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (offset, batch) of the complete batches from byte ``offset`` on (0: all), with these ``columns`` (None:
        all). Arrays are views of the mapped file, so that other columns aren't read, and the pages of a batch leave the
        process's memory with the next batch."""
        self.problem = ""
        kept = pa.schema([self._known.field(name) for name in (columns or self._known.names)])
        try:
            with self.path.open("rb") as segment_file:
                mapping = mmap.mmap(segment_file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last array
            with pa.BufferReader(pa.py_buffer(mapping)) as reader:
                schema = pa.ipc.read_schema(reader)
                if offset:
                    reader.seek(offset)
                offset = reader.tell()
                if schema != self._known:
                    raise ValueError("its columns aren't those that this Headway writes")
                while offset < reader.size():
                    full_batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
                    batch = pa.RecordBatch.from_arrays([full_batch.column(name) for name in kept.names], schema=kept)
                    batch.validate(full=True)  # pyarrow would follow offsets out of bounds
                    yield offset, batch
                    mapping.madvise(mmap.MADV_DONTNEED, offset // mmap.PAGESIZE * mmap.PAGESIZE)
                    offset = reader.tell()
        except EOFError:
            pass  # sealed
        except (pa.ArrowException, OSError, ValueError) as error:
            self.problem = f"{self.path}: no whole batch from byte {offset} on: {str(error).splitlines()[0]}"

    def metadata(self) -> dict[str, Any]:
        """The writer's metadata; {} if the segment can't be read."""
        try:
            with pa.memory_map(str(self.path)) as file:
                return dict(json.loads((pa.ipc.read_schema(file).metadata or {}).get(_METADATA, b"{}")))
        except (pa.ArrowException, OSError, ValueError):
            return {}

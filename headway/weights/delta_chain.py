"""The deltas that a publisher writes beside its versions, and keeps for readers that lag. Torch-free."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from headway.records.generation import PublishedDelta
from headway.weights.checksums import Block
from headway.weights.delta_archive import DeltaArchive
from headway.weights.deltas import MOST_OF_WHOLE, digest_of, encode_sections, file_of, sections_of
from headway.weights.manifest import PayloadManifest
from headway.weights.slot_file import new_slot
from headway.weights.writers import Writers

log = logging.getLogger(__name__)
_MOST_SKIPPED = 64  # versions without a try, after deltas that didn't pay


class ChainedVersion(NamedTuple):
    """A version that is published: the next one's base."""

    version: int
    checksum: str
    manifest: bytes
    payload: np.ndarray  # [bytes] uint8, in its slot


class DeltaChain:
    """The chain of deltas that leads to the newest version: no longer than readers would take in a whole one's place.

    Every writer has one, and all have the same versions: each encodes the blocks that it hashes, and rank 0 writes the
    file. The chain begins again after ``whole_every`` versions, with other tensors or an earlier version, and where a
    delta would take more than `MOST_OF_WHOLE`, as for float32; after such a one the next 1, 2, 4, ... aren't tried.
    """

    def __init__(self, stem: str, whole_every: int, writers: Writers, archive: DeltaArchive | None = None) -> None:
        """``stem``: of the files' names. ``archive``: gets all deltas, also those at which a chain begins again; all
        writers have one, or none has."""
        self._stem, self._whole_every, self._writers, self._archive = stem, whole_every, writers, archive
        self._base: ChainedVersion | None = None
        self._files: list[tuple[PublishedDelta, Path, mmap.mmap, int]] = []  # a mapping holds its file, of this inode
        self._since_whole = self._skipped = self._skips = 0  # versions

    def extend(
        self,
        folder: Path,
        new: ChainedVersion,
        table: np.ndarray,
        blocks: Sequence[Block],
    ) -> tuple[PublishedDelta, ...]:
        """Add the delta to a version that has just been written; returns the chain, on rank 0. A call of all writers.
        ``blocks``: those that this writer hashes; ``folder``: of the slot."""
        base, self._base = self._base, new
        is_next = base is not None and base.manifest == new.manifest and base.version < new.version
        if begins := not is_next or self._since_whole + 1 >= self._whole_every:
            self._begin_again()
        if base is None or not is_next or (begins and self._archive is None):
            pass
        elif self._skips < self._skipped:
            self._skips += 1
        else:
            sections = sections_of(msgspec.json.decode(new.manifest, type=PayloadManifest), blocks)
            encoded = encode_sections(base.payload, new.payload, sections)
            parts = self._writers.all_gather(None if encoded is None else list(zip(sections, encoded, strict=True)))
            all_encoded = [part for rank_parts in parts for part in rank_parts or ()]
            encoded_bytes = sum(len(content) for _, content in all_encoded)
            if None in parts or encoded_bytes > MOST_OF_WHOLE * len(new.payload):
                self._begin_again()
                self._skips, self._skipped = 0, min(max(1, 2 * self._skipped), _MOST_SKIPPED)
            else:
                self._since_whole, self._skips, self._skipped = self._since_whole + (not begins), 0, 0
                if self._writers.rank == 0:
                    pieces = file_of(new.version, base.version, base.checksum, table, all_encoded)
                    if self._archive is not None:
                        self._archive.add(new.version, new.checksum, pieces)
                    if not begins:
                        self._write(folder, base, new, pieces)
        return tuple(delta for delta, *_ in self._files)

    def close(self) -> None:
        """Remove the files."""
        self._begin_again()

    def _begin_again(self) -> None:
        self._unlink(len(self._files))
        self._since_whole = 0

    def _write(self, folder: Path, base: ChainedVersion, new: ChainedVersion, pieces: Sequence[bytes]) -> None:
        path, size_bytes = folder / f"{self._stem}-{new.version}-delta.weights", sum(map(len, pieces))
        try:
            file_map = new_slot(path, size_bytes)
        except OSError as error:
            log.warning("version %d has no delta, others fetch it whole: %s: %s", new.version, folder, error.strerror)
            self._unlink(len(self._files))  # the other writers' chains go on
            return
        for piece in pieces:
            file_map.write(piece)
        delta = PublishedDelta(
            version=new.version,
            checksum=new.checksum,
            base=base.version,
            base_checksum=base.checksum,
            path=str(path),
            size_bytes=size_bytes,
            digest=digest_of(pieces),
        )
        self._files.append((delta, path, file_map, path.stat().st_ino))
        while sum(delta.size_bytes for delta, *_ in self._files) > MOST_OF_WHOLE * len(new.payload):
            self._unlink(1)

    def _unlink(self, count: int) -> None:
        """Remove the oldest files, but not a successor's."""
        for _, path, _, inode in self._files[:count]:
            with suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
        del self._files[:count]

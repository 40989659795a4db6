"""Versions as what has changed since another: writes and reads the files, and applies them, verified. Torch-free.

A delta's file has a magic number, a head (JSON), the table of the new version's checksum, and sections: runs of the
table's blocks of about 16 MiB, each encoded by `delta_codec`. A version is its root, and so is a delta's base: a reader
that has the base's bytes writes the changes over them, hashes *all* of its bytes, and compares the table with the root
that was announced. A wrong base, a delta that is lost, doubled, cut or of another run, a flipped bit on either side:
none of them can give the table, and the reader takes the whole version then. Deltas one after another are checked once,
at the end.

The base of a delta is always what the publisher has in memory; whether readers have it is for them to find.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedDelta, PublishedWeights
from headway.weights.checksums import BLOCK_BYTES, Block, differing_block, hash_blocks, root_of
from headway.weights.delta_codec import WORDS, Overwrites, decode, encode
from headway.weights.manifest import PayloadManifest

MOST_OF_WHOLE = 0.4  # of a version's bytes, that deltas may have in its place
_MAGIC = b"HEADWAYD"
_HEAD = struct.Struct("<8sQQ")  # magic, bytes of head and table
_MOST_THREADS = 4


class PayloadSection(NamedTuple):
    """Consecutive blocks of the table, of tensors with elements of one size, as one array of words."""

    first: int  # byte of the payload
    last: int  # the byte after the section
    word_bytes: int

    def words(self, payload: np.ndarray) -> np.ndarray:
        """The section's words in a payload, [words] of a type in `WORDS`."""
        return payload[self.first : self.last].view(WORDS[self.word_bytes])


class _Head(msgspec.Struct, frozen=True):
    version: int
    base: int
    base_checksum: str
    sections: tuple[tuple[PayloadSection, int], ...]  # each with its encoded bytes


def sections_of(manifest: PayloadManifest, blocks: Sequence[Block]) -> list[PayloadSection]:
    """Divide blocks, in the order of their rows, into sections."""
    sections, last_row = list[PayloadSection](), -1
    for block in blocks:
        word_bytes, previous = manifest.word_bytes(block.tensor), sections[-1] if sections else PayloadSection(0, 0, 0)
        fits = block.last - previous.first <= BLOCK_BYTES and word_bytes == previous.word_bytes
        if fits and block.row == last_row + 1:
            sections[-1] = PayloadSection(previous.first, block.last, word_bytes)
        else:
            sections.append(PayloadSection(block.first, block.last, word_bytes))
        last_row = block.row
    return sections


def encode_sections(base: np.ndarray, new: np.ndarray, sections: Sequence[PayloadSection]) -> list[bytes] | None:
    """Encode the sections' changes between two payloads ([bytes] uint8) in threads; None as soon as they take more than
    `MOST_OF_WHOLE`, and more than 64 KiB: small sections may, among others."""
    limit_bytes = (64 << 10) + MOST_OF_WHOLE * sum(section.last - section.first for section in sections)
    encoded_sections, encoded_bytes = list[bytes](), 0
    with ThreadPoolExecutor(_threads()) as pool:
        for content in pool.map(lambda section: encode(section.words(base), section.words(new)), sections):
            encoded_sections.append(content)
            encoded_bytes += len(content)
            if encoded_bytes > limit_bytes:
                pool.shutdown(cancel_futures=True)
                return None
    return encoded_sections


def file_of(
    version: int, base: int, base_checksum: str, table: np.ndarray, encoded: Sequence[tuple[PayloadSection, bytes]]
) -> list[bytes]:
    """Make the content of a delta's file, in pieces. ``table``: of ``version``; ``encoded``: all sections."""
    head = _Head(version, base, base_checksum, tuple((section, len(content)) for section, content in encoded))
    head_json, table_bytes = msgspec.json.encode(head), table.astype("<u8").tobytes()
    contents = (content for _, content in encoded)
    return [_HEAD.pack(_MAGIC, len(head_json), len(table_bytes)), head_json, table_bytes, *contents]


def digest_of(pieces: Sequence[bytes | memoryview]) -> str:
    """The digest of a delta's file."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def chain_to(published: PublishedWeights, version: int, checksum: str) -> list[PublishedDelta]:
    """The deltas, in order, that lead to ``published`` from the version that a reader has; none where they don't, or
    take more than `MOST_OF_WHOLE`."""
    by_version = {delta.version: delta for delta in published.deltas}
    chain, reached = list[PublishedDelta](), (published.version, published.checksum)
    while reached != (version, checksum):
        delta = by_version.pop(reached[0], None)  # each once: a chain has no rings
        if delta is None or delta.checksum != reached[1]:
            return []
        chain.append(delta)
        reached = delta.base, delta.base_checksum
    fits = sum(delta.size_bytes for delta in chain) <= MOST_OF_WHOLE * published.size_bytes
    return chain[::-1] if fits else []


def delta_in(content: bytes, path: str, checksum: str) -> PublishedDelta:
    """Describe the delta in a file's ``content`` as leading to the version of ``checksum``. Raises WeightsCorrupt."""
    head, _, _ = _read_head(memoryview(content), path)
    fields = {"version": head.version, "base": head.base, "base_checksum": head.base_checksum, "path": path}
    return PublishedDelta(checksum=checksum, size_bytes=len(content), digest=digest_of([content]), **fields)


def _read_head(content: memoryview, name: str) -> tuple[_Head, int, int]:
    """The head of a delta's file, and the first bytes of its table and of its sections. Raises WeightsCorrupt."""
    magic, head_bytes, table_bytes = _HEAD.unpack_from(content) if len(content) >= _HEAD.size else (b"", 0, 0)
    if magic != _MAGIC or table_bytes % 8:
        raise WeightsCorrupt(f"{name} isn't a delta of this version of headway")
    table_start = _HEAD.size + head_bytes
    try:
        head = msgspec.json.decode(content[_HEAD.size : table_start], type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsCorrupt(f"{name} has no head: {error}") from None
    return head, table_start, table_start + table_bytes


class DeltaContent:
    """The content of a delta's file, which is the one that was announced."""

    def __init__(self, delta: PublishedDelta, content: bytes | memoryview) -> None:
        """Raises WeightsCorrupt for another content, or one that isn't of this version and base."""
        self._content, name = memoryview(content), f"{delta.path}: the delta of version {delta.version}"
        if len(content) != delta.size_bytes or digest_of([content]) != delta.digest:
            raise WeightsCorrupt(f"{name} doesn't have {delta.size_bytes} bytes with the digest {delta.digest}")
        self.delta = delta
        self._head, self._table_start, self._start = _read_head(self._content, name)
        if (self._head.version, self._head.base) != (delta.version, delta.base):
            raise WeightsCorrupt(f"{name} is that of version {self._head.version} from {self._head.base}")

    @property
    def table(self) -> np.ndarray:
        """The table of the version that it leads to."""
        return np.frombuffer(self._content[self._table_start : self._start], "<u8")

    def overwrites(self, payload: np.ndarray) -> Iterator[tuple[PayloadSection, Overwrites]]:
        """Decode the sections in threads against the base's ``payload`` ([bytes] uint8). Raises WeightsCorrupt."""

        def decode_section(index: int) -> tuple[PayloadSection, Overwrites]:
            section, _ = self._head.sections[index]
            is_within = 0 <= section.first <= section.last <= len(payload)
            if section.word_bytes not in WORDS or not is_within or (section.last - section.first) % section.word_bytes:
                raise WeightsCorrupt(f"a delta has a section {section} of a payload of {len(payload)} bytes")
            return section, decode(self._content[slice(*bounds[index])], section.words(payload))

        bounds = list(pairwise(accumulate((size for _, size in self._head.sections), initial=self._start)))
        with ThreadPoolExecutor(_threads()) as pool:
            yield from pool.map(decode_section, range(len(bounds)))


def apply_deltas(payload: np.ndarray, contents: Sequence[DeltaContent]) -> Iterator[tuple[PayloadSection, Overwrites]]:
    """Make ``payload`` ([bytes] uint8), which has the first one's base, the last one's version; yields what has been
    written. It isn't verified. Raises WeightsCorrupt, with the payload of no version."""
    for content in contents:
        for section, overwrites in content.overwrites(payload):
            section.words(payload)[overwrites.positions] = overwrites.values
            yield section, overwrites


def require_version(published: PublishedWeights, manifest: bytes, table: np.ndarray, payload: np.ndarray) -> None:
    """Raise WeightsCorrupt, which names tensor and block, unless ``payload`` has the bytes of ``published``; ``table``:
    that of its delta."""
    if root_of(published.version, manifest, table) != published.checksum:
        raise WeightsCorrupt(f"version {published.version}: its delta's table does not have {published.checksum}")
    decoded_manifest = msgspec.json.decode(manifest, type=PayloadManifest)
    blocks = decoded_manifest.blocks()
    hashes, _ = hash_blocks(payload, blocks)
    if (block := differing_block(hashes, table, blocks)) is not None:
        name = decoded_manifest.tensors[block.tensor].name
        raise WeightsCorrupt(f"version {published.version} from its deltas: {name} differs, in block {block.row}")


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))

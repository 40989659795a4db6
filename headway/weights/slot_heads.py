"""Reads the head of a slot, verified, and words what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.checksums import root_of
from headway.weights.layout import Layout
from headway.weights.slot_file import HEADER, MAGIC, UNWRITTEN, table_start

Read = Callable[[int, int], bytes]  # of a file: from the first byte to before the last


def read_head(read: Read, published: PublishedWeights) -> tuple[Layout, np.ndarray]:
    """Read layout and table of a slot, which are those of the announced checksum. Raises WeightsCorrupt."""
    if len(header := read(0, HEADER.size)) < HEADER.size:
        raise WeightsCorrupt(f"{published.path}: too short for a header")
    magic, version, _, manifest_size, table_size, payload_size = HEADER.unpack(header)
    if magic != MAGIC:
        raise WeightsCorrupt(f"{published.path}: not a weights file")
    if version != published.version:
        raise WeightsCorrupt(wrong_version(published, version))
    if payload_size != published.size_bytes:
        raise WeightsCorrupt(f"{published.path}: {payload_size} bytes where {published.size_bytes} were announced")
    manifest = read(HEADER.size, HEADER.size + manifest_size)
    table_offset = table_start(manifest_size)
    table = np.frombuffer(read(table_offset, table_offset + table_size // 8 * 8), np.uint64)
    if root_of(version, manifest, table) != published.checksum:
        raise WeightsCorrupt(other_checksum(published, ""))
    return Layout.read(manifest, payload_size), table


def gone(published: PublishedWeights, error: OSError) -> str:
    """The message of a version whose file can't be read."""
    return f"{published.path}: version {published.version} is gone: {error.strerror}"


def other_checksum(published: PublishedWeights, detail: str) -> str:
    """The message of a version with other bytes than were announced."""
    return f"{published.path}: version {published.version} does not have checksum {published.checksum}{detail}"


def wrong_version(published: PublishedWeights, actual: int) -> str:
    """The message of a slot that has another version."""
    state_text = "is being overwritten" if actual == UNWRITTEN else f"holds version {actual}"
    return f"{published.path}: version {published.version} was announced, but the slot {state_text}"

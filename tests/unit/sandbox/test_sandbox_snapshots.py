"""A sandbox's files as a tar and back: limits, holes, a tar that was damaged."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from headway.records.sandbox import MIB
from headway.sandbox.guest import snapshots
from headway.sandbox.guest.snapshots import BLOCK


def packed(folder: Path, most: int = 64 * MIB) -> bytes:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return b"".join(snapshots.pack([("", descriptor)], most))
    finally:
        os.close(descriptor)


def test_snapshot_preserves_holes(tmp_path: Path):
    upper, back = tmp_path / "upper", tmp_path / "back"
    upper.mkdir()
    back.mkdir()
    with open(upper / "hole", "wb") as file:
        os.truncate(file.fileno(), 20 * MIB + 5)
    with open(upper / "mixed", "wb") as file:
        for page in range(0, 1000, 2):
            file.seek(page * 4096)
            file.write(b"%d" % page)
        file.write(bytes(5000))
    snapshots.unpack(io.BytesIO(packed(upper)), str(back))
    for name in ("hole", "mixed"):
        assert (back / name).read_bytes() == (upper / name).read_bytes()
    assert (back / "hole").stat().st_blocks == 0
    assert (back / "mixed").stat().st_blocks <= (upper / "mixed").stat().st_blocks


def test_snapshot_limit_counts_all_bytes(tmp_path: Path):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_bytes(b"x" * 700)
    size = len(packed(upper))
    assert size == 3 * BLOCK + 2 * BLOCK
    assert len(packed(upper, size)) == size
    with pytest.raises(OSError, match="more than 2559 bytes"):
        packed(upper, size - 1)

"""Attributes of files in snapshots: kept, or said to be left out; never lost in silence."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from headway.records.sandbox import MIB
from headway.sandbox.guest import snapshots

ATTRIBUTES = {
    "a text": {"user.note": b"kept"},
    "bytes": {"user.raw": bytes(range(256))},
    "an empty one": {"user.empty": b""},
    "two": {"user.a": b"1", "user.b": b"2"},
    "lines and signs": {"user.x": b"a=b\n c\n"},
    "a name of other letters": {"user.é": "é".encode()},
}


def moved(upper: Path, back: Path) -> None:
    descriptor = os.open(upper, os.O_RDONLY)
    try:
        tar = b"".join(snapshots.pack([("", descriptor)], 64 * MIB))
    finally:
        os.close(descriptor)
    back.mkdir()
    snapshots.unpack(io.BytesIO(tar), str(back))


@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_attributes_of_files_are_kept_or_said(kind: str, attributes: dict[str, bytes], tmp_path: Path) -> None:
    place, back = tmp_path / "upper" / "x", tmp_path / "back"
    (tmp_path / "upper").mkdir()
    place.mkdir() if kind == "folder" else place.write_text("content")
    try:
        for name, value in attributes.items():
            os.setxattr(place, name, value)
    except OSError:
        pytest.skip("this file system has no attributes of users")
    try:
        moved(tmp_path / "upper", back)
    except OSError as error:
        if "attribute" in str(error):
            return
        raise
    found = {name: os.getxattr(back / "x", name) for name in os.listxattr(back / "x")}
    assert found == attributes


def test_files_without_attributes_have_none(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "x").write_text("content")
    moved(tmp_path / "upper", tmp_path / "back")
    assert (tmp_path / "back" / "x").read_text() == "content"
    assert os.listxattr(tmp_path / "back" / "x") == []

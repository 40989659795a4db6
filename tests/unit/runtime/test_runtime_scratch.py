"""Scratch folders: what a killed process left is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.runtime import scratch
from headway.runtime.scratch import ScratchFolder, remove_unlocked


def test_making_a_folder_removes_those_of_its_name_that_nobody_has_locked(tmp_path: Path) -> None:
    prefix = "a[b]*-"  # no pattern
    left, others = [f"{prefix}killed_8.part"], [f"{prefix}killed_8", "ab-killed_8.part"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with ScratchFolder(prefix, ".part", tmp_path) as one, ScratchFolder(prefix, ".part", tmp_path) as other:
        assert sorted(os.listdir(tmp_path)) == sorted([*others, one.name, other.name])
        (one / "inner").mkdir()
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    folder = ScratchFolder("x-", directory=tmp_path)
    folder.remove()
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_files_and_folders_of_other_users_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x-file").touch()
    (tmp_path / "x-link").symlink_to(tmp_path / "x-file")
    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
        assert remove_unlocked(tmp_path, "x-*") == []
    assert remove_unlocked(tmp_path, "x-*") == [tmp_path / "x-file"]
    assert os.listdir(tmp_path) == ["x-link"]


def test_files_and_folders_that_tempfile_did_not_name_stay(tmp_path: Path) -> None:
    (tmp_path / "x-abcdefgh").touch()  # a file
    (tmp_path / "x-mine").mkdir()
    (tmp_path / "x-abcd_123").mkdir()
    with ScratchFolder("x-", directory=tmp_path) as folder:
        assert sorted(os.listdir(tmp_path)) == sorted(["x-abcdefgh", "x-mine", folder.name])


@pytest.mark.timeout(10)
def test_a_fifo_of_such_a_name_neither_blocks_nor_goes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x-abcdefgh")
    assert remove_unlocked(tmp_path, "x-*") == []
    ScratchFolder("x-", directory=tmp_path).remove()
    assert os.listdir(tmp_path) == ["x-abcdefgh"]

"""A run's snapshots on disk: whole or not at all, never more than their limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from headway.orchestrator.parking import Parking
from headway.records.environment import EnvironmentState, NextTurn, PartialRollout, SavedEpisode
from headway.records.errors import ConfigurationError
from headway.records.generation import PartialResponse
from headway.records.sandbox import SandboxError, Snapshot
from headway.sandbox.snapshot_store import (
    LOCK,
    IncomingSnapshot,
    SnapshotFolder,
    drop,
    dropped_snapshots,
    note_hosted,
    open_snapshot,
    remove_others,
)


def put(folder: SnapshotFolder, name: str, size: int) -> Snapshot:
    async def main() -> Snapshot:
        async with folder.incoming(name, "sb-1") as one:
            for _ in range(size // 100):
                await one.append(bytes(100))
            return await one.keep()

    return asyncio.run(main())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_one_that_doesnt_fit_isnt_kept_and_takes_nothing(tmp_path: Path):
    folder = SnapshotFolder(tmp_path / "snapshots", 1000)
    put(folder, "a", 400)
    with pytest.raises(SandboxError, match=r"1000 bytes, half of what was free; free space in") as raised:
        put(folder, "b", 700)
    assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", False)
    assert names(tmp_path / "snapshots") == ["a.tar"]
    put(folder, "b", 600)
    with pytest.raises(SandboxError):
        put(folder, "c", 100)


def test_those_on_their_way_count_and_what_is_given_up_doesnt(tmp_path: Path):
    async def main():
        folder = SnapshotFolder(tmp_path, 1000)
        async with folder.incoming("a", "sb-1") as a:
            await a.append(bytes(600))
            async with folder.incoming("b", "sb-2") as b:
                await b.append(bytes(600))
                with pytest.raises(SandboxError):
                    await b.keep()
            async with folder.incoming("c", "sb-3") as c:
                await c.append(bytes(300))
            async with folder.incoming("d", "sb-4") as d:
                await d.append(bytes(400))
                await d.keep()
            assert (await a.keep()).bytes == 600

    asyncio.run(main())
    assert names(tmp_path) == ["a.tar", "d.tar"]


def test_one_of_the_same_name_takes_the_others_place(tmp_path: Path):
    folder = SnapshotFolder(tmp_path, 1000)
    put(folder, "a", 500)
    put(folder, "a", 400)
    put(folder, "b", 600)
    (tmp_path / "b.tar").unlink()  # by whoever resumed from it
    put(folder, "c", 600)


def test_a_full_disk_is_no_ones_fault_but_the_machines(tmp_path: Path):
    async def main():
        async with SnapshotFolder(tmp_path).incoming("a", "sb-1") as one:
            one._file.close()  # type: ignore[union-attr]
            one._file = Path("/dev/full").open("wb")  # noqa: ASYNC230, SIM115  closed as its own would be
            await one.append(bytes(1 << 20))
            await one.append(bytes(1 << 20))
            with pytest.raises(SandboxError, match="No space left") as raised:
                await one.keep()
        assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", True)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cant_be_made_is_the_machines_fault_too(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="a snapshot can't be written"):
        put(SnapshotFolder(tmp_path / "file" / "snapshots"), "a", 100)


def test_names_that_are_none_are_refused(tmp_path: Path):
    for name in ("../a", "", ".a", "a/b", "a" * 200, "a\0"):
        with pytest.raises(ConfigurationError, match="plain file name"):
            SnapshotFolder(tmp_path / "snapshots").incoming(name, "sb-1")


def test_what_nothing_names_any_more_is_removed(tmp_path: Path):
    folder = SnapshotFolder(tmp_path)
    for name in ("a", "b.1", "c"):
        put(folder, name, 100)
    (tmp_path / ".d.sb-9.incoming").write_bytes(b"cut off")
    (tmp_path / "notes.txt").write_bytes(b"somebody's")
    assert remove_others(tmp_path, {"b.1.tar", "gone.tar"}) == ["a.tar", "c.tar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.1.tar", "notes.txt"]
    assert remove_others(tmp_path / "none", set()) == []


def parked(member: int, path: str) -> PartialRollout:
    state = EnvironmentState(snapshot=Snapshot(path=path, bytes=0, sha256=""))
    saved = SavedEpisode(exchanges=(), asked=NextTurn(messages=()), environment=state)
    return PartialRollout(group=1, member=member, response=PartialResponse(), resumes=0, episode=saved)


def test_what_parked_rollouts_dont_go_on_from_is_dropped_wherever_it_is_kept(tmp_path: Path):
    folder = SnapshotFolder(tmp_path)
    for name in ("a", "b", "c"):
        put(folder, name, 100)
    for name in ("e2b:team/a:1.5", "e2b:b", "e2b:c.1"):
        note_hosted(tmp_path, name)
    parking = Parking(cast(Any, None), cast(Any, None), cast(Any, None), tmp_path)
    parking.reopen([parked(0, "a.tar"), parked(1, "e2b:team/a:1.5"), parked(2, "b.tar"), parked(3, "e2b:b")])
    assert [name for name in names(tmp_path) if name.endswith(".tar")] == ["a.tar", "b.tar"]
    assert [name for name, _ in dropped_snapshots(tmp_path)] == ["e2b:c.1"]
    parking._name_snapshot(parked(3, "e2b:d"))
    assert {name for name, _ in dropped_snapshots(tmp_path)} == {"e2b:c.1", "e2b:b"}
    parking.forget(1)
    assert list(tmp_path.glob("*.tar")) == []
    assert {name for name, _ in dropped_snapshots(tmp_path)} == {"e2b:c.1", "e2b:b", "e2b:team/a:1.5"}
    for _, mark in dropped_snapshots(tmp_path):
        mark.unlink()
    assert names(tmp_path) == []


def test_a_file_is_dropped_by_its_path_too(tmp_path: Path):
    folder = tmp_path / "run:1"
    kept = put(SnapshotFolder(folder), "a", 100)
    drop(folder, kept.path)
    drop(folder, kept.path)
    assert names(folder) == []


def test_the_snapshots_of_other_workers_count(tmp_path: Path):
    async def main():
        one, other = SnapshotFolder(tmp_path, 1000), SnapshotFolder(tmp_path, 1000)
        async with one.incoming("a", "sb-1") as a:
            await a.append(bytes(100))
            async with other.incoming("b", "sb-2") as b:
                await b.append(bytes(600))
                await b.keep()
            async with one.incoming("c", "sb-3") as c:
                await c.append(bytes(600))
                with pytest.raises(SandboxError):
                    await c.keep()
            (tmp_path / "b.tar").unlink()  # it goes on
            async with one.incoming("d", "sb-4") as d:
                await d.append(bytes(600))
                await d.keep()
            await a.keep()

    asyncio.run(main())


def test_those_of_other_workers_that_came_meanwhile_count_too(tmp_path: Path):
    async def main():
        one, other = SnapshotFolder(tmp_path, 1000), SnapshotFolder(tmp_path, 1000)
        async with one.incoming("a", "sb-1") as a, other.incoming("b", "sb-2") as b:
            await a.append(bytes(600))
            await b.append(bytes(600))
            await a.keep()
            with pytest.raises(SandboxError, match=r"1000 bytes, half of what was free; free space in"):
                await b.keep()

    asyncio.run(main())
    assert names(tmp_path) == ["a.tar"]


def test_of_a_snapshot_whose_taker_is_cancelled_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """... wherever it is: the disk's threads are waited for, and nothing is written to what is closed."""

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any) -> Any:
            time.sleep(0.01)  # in a thread: the disk's time
            return work(*given)

        return slow

    for name in ("_begin", "_write", "_commit", "_end"):
        monkeypatch.setattr(IncomingSnapshot, name, slowly(getattr(IncomingSnapshot, name)))

    async def main():
        folder = SnapshotFolder(tmp_path)
        for turn in range(12):

            async def take() -> None:
                async with folder.incoming("a", "sb-1") as one:
                    await one.append(bytes(1000))
                    await one.keep()

            taking = asyncio.create_task(take())
            await asyncio.sleep(turn * 0.003)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert names(tmp_path) in ([], ["a.tar"])
            assert not folder._open

    asyncio.run(main())


def test_a_slow_disk_is_waited_for_without_holding_up_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: done.wait(20))

    async def main():
        async with SnapshotFolder(tmp_path).incoming("a", "sb-1") as one:
            await one.append(bytes(1000))
            keeping = asyncio.create_task(one.keep())
            await asyncio.sleep(0.02)  # the disk's time
            assert not keeping.done(), "this goes on meanwhile"
            done.set()
            await keeping

    asyncio.run(main())


def test_a_damaged_snapshot_is_told(tmp_path: Path):
    async def look(snapshot: Snapshot) -> bytes:
        with contextlib.ExitStack() as until:
            return os.read(await open_snapshot(snapshot, until), 1000)

    taken = put(SnapshotFolder(tmp_path), "a", 500)
    assert asyncio.run(look(taken)) == bytes(500)
    path = Path(taken.path)
    for damaged in (bytes(400), bytes(499) + b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(SandboxError, match="has changed since it was taken") as raised:
            asyncio.run(look(taken))
        assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", False)
    path.unlink()
    with pytest.raises(SandboxError, match="No such file"):
        asyncio.run(look(taken))


def test_what_a_dead_process_left_half_takes_no_room(tmp_path: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f".a.sb-1.{ended.pid}.incoming").write_bytes(bytes(900))
    put(SnapshotFolder(tmp_path, 1000), "b", 500)
    (tmp_path / f".c.sb-2.{os.getppid()}.incoming").write_bytes(bytes(400))
    with pytest.raises(SandboxError, match="no space for another snapshot"):
        put(SnapshotFolder(tmp_path, 1000), "d", 200)


def test_one_whose_end_is_cancelled_after_it_was_kept_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody will ever know its name."""
    going, go_on = threading.Event(), threading.Event()
    end = IncomingSnapshot._end

    def slowly(one: IncomingSnapshot) -> None:
        going.set()
        go_on.wait(10)
        end(one)

    async def take(folder: SnapshotFolder) -> None:
        async with folder.incoming("a", "sb-1") as one:
            await one.append(bytes(100))
            await one.keep()
            monkeypatch.setattr(IncomingSnapshot, "_end", slowly)

    async def main() -> None:
        taking = asyncio.create_task(take(SnapshotFolder(tmp_path, 1000)))
        await asyncio.to_thread(going.wait, 10)
        taking.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert names(tmp_path) == []

    asyncio.run(main())

"""Payloads in shared memory: segments are used again, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.flow.paths import PeerAddress
from headway.flow.payloads import PayloadStore
from headway.flow.segments import PayloadReleased, Segment, WorkflowFolder
from headway.records.errors import ConfigurationError
from headway.runtime.transport.packing import Packed, pack

ADDRESS = PeerAddress(name="a", incarnation="1", machine="here", unix="")
MESSAGE = np.arange(1 << 18)


def left_in(folder: Path) -> list[str]:
    return list(map(str, folder.iterdir()))


def test_a_cancelled_hold_gives_its_segment_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        copying, going_on = threading.Event(), threading.Event()
        write = Segment.write

        def slow_write(segment: Segment, number: int, packed: Packed, **options: Any) -> None:
            copying.set()
            going_on.wait(10)
            write(segment, number, packed, **options)

        payloads = PayloadStore(ADDRESS, tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(Segment, "write", slow_write)
            holding = asyncio.ensure_future(payloads.hold(MESSAGE, ""))
            await asyncio.to_thread(copying.wait, 10)
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding
            going_on.set()
            await asyncio.gather(*payloads._storing)
        ref = await payloads.hold(MESSAGE, "")
        assert left_in(tmp_path) == [ref.segment]
        found = payloads.read(ref)
        assert found is not None
        assert np.array_equal(found.load(), MESSAGE)
        await payloads.close()
        assert not left_in(tmp_path)

    asyncio.run(main())


def test_of_a_dead_process_only_what_others_may_fetch_is_left(tmp_path: Path):
    async def main() -> None:
        folder = WorkflowFolder(tmp_path / "headway-flow-x")
        payloads = PayloadStore(ADDRESS, folder.path)
        kept, released = [await payloads.hold(MESSAGE, "") for _ in range(2)]
        alone = await payloads.hold(MESSAGE, "", PeerAddress(name="b", incarnation="2", machine="here", unix=""))
        payloads.release(released.id)
        folder.forget(ADDRESS.incarnation)
        assert left_in(folder.path) == [kept.segment]
        for ref in (released, alone):
            with pytest.raises(PayloadReleased):
                payloads.read(ref)
        assert payloads.read(kept) is not None
        await payloads.close()
        folder.close()
        assert not folder.path.exists()

    asyncio.run(main())


def test_a_payload_takes_the_path_of_its_reader(tmp_path: Path):
    async def main() -> None:
        own = PeerAddress(name="a", incarnation="1", machine="here", unix="", device="x/cuda:1")
        payloads = PayloadStore(own, tmp_path)
        readers = {
            ("here", "cuda:1"): "cuda ipc",
            ("here", "x/cuda:1"): "cuda ipc",
            ("here", "cuda:0"): "shared memory",
            ("here", "cpu:0"): "shared memory",
            ("there", "cuda:1"): "link",
        }
        for (machine, device), path in readers.items():
            reader = PeerAddress(name="b", incarnation="2", machine=machine, unix="", device=device)
            for message in (MESSAGE[:10], MESSAGE):
                ref = await payloads.hold(message, "", reader)
                assert (ref.path, bool(ref.segment)) == (path, machine == "here" and message is MESSAGE)
                found = payloads.read(ref)
                assert found is not None
                assert np.array_equal(found.load(), message)
        assert (await payloads.hold(MESSAGE, "")).path == "shared memory"
        await payloads.close()

    asyncio.run(main())


def test_a_small_payload_is_its_references_own(tmp_path: Path):
    """What a channel keeps of many small items holds no memory that they came in."""

    async def main() -> None:
        payloads = PayloadStore(ADDRESS, tmp_path)
        message = np.arange(5000)
        ref = await payloads.hold(message, "")
        message[:] = 0
        assert not pack(ref).buffers
        mine, other = payloads.read(ref), payloads.read(pack(ref).load())
        assert mine is not None
        assert other is not None
        mine.load()[:] = 0
        assert np.array_equal(other.load(), np.arange(5000))
        assert not left_in(tmp_path)

    asyncio.run(main())


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path):
    open_to_all = tmp_path / "headway-flow-y"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(ConfigurationError, match="headway-flow-y is open to other users"):
        WorkflowFolder(open_to_all)

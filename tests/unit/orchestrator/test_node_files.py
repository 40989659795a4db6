"""A model's files on their way to a node that stops answering."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.orchestrator.nodes.file_distribution import FilesLauncher
from headway.records.errors import WorkerDied
from headway.runtime.workers import WorkerSpec


class FakeNode:
    name, lost = "b", ""


class HangingWorker:
    """Answers every call but ``hangs``."""

    def __init__(self, hangs: str) -> None:
        self.hangs, self.stopped = hangs, False

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if method == self.hangs:
            if timeout_s is None:
                await asyncio.Event().wait()
            raise TimeoutError(f"files-b.{method} gave no result in {timeout_s} s")
        return None

    async def stop(self, grace_s: float = 5.0) -> None:
        self.stopped = True


@pytest.mark.parametrize("method", ["digests", "copy_of", "begin", "store", "finish"])
def test_start_on_a_node_whose_disk_hangs_fails_as_a_death_of_the_worker(method: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    worker = HangingWorker(method)

    async def found(*_: Any) -> Any:
        return worker

    async def main() -> None:
        nodes: Any = SimpleNamespace(await_host=found, start=found, joined={"b": FakeNode()})
        launcher = FilesLauncher(nodes, {"model.path": str(tmp_path)})
        with pytest.raises(WorkerDied, match=rf"on node b: files-b\.{method} gave no result in 600.0 s"):
            async with asyncio.timeout(5.0):
                await launcher.start(WorkerSpec(name="generator-0", factory="", device="b/cpu:0"))
        assert worker.stopped

    asyncio.run(main())

"""Folders that workers on nodes read by path: compared with the orchestrator's, sent where they are missing."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from node_processes import Events, joined_nodes, start_agent
from worker_processes import run, spec

from headway.orchestrator.nodes.file_distribution import FilesLauncher
from headway.records.errors import ConfigurationError
from headway.runtime.nodes.files import file_digests

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


def write_model(folder: Path, megabytes: int = 3) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "empty").touch()
    header = json.dumps({"w": {"dtype": "U8", "shape": [megabytes << 20], "data_offsets": [0, megabytes << 20]}})
    data = np.random.default_rng(1).integers(0, 256, megabytes << 20, dtype=np.uint8)
    content = len(header).to_bytes(8, "little") + header.encode() + data.tobytes()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@asynccontextmanager
async def launched(tmp_path: Path, model: Path, times: int = 1) -> AsyncIterator[tuple[list[FilesLauncher], Events]]:
    async with joined_nodes(tmp_path, "b") as (nodes, events, _):
        cache = str(tmp_path / "cache")
        yield [FilesLauncher(nodes, {"model.path": str(model)}, events, cache=cache) for _ in range(times)], events


async def seen_path(launcher: FilesLauncher, model: Path, device: str = "b/cpu:0") -> str:
    """The path that a worker gets for ``model``."""
    worker = await launcher.start(spec(device=device, arguments={"greeting": str(model)}))
    path = (await worker.call("seen"))["greeting"]
    await worker.stop()
    return path


def test_a_folder_that_both_have_stays_where_it_is(tmp_path: Path):
    async def main() -> None:
        model = write_model(tmp_path / "model")
        async with launched(tmp_path, model) as ((launcher,), events):
            assert await seen_path(launcher, model) == str(model)
            assert await seen_path(launcher, model, "cpu:0") == str(model)  # here
            assert not events.of("files_sent")

    run(main)


def test_a_missing_folder_is_sent_once_and_workers_get_the_copys_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model(tmp_path / "model")
    monkeypatch.setattr("headway.runtime.nodes.files.PART_BYTES", 1 << 20)
    missing_on_nodes(monkeypatch)

    async def main() -> None:
        async with launched(tmp_path, model, times=2) as (launchers, events):
            copies = [await seen_path(launcher, model) for launcher in (*launchers, launchers[0])]
            assert len(set(copies)) == 1
            assert Path(copies[0]).parent == tmp_path / "cache"
            assert file_digests(Path(copies[0]), deep=True) == file_digests(model, deep=True)
            assert len(events.of("files_sent")) == 1
            assert [path.name for path in (tmp_path / "cache").iterdir()] == [Path(copies[0]).name]

    run(main)


def test_a_full_disk_on_a_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model(tmp_path / "model")
    missing_on_nodes(monkeypatch)

    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, _, _):
            launcher = FilesLauncher(nodes, {"model.path": str(model)}, cache="/dev/full")
            with pytest.raises(ConfigurationError, match=r"model\.path .* is missing on node b and can't be sent"):
                await seen_path(launcher, model)

    run(main)


def test_another_model_on_a_node_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, other = write_model(tmp_path / "model"), tmp_path / "other"
    shutil.copytree(model, other)
    change(other / "model.safetensors", 100)
    elsewhere_on_nodes(monkeypatch, other)

    async def main() -> None:
        async with launched(tmp_path, model) as ((launcher,), _):
            for _ in range(2):  # a second attempt looks again
                with pytest.raises(ConfigurationError, match=r"on node b differs from here: model\.safetensors"):
                    await seen_path(launcher, model)
            shutil.copy(model / "model.safetensors", other / "model.safetensors")
            (other / "config.json").unlink()
            with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
                await seen_path(launcher, model)

    run(main)


@pytest.mark.parametrize(("at", "deep"), [(50, False), (-1, False), (1_200_000, True)])
def test_changed_bytes_are_found(tmp_path: Path, at: int, deep: bool):
    model = write_model(tmp_path / "model")
    before = file_digests(model, deep=deep)
    change(model / "model.safetensors", at)
    assert file_digests(model, deep=deep) != before


def missing_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of this test share its disk: they look for the folder where none is."""
    elsewhere_on_nodes(monkeypatch, Path("/nonexistent"))


def elsewhere_on_nodes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(
        "headway.orchestrator.nodes.file_distribution._FACTORY", "runtime_worker_classes:ElsewhereFiles"
    )
    monkeypatch.setenv("HEADWAY_TEST_ELSEWHERE", str(folder))


def test_a_worker_that_waits_for_its_node_gets_the_copys_path_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model(tmp_path / "model")
    missing_on_nodes(monkeypatch)

    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, events, agents):
            launcher = FilesLauncher(nodes, {"model.path": str(model)}, events, cache=str(tmp_path / "cache"))
            asking = asyncio.create_task(seen_path(launcher, model))
            await asyncio.sleep(0)
            agents["b"] = start_agent(nodes.address, "b", log=tmp_path / "b.log")
            assert Path(await asking).parent == tmp_path / "cache"

    run(main)

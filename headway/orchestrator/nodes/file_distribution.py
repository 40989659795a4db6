"""Makes files that workers on nodes read by path available there: compares them, or sends them once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.runtime.devices import split_node
from headway.runtime.nodes.files import file_digests, file_names, file_parts, folder_digest
from headway.runtime.nodes.nodes import Node, NodeLost, Nodes
from headway.runtime.workers import EventCallback, WorkerHandle, WorkerSpec

_DIGESTS_S = 600.0  # limit of each call: a model's samples from a slow file system
_FACTORY = "headway.runtime.nodes.files:FilesService"


class FilesLauncher:
    """Starts workers on nodes once their files are known to be there.

    Each node that a worker is to be started on is compared once after it has joined: a folder that it has must be the
    orchestrator's, file by file; one that it lacks is sent into its cache, and workers' arguments name the copy.
    """

    def __init__(
        self,
        nodes: Nodes,
        folders: Mapping[str, str],
        on_event: EventCallback = lambda name, detail, /, **fields: None,
        *,
        cache: str = "",
        deep: bool = False,
    ) -> None:
        """``folders``: that workers read, by the key of the experiment that names them. ``cache``: on the nodes.
        ``deep``: compare every byte, not samples."""
        self._nodes, self._on_event = nodes, on_event
        self._folders = {key: (folder, Path(folder).absolute()) for key, folder in folders.items()}
        self._cache, self._deep = cache, deep
        self._compared: dict[Node, asyncio.Task[dict[str, str]]] = {}
        self._sent: dict[str, str] = {}  # deep digest of a folder here, by its path

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """See :meth:`Launcher.start`. Raises ConfigurationError for files of a node that aren't this machine's."""
        node_name = split_node(spec.device)[0]
        if not node_name:
            return await self._nodes.start(spec)
        try:
            await self._nodes.await_host(node_name)  # it may be another machine when it comes back
        except NodeLost as loss:
            raise WorkerDied(spec.name, str(loss), "node") from None
        node = self._nodes.joined[node_name]
        if node not in self._compared or _failed(self._compared[node]):
            self._compared = {other: task for other, task in self._compared.items() if not other.lost}
            self._compared[node] = asyncio.create_task(self._compare(node.name), name=f"files of {node.name}")
        try:
            paths = await asyncio.shield(self._compared[node])
        except TimeoutError as timeout:  # a disk there hangs
            raise WorkerDied(spec.name, f"could not be started on node {node_name}: {timeout}") from None
        return await self._nodes.start(dataclasses.replace(spec, arguments=_with_node_paths(spec.arguments, paths)))

    async def _compare(self, node: str) -> dict[str, str]:
        """Locate the folders on ``node``, by their paths here."""
        worker_spec = WorkerSpec(
            name=f"files-{node}", factory=_FACTORY, arguments={"cache": self._cache}, device=f"{node}/cpu:all"
        )
        worker = await self._nodes.start(worker_spec)
        try:
            return {folder: await self._place(worker, node, key, path) for key, (folder, path) in self._folders.items()}
        finally:
            await worker.stop()

    async def _place(self, worker: WorkerHandle, node: str, key: str, folder: Path) -> str:
        remote = await worker.call("digests", str(folder), self._deep, timeout_s=_DIGESTS_S * (6 if self._deep else 1))
        if remote is None:
            return await self._send(worker, node, key, folder)
        local_digests = await asyncio.to_thread(file_digests, folder, deep=self._deep)
        if difference := _difference(local_digests, remote):
            raise ConfigurationError(
                f"{key} = {str(folder)!r} on node {node} differs from here: {difference}; copy the folder there, or "
                "remove it there so that it is sent"
            )
        return str(folder)

    async def _send(self, worker: WorkerHandle, node: str, key: str, folder: Path) -> str:
        """Send a folder into the node's cache, unless it is there."""
        if str(folder) not in self._sent:
            full_digests = await asyncio.to_thread(file_digests, folder, deep=True)
            if not full_digests:
                raise ConfigurationError(f"{key} = {str(folder)!r} holds no files, here and on node {node}")
            self._sent[str(folder)] = folder_digest(full_digests)
        digest = self._sent[str(folder)]
        if copy_path := await worker.call("copy_of", digest, timeout_s=_DIGESTS_S):
            return copy_path
        try:
            await worker.call("begin", digest, timeout_s=_DIGESTS_S)
            for file_name in await asyncio.to_thread(file_names, folder):
                async for part in file_parts(folder / file_name):
                    await worker.call("store", file_name, part, timeout_s=_DIGESTS_S)
            copy_path = await worker.call("finish", digest, timeout_s=_DIGESTS_S)
        except RemoteError as error:
            raise ConfigurationError(
                f"{key} = {str(folder)!r} is missing on node {node} and can't be sent there: {error.error}; free space "
                "in its cache (XDG_CACHE_HOME, default ~/.cache), or put the folder there under this path"
            ) from error
        self._on_event("files_sent", f"{key} to node {node}: {copy_path}", worker=node)
        return copy_path


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _difference(local: dict[str, str], remote: dict[str, str]) -> str:
    """How a folder there differs from the one here; empty: not at all. Files that only the node has don't matter."""
    for file, digest in local.items():
        if file not in remote:
            return f"{file} is missing"
        if remote[file] != digest:
            return f"{file} has {remote[file]}, here {digest}"
    return ""


def _with_node_paths(value: Any, places: Mapping[str, str]) -> Any:
    """Return the arguments with the paths that the folders have on a node."""
    if isinstance(value, str):
        return places.get(value, value)
    if isinstance(value, dict):
        return {key: _with_node_paths(inner, places) for key, inner in value.items()}
    return value

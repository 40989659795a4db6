"""A worker whose process has a `PeerNetwork` in its own thread, and what the tests of links between workers share."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.flow.paths import PeerAddress, PeerSettings
from headway.flow.peers import PeerNetwork
from headway.flow.segments import new_folder
from headway.runtime.child import WorkerContext
from headway.runtime.clock import RealClock
from headway.runtime.fork_server import TORCH_CODE
from headway.runtime.nodes.handshake import make_key
from headway.runtime.workers import LocalLauncher, WorkerHandle, WorkerSpec

KEY = make_key()


class Services:
    """What peers may call."""

    def __init__(self) -> None:
        self.network: PeerNetwork

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self, text: str) -> None:
        raise KeyError(text)

    async def relay(self, peer: str, value: Any) -> Any:
        return await self.network.call(peer, "echo", value)

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def digest(self, value: Any) -> str:
        return digest(value)


class FlowPeer:
    """A worker with a `PeerNetwork`."""

    def __init__(self, context: WorkerContext, driver: PeerAddress, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="network", daemon=True).start()
        services = Services()
        self.network = services.network = PeerNetwork(
            context.name, PeerSettings(**settings), driver=driver, services=services
        )
        self._run(self.network.start())
        self._kept: dict[str, Any] = {}

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def address(self) -> Any:
        return self.network.address

    def call_peer(self, peer: str, method: str, *args: Any) -> Any:
        return self._run(self.network.call(peer, method, *args))

    def keep(self, name: str, value: Any) -> None:
        self._kept[name] = value

    def make(self, name: str, seed: int, count: int, size: int) -> str:
        self._kept[name] = tensors(seed, count, size)
        return digest(self._kept[name])

    def make_array(self, name: str, size_bytes: int) -> None:
        self._kept[name] = np.ones(size_bytes, dtype=np.uint8)

    def take(self, peer: str) -> None:
        """Receive a message and read it."""
        read(self._run(self.network.recv(peer)))

    def read(self, value: Any) -> None:
        read(value)

    def drop(self, name: str) -> None:
        del self._kept[name]

    def give(self, name: str) -> Any:
        return self._kept[name]

    def send(self, peer: str, name: str, tag: str = "") -> None:
        self._run(self.network.send(peer, self._kept[name], tag))

    def recv(self, peer: str, name: str = "", tag: str = "") -> str:
        message = self._run(self.network.recv(peer, tag))
        if name:
            self._kept[name] = message
        return digest(message)

    def bounce(self, peer: str, rounds: int) -> None:
        """Receive messages and drop them, each answered."""
        for _ in range(rounds):
            self._run(self.network.recv(peer))
            self._run(self.network.send(peer, None))

    def hold(self, name: str) -> Any:
        return self._run(self.network.hold(self._kept[name]))

    def release(self, ref: Any) -> None:
        self.loop.call_soon_threadsafe(self.network.release, ref)

    def fetch(self, ref: Any) -> str:
        return digest(self._run(self.network.fetch(ref)))

    def segments(self) -> int:
        return len(list(Path(self.network.address.unix).parent.glob(f"{self.network.address.incarnation}*.segment")))

    def close(self) -> None:
        self._run(self.network.close())


SINK = np.zeros(100 << 20, np.uint8)


def read(value: Any) -> None:
    """Read every page of an array, or all of a message's tensors, as cheaply as can be: by copies to one place."""
    if isinstance(value, np.ndarray):
        value[::4096].sum()
        return
    for tensor in value.values():
        ctypes.memmove(SINK.ctypes.data, tensor.data_ptr(), tensor.nbytes)


def tensors(seed: int, count: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{index}": torch.randn(size, generator=generator) for index in range(count)}


def digest(value: Any) -> str:
    """The same for equal structures of tensors and arrays."""
    state = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key, child in part.items():
                state.update(repr(key).encode())
                add(child)
        elif isinstance(part, list | tuple):
            state.update(f"{type(part).__name__} {len(part)}".encode())
            for child in part:
                add(child)
        elif isinstance(part, torch.Tensor):
            state.update(f"{part.dtype} {tuple(part.shape)} {part.requires_grad}".encode())
            plain = part.detach().to_dense().resolve_conj().resolve_neg()
            plain = plain.clone(memory_format=torch.contiguous_format)
            state.update(plain.reshape(-1).view(torch.uint8).numpy())
        elif isinstance(part, np.ndarray):
            state.update(f"{part.dtype} {part.shape}".encode())
            state.update(part.tobytes())
        else:
            state.update(repr(part).encode())

    add(value)
    return state.hexdigest()


@asynccontextmanager
async def workflow(
    *names: str, driver: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[PeerNetwork, dict[str, WorkerHandle], Any]]:
    """A driver's network, workers with networks by name, and a function that starts one more. ``settings``: of
    every network."""
    common: dict[str, Any] = {"key": KEY, "folder": new_folder()} | settings
    own = common | (driver or {})
    callbacks = {name: own.pop(name) for name in ("on_path",) if name in own}
    services = Services()
    network = services.network = PeerNetwork("driver", PeerSettings(**own), driver=None, services=services, **callbacks)
    await network.start()
    launcher = LocalLauncher(RealClock())
    workers: dict[str, WorkerHandle] = {}

    async def start(name: str, **more: Any) -> WorkerHandle:
        arguments = common | {"driver": network.address} | more
        spec = WorkerSpec(name=name, factory="flow_peer:FlowPeer", arguments=arguments, preload=TORCH_CODE)
        workers[name] = await launcher.start(spec)
        return workers[name]

    try:
        await asyncio.gather(*(start(name) for name in names))
        yield network, workers, start
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers.values()))
        await network.close()

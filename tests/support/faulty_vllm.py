"""Replicas with faults: engines that compute with other weights or another rope, deaths in an adapter's update."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from headway.generator.service import GeneratorService
from headway.runtime.child import WorkerContext


class StaleHead(GeneratorService):
    """Tied heads are not packed again after an update."""

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        super().__init__(context, **settings)
        from headway.generator.engines.vllm import worker

        worker.repack_tied_heads = lambda model: None


class WrongRope(GeneratorService):
    """The engine's rotary frequencies are divided by 4, as a lost ``rope_scaling`` would do."""

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        from headway.models.decoder import Decoder

        right = Decoder.rope
        Decoder.rope = lambda model, positions_n: right(model, positions_n / 4)  # type: ignore[method-assign]
        super().__init__(context, **settings)


class StaleLayer(GeneratorService):
    """Updates don't reach a matrix of the torch engine's first layer."""

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        from headway.generator.engines.torch import slot_engine

        right = slot_engine.adopt_weights

        def stale(model: Any, tensors: dict[str, Any], changes: Any = None) -> bool:
            name = "layers.0.down_weight"
            return right(model, {**tensors, name: dict(model.named_parameters())[name].detach().clone()})

        slot_engine.adopt_weights = stale  # type: ignore[assignment]
        super().__init__(context, **settings)


class KilledWithAdapter(GeneratorService):
    """A process is killed once, in the middle of registering the version KILLED_AT of an adapter, or of unloading one.

    ``KILLED_AT``: POINT:PID:MARKER; the point is ``loaded``, ``unloading`` or ``unloaded``, a PID of 0 means this
    replica, else its process group; the marker is a file that is there once it has happened.
    """

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        from headway.generator.engines.vllm import engine, server_engine

        point, pid, marker = os.environ["KILLED_AT"].split(":")

        def strike(at: str) -> None:
            if at == point and not Path(marker).exists():
                Path(marker).touch()
                if pid == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                os.killpg(int(pid), signal.SIGKILL)

        for kind in (engine.VllmEngine, server_engine.VllmServerEngine):
            load, unload = kind._load_revision, kind._unload_revision

            def loading(self: Any, label: str, folder: Path, load: Any = load) -> Any:
                handle = load(self, label, folder)
                if self.version:
                    strike("loaded")
                return handle

            def unloading(self: Any, revision: Any, unload: Any = unload) -> None:
                if self.version:
                    strike("unloading")
                unload(self, revision)
                if self.version:
                    strike("unloaded")

            kind._load_revision, kind._unload_revision = loading, unloading  # type: ignore[method-assign]
        super().__init__(context, **settings)


class LostPictures(GeneratorService):
    """The engine of transformers' models computes prompts without their pictures."""

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        from headway.generator.engines.hf.engine import HfEngine

        HfEngine._pictures = lambda engine, entry: {}  # type: ignore[method-assign]
        super().__init__(context, **settings)


class KilledInUpdate(GeneratorService):
    """The server that this replica has started is killed just before a call of an update: before another one in each.

    ``KILLED_AT``: CALL,CALL,...:FOLDER; the calls are beginnings of paths, the folder gets a file for each kill.
    """

    def __init__(self, context: WorkerContext, **settings: Any) -> None:
        from headway.generator.engines.vllm.managed_server import ManagedServer
        from headway.generator.engines.vllm.server_engine import VllmServerEngine

        calls, _, folder = os.environ["KILLED_AT"].partition(":")
        post, update = ManagedServer.post, VllmServerEngine._apply_model
        updating = [False]

        def posting(self: ManagedServer, path: str, body: Any = None) -> Any:
            done = len(list(Path(folder).glob("killed-*")))
            points = calls.split(",")
            if (
                updating[0]
                and done < len(points)
                and path.startswith(points[done])
                and not path.endswith("/abort_requests")
            ):
                (Path(folder) / f"killed-{done}").touch()
                guard = self._guard.pid
                (server,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
                os.kill(int(server), signal.SIGKILL)
                self._guard.wait(10)
            return post(self, path, body)

        def applying(self: Any, published: Any, mode: Any) -> Any:
            # A successor catches up before its next version: it isn't killed again in the same one.
            updating[0] = published.version == len(list(Path(folder).glob("killed-*"))) + 1
            try:
                return update(self, published, mode)
            finally:
                updating[0] = False

        ManagedServer.post, VllmServerEngine._apply_model = posting, applying  # type: ignore[method-assign]
        super().__init__(context, **settings)

"""Stands in for the classes of Modal's SDK that the adapter uses, over local sandboxes. Every call is kept, and held
against the real classes' signatures where the package is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hosted_servers import Box, Cloud

from headway.records.sandbox import SandboxError


class ModalError(Exception):
    pass


class NotFoundError(ModalError):
    pass


class SandboxTerminatedError(ModalError):
    pass


class ResourceExhaustedError(ModalError):
    pass


class AuthError(ModalError):
    pass


class Modal(Cloud):
    """What its SDK shows of an account."""

    def sdk(self) -> Any:
        def call(name: str, do: Callable[..., Any]) -> Any:
            return SimpleNamespace(aio=self._noted(name, do))

        async def client(token_id: str, token_secret: str) -> str:
            if token_secret != "secret":
                raise AuthError("no such token")
            return "client"

        async def app(name: str, **_: Any) -> Any:
            return SimpleNamespace(app_id="ap-1")

        sandbox = SimpleNamespace(
            create=call("Sandbox.create", self._create),
            list=call("Sandbox.list", self._list),
            from_id=call("Sandbox.from_id", self._from_id),
        )
        image = SimpleNamespace(
            from_registry=self._noted("Image.from_registry", lambda tag: ("image", tag)),
            from_id=self._noted("Image.from_id", lambda name, client=None: ("snapshot", name)),
        )
        return SimpleNamespace(
            Client=SimpleNamespace(from_credentials=call("Client.from_credentials", client)),
            App=SimpleNamespace(lookup=call("App.lookup", app)),
            Image=image,
            Sandbox=sandbox,
            exception=SimpleNamespace(NotFoundError=NotFoundError),
        )

    def _noted(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.asked.append(name)
            check_signature(name, arguments, named)
            for fault in self.faults:
                if fault[0] == name and fault[2] > 0:
                    fault[2] -= 1
                    raise fault[1]("a fault")
            return do(*arguments, **named)

        return noted

    async def _create(self, *command: str, tags: dict[str, str], image: Any, **body: Any) -> Any:
        if image[1] == "missing":
            raise NotFoundError("no such image")
        source = image[1] if image[0] == "snapshot" else ""
        asked = {**body, "key": object()}
        return self._shown(await self.make("", tags, asked, float(body["timeout"]), source))

    async def _list(self, *, app_id: str | None = None, tags: dict[str, str] | None = None, client: Any = None) -> Any:
        for name, box in list(self.boxes.items()):
            if self.live(name) and (tags or {}).items() <= box.labels.items():
                yield self._shown(box)

    async def _from_id(self, name: str, client: Any = None) -> Any:
        if name not in self.boxes:
            raise NotFoundError(name)
        return self._shown(self.boxes[name])

    def _shown(self, box: Box) -> Any:
        async def execute(*argv: str, **_: Any) -> Any:
            if box.sandbox.ended:
                raise NotFoundError("Sandbox has already shut down")
            try:
                code, out, _ = await self.run(box, argv[0], list(argv[1:]))
            except SandboxError:
                raise SandboxTerminatedError("it has ended") from None

            async def read() -> str:
                return out.decode(errors="replace")

            async def wait() -> int:
                return code

            stdout = SimpleNamespace(read=SimpleNamespace(aio=self._noted("StreamReader.read", read)))
            return SimpleNamespace(stdout=stdout, wait=SimpleNamespace(aio=self._noted("ContainerProcess.wait", wait)))

        async def terminate() -> None:
            await box.sandbox.terminate()

        async def tags() -> dict[str, str]:
            return box.labels

        async def snapshot() -> Any:
            name = f"im-{len(self.snapshots)}"
            self.snapshots[name] = await box.sandbox.snapshot(name)
            return SimpleNamespace(object_id=name)

        async def write(data: bytes, path: str) -> None:
            await box.sandbox.write(path, data)

        async def read_file(path: str) -> bytes:
            return await box.sandbox.read(path)

        def call(name: str, do: Callable[..., Any]) -> Any:
            return SimpleNamespace(aio=self._noted(name, do))

        return SimpleNamespace(
            object_id=box.sandbox.id,
            exec=call("Sandbox.exec", execute),
            terminate=call("Sandbox.terminate", terminate),
            get_tags=call("Sandbox.get_tags", tags),
            snapshot_filesystem=call("Sandbox.snapshot_filesystem", snapshot),
            filesystem=SimpleNamespace(
                write_bytes=call("_SandboxFilesystem.write_bytes", write),
                read_bytes=call("_SandboxFilesystem.read_bytes", read_file),
            ),
        )


def check_signature(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """That the real SDK would take this call. Nothing where it isn't installed."""
    try:
        import modal
        from modal import _image, container_process, io_streams
        from modal.sandbox import _filesystem, _sandbox
    except ImportError:
        return
    from modal.app import _App
    from modal.client import _Client

    classes = {
        "Sandbox": _sandbox._Sandbox,
        "Image": _image._Image,
        "Client": _Client,
        "App": _App,
        "_SandboxFilesystem": _filesystem._SandboxFilesystem,
        "ContainerProcess": container_process._ContainerProcess,
        "StreamReader": io_streams._StreamReader,
    }
    assert modal.__version__ == "1.6.4", "read the SDK again, and then change this"
    owner, _, method = name.partition(".")
    found = inspect.signature(getattr(classes[owner], method))
    own = [None] if {"self", "cls"} & set(found.parameters) else []
    found.bind(*own, *arguments, **named)

"""A process's end of all connections to the other processes of a workflow: calls, messages, payloads."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from headway.flow.packing import Arguments, Packed
from headway.flow.paths import PayloadPath, PayloadRef, PeerAddress, PeerSettings, machine_identity
from headway.flow.payloads import Payloads
from headway.flow.peer_state import PeerState
from headway.flow.segments import WorkflowFolder
from headway.records.errors import RemoteError, WorkerDied
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.link import Link
from headway.runtime.nodes.dial import dial, outlast
from headway.runtime.nodes.handshake import Admission, ConnectionRefused, Hello, NotAdmitted, admit
from headway.runtime.nodes.listener import Listener, listen_on_first
from headway.runtime.stalls.waits import Waits
from headway.runtime.supervision import cancel_all

FIND_S = 60.0  # that a process may take to be there, or there again


class _Connection:
    """A connection: what its other end can call. Other names than these are those of the user's services."""

    def __init__(self, hub: Hub, sock: socket.socket, name: str) -> None:
        self._hub = hub
        self.peer: PeerAddress | None = None  # once it has introduced itself
        events: BoundedQueue[Any] = BoundedQueue(1)
        self.link = Link(name, sock, events, self.end, self.end, serves=self, waits=hub._waits)
        hub._connections.add(self)

    def end(self, reason: str) -> None:
        """Close the connection: it has ended, or must."""
        if self.peer is None:
            self._hub._connections.discard(self)
            self.link.close(WorkerDied(self.link.name, reason))
        else:
            self._hub._lose(self.peer.name, self.peer.incarnation, reason)

    async def introduce(self, theirs: PeerAddress) -> PeerAddress:
        """Exchange addresses: the first call on a connection. The driver knows by it that a process is there."""
        self._hub._join(self, theirs)
        return self._hub.address

    async def find(self, name: str, besides: list[str], timeout_s: float) -> PeerAddress | None:
        """See `PeerState.find`; for the driver."""
        return await self._hub._peer(name).find(besides, timeout_s)

    async def lost(self, name: str, incarnation: str, cause: str) -> None:
        """Take notice of the end of another process, as the driver says."""
        self._hub._lose(name, incarnation, cause)
        self._hub._folder.forget(incarnation)

    async def path(self, sender: str, receiver: str, path: PayloadPath) -> None:
        """Take notice of a path between two processes; for the driver."""
        self._hub._on_path(sender, receiver, path)

    async def run(self, method: str, ref: PayloadRef) -> PayloadRef:
        """Run a method of the user's services."""
        hub = self._hub
        result = await hub._run(method, await hub.fetch(ref))
        return await hub._payloads.hold(result, f"result of {hub.name}.{method}", self._other)

    async def deliver(self, tag: str, ref: PayloadRef) -> None:
        """Take a message; returns when there is room for it."""
        inbox = self._hub._peer(self._other.name).inbox(tag)
        await inbox.accept(ref.size_bytes, lambda: self._hub.fetch(ref))

    async def payload(self, number: int) -> Packed:
        """A payload that is held here."""
        return self._hub._payloads.content(number)

    async def release(self, number: int) -> None:
        """Release a payload that is held here."""
        self._hub._payloads.release(number)

    @property
    def _other(self) -> PeerAddress:
        if self.peer is None:
            raise ConnectionRefused("a connection whose other end hasn't introduced itself")
        return self.peer


class Hub:
    """A process's end of all connections to the other processes of a workflow.

    Lifecycle: *made* -> *started* (it listens, and the driver knows it) -> *closed*. It belongs to the event loop that
    it is started in. Connections are made with the first message, and anew after the other process's restart. Within a
    machine they are Unix sockets in a folder that only this user can enter; between machines TCP, after the handshake
    with the run's key and epoch, encrypted where the run is.

    A dead process is an error, never a hang: what waits for it raises WorkerDied; what is begun afterwards waits for
    its successor, at most `FIND_S`.

    Example: in process "a" ``await hub.send("b", {"x": tensor})``, in process "b" ``await hub.recv("a")``;
    ``await hub.call("b", "score", texts)`` runs ``await services.score(texts)`` in "b".
    """

    def __init__(
        self,
        name: str,
        settings: PeerSettings,
        *,
        driver: PeerAddress | None,
        services: object = None,
        device: str = "cpu:0",
        waits: Waits | None = None,
        on_path: Callable[[str, str, PayloadPath], object] = lambda sender, receiver, path: None,
    ) -> None:
        """``driver``: None: this process is, and knows who is there. ``services``: whose methods others can call.
        ``on_path(sender, receiver, path)``: called in the driver, once for each pair in the workflow and each path that
        its payloads take."""
        self.name, self._settings, self._driver = name, settings, driver
        self._services, self._waits, self._on_path = services, waits, on_path
        incarnation = secrets.token_hex(8)
        self.address = PeerAddress(
            name=name,
            incarnation=incarnation,
            machine=settings.machine or machine_identity(),
            unix=str(settings.folder / f"{incarnation}.sock"),
            device=device,
        )
        self._peers: dict[str, PeerState] = {}
        self._connections: set[_Connection] = set()
        self._noted: set[tuple[str, PayloadPath]] = set()  # by the sender's incarnation
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: Listener | None = None
        self._closing = False

    # --- start and end --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and connect to the driver. Raises ConfigurationError (port), ConnectionRefused (by the driver)."""
        settings = self._settings
        self._folder = WorkflowFolder(settings.folder)
        self._payloads = Payloads(self.address, self._folder.path)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._unix.setblocking(False)
            self._unix.bind(self.address.unix)
            self._unix.listen()
            self._spawn(self._accept())
            if settings.host:
                listening = (settings.host, settings.ports, settings.key, settings.epoch, self._take)
                self._listener = await listen_on_first(*listening, certificate=settings.certificate)
                self.address = msgspec.structs.replace(self.address, tcp=self._listener.address)
            if self._driver is not None:
                await self._connect(self._driver)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections and release all payloads; what others have fetched they keep."""
        if self._closing:
            return
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        for connection in list(self._connections):
            connection.link.close(WorkerDied(connection.link.name, "this process closed its connections"))
        for state in self._peers.values():
            state.gone.setdefault("", "this process closed its connections")
            state.fail()
        await cancel_all(*self._tasks)
        self._unix.close()
        await self._payloads.close()
        self._folder.forget(self.address.incarnation)
        self._folder.close()

    async def _take(self, sock: socket.socket, hello: Hello, source: str) -> None:
        """Take a process of another machine: see `OnClient`."""
        if hello.purpose != "peer":
            raise NotAdmitted(f"connections of a {hello.purpose} aren't accepted here")
        outlast(sock, self._settings.orphan_s)
        await admit(sock, Admission(epoch=self._settings.epoch, orphan_s=self._settings.orphan_s))
        _Connection(self, sock, hello.subject)

    async def _accept(self) -> None:
        """Take processes of this machine."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._unix)
            _Connection(self, sock, "a process of this machine")

    # --- who is there ---------------------------------------------------------------------------------------

    def _peer(self, name: str) -> PeerState:
        if name not in self._peers:
            self._peers[name] = PeerState(name)
        return self._peers[name]

    async def _find(self, name: str, timeout_s: float) -> PeerAddress:
        """The address of a process, waiting until it is there, again where it has ended. Raises WorkerDied."""
        state = self._peer(name)
        if self._closing:
            raise WorkerDied(name, "this process closed its connections")
        if self._driver is None:
            address = await state.find(list(state.gone), timeout_s)
        elif name == self._driver.name:
            address = None if self._driver.incarnation in state.gone else self._driver
        else:
            link, _ = await self._link(self._driver.name)
            address = await _ask(link, "find", name, list(state.gone), timeout_s)
        if address is None:
            if state.gone:
                raise state.died()
            raise WorkerDied(name, f"isn't there: no process of this name has started within {timeout_s:g} s")
        if state.address is None and address.incarnation not in state.gone:
            state.address = address
        return address

    async def _link(self, name: str) -> tuple[Link, PeerAddress]:
        """The connection to a process, made now where there is none. Raises WorkerDied as `_find` does."""
        state = self._peer(name)
        async with state.connecting:
            while state.link is None or state.address is None:
                address = state.address or await self._find(name, FIND_S)
                try:
                    await self._connect(address)
                except (OSError, ConnectionRefused, WorkerDied) as error:
                    self._lose(name, address.incarnation, f"can't be connected to: {error}")
            return state.link, state.address

    async def _connect(self, address: PeerAddress) -> None:
        """Connect to a process and exchange addresses. Raises OSError, ConnectionRefused, WorkerDied."""
        if address.machine == self.address.machine:
            sock = await _connect_unix(address.unix)
        elif address.tcp:
            own = self._settings
            hello = Hello(purpose="peer", subject=self.name, epoch=own.epoch)
            sock, _ = await dial(address.tcp, own.key, hello, own.orphan_s, encrypted=bool(own.certificate))
        else:
            raise ConnectionRefused(f"{address.name} is on another machine and listens on no port")
        connection = _Connection(self, sock, address.name)
        try:
            theirs = await connection.link.call("introduce", self.address)
            if theirs.incarnation != address.incarnation:
                raise ConnectionRefused(f"{theirs.name} answers where {address.name} is due")
        except BaseException as error:
            connection.end(f"refused: {error}")
            raise
        self._join(connection, theirs)

    def _join(self, connection: _Connection, theirs: PeerAddress) -> None:
        """Take notice of the process at the other end of a connection."""
        state = self._peer(theirs.name)
        if state.address is not None and state.address.incarnation != theirs.incarnation:
            self._lose(theirs.name, state.address.incarnation, "another process of its name has started")
        connection.peer, connection.link.name = theirs, theirs.name
        state.join(theirs, connection.link)

    def _lose(self, name: str, incarnation: str, cause: str) -> None:
        """Take notice of the end of a process: fail what waits for it. The driver tells the others."""
        state = self._peer(name)
        if self._closing or incarnation in state.gone:
            return
        state.gone[incarnation] = cause
        for connection in [c for c in self._connections if c.peer and c.peer.incarnation == incarnation]:
            self._connections.discard(connection)
            connection.link.close(WorkerDied(name, cause))
        if state.address is None or state.address.incarnation == incarnation:
            state.fail()
        self._payloads.release_of(incarnation)
        if self._driver is None:
            self._folder.forget(incarnation)
            for other in self._peers.values():
                if other.link is not None:
                    self._spawn(other.link.call("lost", name, incarnation, cause))

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(self, peer: str, method: str, /, *args: Any, **named: Any) -> Any:
        """Run a method of a process's services and return its result. Raises RemoteError with the remote
        traceback (``__cause__`` is the exception itself where it is a HeadwayError), WorkerDied, ConfigurationError
        for arguments that can't be sent."""
        if peer == self.name:
            return await self._run(method, Arguments(args, named))
        link, address = await self._link(peer)
        ref = await self._payloads.hold(Arguments(args, named), f"call of {peer}.{method}", address)
        try:
            answer: PayloadRef = await link.call("run", method, ref)
        except RemoteError as error:
            named_error = RemoteError(peer, method, error.error, error.traceback)
            named_error.add_note(error.traceback)
            raise named_error from error.__cause__
        finally:
            self._payloads.release(ref.id)
        try:
            return await self.fetch(answer)
        finally:
            self.release(answer)

    async def _run(self, method: str, call: Arguments) -> Any:
        if self._services is None or method.startswith("_"):
            raise AttributeError(f"{self.name} has no public method {method}")
        result = getattr(self._services, method)(*call.arguments, **call.named)
        return await result if inspect.isawaitable(result) else result

    # --- payloads -------------------------------------------------------------------------------------------

    async def hold(self, message: Any, label: str = "") -> PayloadRef:
        """Hold a message until it is released, for any number of fetches by any process: in shared memory, where it
        outlasts this process. Raises ConfigurationError that names what can't be pickled; ``label``: of which call or
        channel."""
        return await self._payloads.hold(message, label)

    async def fetch(self, ref: PayloadRef) -> Any:
        """The message of a payload, whose arrays are this process's own. Raises PayloadReleased, WorkerDied when it was
        with its owner alone, and that has ended."""
        await self._note(ref, ref.path if ref.machine == self.address.machine else "link")
        if (found := self._payloads.read(ref)) is None:
            link, address = await self._link(ref.owner)
            if address.incarnation != ref.incarnation:
                raise WorkerDied(ref.owner, "ended before a payload of its was fetched")
            found = await _ask(link, "payload", ref.id)
        return found.load()

    async def _note(self, ref: PayloadRef, path: PayloadPath) -> None:
        """Report the path that a payload takes to here, the first time."""
        if ref.incarnation == self.address.incarnation or (ref.incarnation, path) in self._noted:
            return
        self._noted.add((ref.incarnation, path))
        if self._driver is None:
            self._on_path(ref.owner, self.name, path)
        elif (link := self._peer(self._driver.name).link) is not None:
            self._spawn(link.call("path", ref.owner, self.name, path))
            await asyncio.sleep(0)  # it is sent, so known before anything that the payload leads to

    def release(self, ref: PayloadRef) -> None:
        """Release a payload, whosever it is; who has fetched it keeps it. No-op for one that is released already."""
        if ref.incarnation == self.address.incarnation:
            self._payloads.release(ref.id)
        elif ref.content is None:
            self._spawn(self._release(ref))

    async def _release(self, ref: PayloadRef) -> None:
        """Release another process's payload: it does, or where it is dead its segment is removed here."""
        with suppress(WorkerDied):
            if ref.incarnation not in self._peer(ref.owner).gone:
                link, address = await self._link(ref.owner)
                if address.incarnation == ref.incarnation:
                    return await link.call("release", ref.id)
        if ref.segment and ref.machine == self.address.machine:
            with suppress(FileNotFoundError):
                os.unlink(ref.segment)

    # --- point to point -------------------------------------------------------------------------------------

    async def send(self, peer: str, message: Any, tag: str = "") -> None:
        """Send a message to a process, in order with those of the same tag before. Returns when it is there; waits
        while too much is there that hasn't been received. The message may be changed afterwards. Raises WorkerDied,
        ConfigurationError for what can't be sent."""
        inbox = self._peer(peer).inbox(tag)
        if peer == self.name:
            return await inbox.accept(0, lambda: _as_is(message))
        async with inbox.sending:
            link, address = await self._link(peer)
            ref = await self._payloads.hold(message, f"send to {peer}{f' ({tag})' if tag else ''}", address)
            try:
                await _ask(link, "deliver", tag, ref)
            finally:
                self._payloads.release(ref.id)

    async def recv(self, peer: str, tag: str = "") -> Any:
        """Receive the next message of a process with this tag, in the order in which it sent them. Raises WorkerDied
        when the process ends meanwhile, or isn't there; later calls receive from its successor."""
        state = self._peer(peer)
        inbox = state.inbox(tag)
        async with inbox.receiving:
            while (found := inbox.pop()) is None:
                if state.address is None and peer != self.name:
                    # After a death a successor has to be there already: nobody else says when to give up.
                    await self._find(peer, 0.0 if state.gone else FIND_S)
                else:
                    await state.unless_lost(inbox.changed())
        return found[0]

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine of the hub's own; that a process has ended, or refuses it, is noticed elsewhere."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}: {coroutine.__name__}")
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(done)


async def _ask(link: Link, method: str, *args: Any) -> Any:
    """Call a method of the other end's `_Connection`. Raises what it raises, WorkerDied."""
    try:
        return await link.call(method, *args)
    except RemoteError as error:
        raise error.__cause__ or error from None


async def _connect_unix(path: str) -> socket.socket:
    """Connect to a Unix socket. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


async def _as_is(message: Any) -> Any:
    return message

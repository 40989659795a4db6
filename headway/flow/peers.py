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

from headway.flow.paths import PayloadRef, PeerAddress, PeerSettings
from headway.flow.payloads import PayloadStore
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
from headway.runtime.transport.packing import Arguments, Packed
from headway.runtime.transport.paths import PayloadPath, machine_identity

FIND_S = 60.0  # time that a process may take to start or restart


class _Connection:
    """A connection to a peer. Its public methods are those that the peer can call; `run` calls the user's services."""

    def __init__(self, network: PeerNetwork, sock: socket.socket, name: str) -> None:
        self._network = network
        self.peer: PeerAddress | None = None  # set once the peer has introduced itself
        events: BoundedQueue[Any] = BoundedQueue(1)
        self.link = Link(name, sock, events, self.end, self.end, serves=self, waits=network._waits)
        network._connections.add(self)

    def end(self, reason: str) -> None:
        """Close the connection, which has ended or must end, and record the peer's death."""
        if self.peer is None:
            self._network._connections.discard(self)
            self.link.close(WorkerDied(self.link.name, reason))
        else:
            self._network._mark_lost(self.peer.name, self.peer.incarnation, reason)

    async def introduce(self, theirs: PeerAddress) -> PeerAddress:
        """Exchange addresses, in the first call on a connection. By this call the driver learns that a process runs."""
        self._network._register(self, theirs)
        return self._network.address

    async def find(self, name: str, besides: list[str], timeout_s: float) -> PeerAddress | None:
        """Run `PeerState.find`; called in the driver."""
        return await self._network._peer(name).find(besides, timeout_s)

    async def lost(self, name: str, incarnation: str, cause: str) -> None:
        """Record the death of another process; called by the driver."""
        self._network._mark_lost(name, incarnation, cause)
        self._network._folder.forget(incarnation)

    async def path(self, sender: str, receiver: str, path: PayloadPath) -> None:
        """Record the path of payloads between two processes; called in the driver."""
        self._network._on_path(sender, receiver, path)

    async def run(self, method: str, ref: PayloadRef) -> PayloadRef:
        """Run a method of the user's services."""
        network = self._network
        returned = await network._run(method, await network.fetch(ref))
        return await network._payloads.hold(returned, f"result of {network.name}.{method}", self._other)

    async def deliver(self, tag: str, ref: PayloadRef) -> None:
        """Accept a message; returns when the inbox has it."""
        inbox = self._network._peer(self._other.name).inbox(tag)
        await inbox.accept(ref.size_bytes, lambda: self._network.fetch(ref))

    async def payload(self, number: int) -> Packed:
        """Return a payload that this process holds."""
        return self._network._payloads.content(number)

    async def release(self, number: int) -> None:
        """Release a payload that this process holds."""
        self._network._payloads.release(number)

    @property
    def _other(self) -> PeerAddress:
        if self.peer is None:
            raise ConnectionRefused("a connection whose other end hasn't introduced itself")
        return self.peer


class PeerNetwork:
    """A process's end of all connections to the other processes of a workflow.

    Lifecycle: *made* -> *started* (it listens, and the driver knows it) -> *closed*. It belongs to the event loop that
    it is started in. A connection is made with the first message, and again after a restart of the peer. Within a
    machine it is a Unix socket in a folder that only this user can enter; between machines it is TCP, after the
    handshake with the run's key and epoch, encrypted if the run is.

    A dead process causes an error, never a hang: waits for it raise WorkerDied; later operations wait for its
    successor, at most `FIND_S`.

    Example: in process "a" ``await network.send("b", {"x": tensor})``, in process "b" ``await network.recv("a")``;
    ``await network.call("b", "score", texts)`` runs ``await services.score(texts)`` in "b".
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
        """``driver``: address of the driver, which knows all processes; None: this process is the driver. ``services``:
        object whose methods others can call. ``on_path(sender, receiver, path)``: called in the driver, once for each
        pair of processes and each path that its payloads take."""
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
        self._reported_paths: set[tuple[str, PayloadPath]] = set()  # by the sender's incarnation
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: Listener | None = None
        self._closing = False

    # --- start and end --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and connect to the driver. Raises ConfigurationError (no free port), ConnectionRefused (by the
        driver)."""
        settings = self._settings
        self._folder = WorkflowFolder(settings.folder)
        self._payloads = PayloadStore(self.address, self._folder.path)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._unix.setblocking(False)
            self._unix.bind(self.address.unix)
            self._unix.listen()
            self._spawn(self._accept_local())
            if settings.host:
                listen_arguments = (settings.host, settings.ports, settings.key, settings.epoch, self._accept_remote)
                self._listener = await listen_on_first(*listen_arguments, certificate=settings.certificate)
                self.address = msgspec.structs.replace(self.address, tcp=self._listener.address)
            if self._driver is not None:
                await self._connect(self._driver)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections and release all payloads; fetched payloads stay with those that fetched them."""
        if self._closing:
            return
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        for connection in list(self._connections):
            connection.link.close(WorkerDied(connection.link.name, "this process closed its connections"))
        for state in self._peers.values():
            state.end_causes.setdefault("", "this process closed its connections")
            state.fail()
        await cancel_all(*self._tasks)
        self._unix.close()
        await self._payloads.close()
        self._folder.forget(self.address.incarnation)
        self._folder.close()

    async def _accept_remote(self, sock: socket.socket, hello: Hello, source: str) -> None:
        """Accept a connection from a process of another machine: see `OnClient`."""
        if hello.purpose != "peer":
            raise NotAdmitted(f"connections of a {hello.purpose} aren't accepted here")
        outlast(sock, self._settings.orphan_s)
        await admit(sock, Admission(epoch=self._settings.epoch, orphan_s=self._settings.orphan_s))
        _Connection(self, sock, hello.subject)

    async def _accept_local(self) -> None:
        """Accept connections from processes of this machine."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._unix)
            _Connection(self, sock, "a process of this machine")

    # --- peers ----------------------------------------------------------------------------------------------

    def _peer(self, name: str) -> PeerState:
        if name not in self._peers:
            self._peers[name] = PeerState(name)
        return self._peers[name]

    async def _find_address(self, name: str, timeout_s: float) -> PeerAddress:
        """Return the address of a process, after waiting for its start, or restart if it has died. Raises
        WorkerDied."""
        state = self._peer(name)
        if self._closing:
            raise WorkerDied(name, "this process closed its connections")
        if self._driver is None:
            address = await state.find(list(state.end_causes), timeout_s)
        elif name == self._driver.name:
            address = None if self._driver.incarnation in state.end_causes else self._driver
        else:
            link, _ = await self._link(self._driver.name)
            address = await _call_link(link, "find", name, list(state.end_causes), timeout_s)
        if address is None:
            if state.end_causes:
                raise state.died()
            raise WorkerDied(name, f"isn't there: no process of this name has started within {timeout_s:g} s")
        if state.address is None and address.incarnation not in state.end_causes:
            state.address = address
        return address

    async def _link(self, name: str) -> tuple[Link, PeerAddress]:
        """Return the connection to a process, made if there is none. Raises WorkerDied as `_find_address` does."""
        state = self._peer(name)
        async with state.connecting:
            while state.link is None or state.address is None:
                address = state.address or await self._find_address(name, FIND_S)
                try:
                    await self._connect(address)
                except (OSError, ConnectionRefused, WorkerDied) as error:
                    self._mark_lost(name, address.incarnation, f"can't be connected to: {error}")
            return state.link, state.address

    async def _connect(self, address: PeerAddress) -> None:
        """Connect to a process and exchange addresses. Raises OSError, ConnectionRefused, WorkerDied."""
        if address.machine == self.address.machine:
            sock = await _connect_unix(address.unix)
        elif address.tcp:
            settings = self._settings
            hello = Hello(purpose="peer", subject=self.name, epoch=settings.epoch)
            sock, _ = await dial(
                address.tcp, settings.key, hello, settings.orphan_s, encrypted=bool(settings.certificate)
            )
        else:
            raise ConnectionRefused(f"{address.name} is on another machine and listens on no port")
        connection = _Connection(self, sock, address.name)
        try:
            their_address = await connection.link.call("introduce", self.address)
            if their_address.incarnation != address.incarnation:
                raise ConnectionRefused(f"{their_address.name} answers instead of {address.name}")
        except BaseException as error:
            connection.end(f"refused: {error}")
            raise
        self._register(connection, their_address)

    def _register(self, connection: _Connection, theirs: PeerAddress) -> None:
        """Record the process at the other end of a connection."""
        state = self._peer(theirs.name)
        if state.address is not None and state.address.incarnation != theirs.incarnation:
            self._mark_lost(theirs.name, state.address.incarnation, "another process of its name has started")
        connection.peer, connection.link.name = theirs, theirs.name
        state.join(theirs, connection.link)

    def _mark_lost(self, name: str, incarnation: str, cause: str) -> None:
        """Record the death of a process and fail all waits for it. The driver notifies the others."""
        state = self._peer(name)
        if self._closing or incarnation in state.end_causes:
            return
        state.end_causes[incarnation] = cause
        for connection in [c for c in self._connections if c.peer and c.peer.incarnation == incarnation]:
            self._connections.discard(connection)
            connection.link.close(WorkerDied(name, cause))
        if state.address is None or state.address.incarnation == incarnation:
            state.fail()
        self._payloads.release_for_reader(incarnation)
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
        call_ref = await self._payloads.hold(Arguments(args, named), f"call of {peer}.{method}", address)
        try:
            answer_ref: PayloadRef = await link.call("run", method, call_ref)
        except RemoteError as error:
            named_error = RemoteError(peer, method, error.error, error.traceback)
            named_error.add_note(error.traceback)
            raise named_error from error.__cause__
        finally:
            self._payloads.release(call_ref.id)
        try:
            return await self.fetch(answer_ref)
        finally:
            self.release(answer_ref)

    async def _run(self, method: str, call: Arguments) -> Any:
        if self._services is None or method.startswith("_"):
            raise AttributeError(f"{self.name} has no public method {method}")
        returned = getattr(self._services, method)(*call.arguments, **call.keywords)
        return await returned if inspect.isawaitable(returned) else returned

    # --- payloads -------------------------------------------------------------------------------------------

    async def hold(self, message: Any, label: str = "") -> PayloadRef:
        """Hold a message until it is released, for any number of fetches by any process: in shared memory, where it
        outlives this process. Raises ConfigurationError that names the part that can't be pickled, and ``label``, the
        call or channel."""
        return await self._payloads.hold(message, label)

    async def fetch(self, ref: PayloadRef) -> Any:
        """Fetch the message of a payload; its arrays belong to this process. Raises PayloadReleased, and WorkerDied
        when only its owner had it, and the owner has died."""
        await self._report_path(ref, ref.path if ref.machine == self.address.machine else "link")
        if (packed := self._payloads.read(ref)) is None:
            link, address = await self._link(ref.owner)
            if address.incarnation != ref.incarnation:
                raise WorkerDied(ref.owner, "ended before its payload was fetched")
            packed = await _call_link(link, "payload", ref.id)
        return packed.load()

    async def _report_path(self, ref: PayloadRef, path: PayloadPath) -> None:
        """Report the path of a payload to this process, once for each sender and path."""
        if ref.incarnation == self.address.incarnation or (ref.incarnation, path) in self._reported_paths:
            return
        self._reported_paths.add((ref.incarnation, path))
        if self._driver is None:
            self._on_path(ref.owner, self.name, path)
        elif (link := self._peer(self._driver.name).link) is not None:
            self._spawn(link.call("path", ref.owner, self.name, path))
            await asyncio.sleep(0)  # sends the report, so that it precedes anything that the payload leads to

    def release(self, ref: PayloadRef) -> None:
        """Release a payload of any process; fetched copies stay valid. No-op for one that is released already."""
        if ref.incarnation == self.address.incarnation:
            self._payloads.release(ref.id)
        elif ref.content is None:
            self._spawn(self._release(ref))

    async def _release(self, ref: PayloadRef) -> None:
        """Have another process release its payload, or remove its segment if that process is dead."""
        with suppress(WorkerDied):
            if ref.incarnation not in self._peer(ref.owner).end_causes:
                link, address = await self._link(ref.owner)
                if address.incarnation == ref.incarnation:
                    return await link.call("release", ref.id)
        if ref.segment and ref.machine == self.address.machine:
            with suppress(FileNotFoundError):
                os.unlink(ref.segment)

    # --- point to point -------------------------------------------------------------------------------------

    async def send(self, peer: str, message: Any, tag: str = "") -> int:
        """Send a message to a process, in order with earlier ones of the same tag. Returns its bytes when it has
        arrived; waits while the peer's inbox of unreceived messages is full. The message may be changed afterwards.
        Raises WorkerDied, and ConfigurationError for a message that can't be pickled."""
        inbox = self._peer(peer).inbox(tag)
        if peer == self.name:
            await inbox.accept(0, lambda: _return_message(message))
            return 0
        async with inbox.sending:
            link, address = await self._link(peer)
            ref = await self._payloads.hold(message, f"send to {peer}{f' ({tag})' if tag else ''}", address)
            try:
                await _call_link(link, "deliver", tag, ref)
                return ref.size_bytes
            finally:
                self._payloads.release(ref.id)

    async def recv(self, peer: str, tag: str = "") -> Any:
        """Receive the next message of a process with this tag, in sending order. Raises WorkerDied when the process
        dies meanwhile, or doesn't start in time; later calls receive from its successor."""
        state = self._peer(peer)
        inbox = state.inbox(tag)
        async with inbox.receiving:
            while (received := inbox.pop()) is None:
                if state.address is None and peer != self.name:
                    # After a death a successor must have started already: nothing else bounds this wait.
                    await self._find_address(peer, 0.0 if state.end_causes else FIND_S)
                else:
                    await state.result_unless_lost(inbox.changed())
        return received[0]

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run an internal coroutine in the background. Its errors are dropped: other paths notice a peer's death."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}: {coroutine.__name__}")
        self._tasks.add(task)

        def on_done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(on_done)


async def _call_link(link: Link, method: str, *args: Any) -> Any:
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


async def _return_message(message: Any) -> Any:
    return message

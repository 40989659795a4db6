"""The port to which other machines of the run connect; clients are admitted once they have proved the run's key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.addresses import listening_socket, split_address
from headway.runtime.nodes.encryption import ServerEncryption
from headway.runtime.nodes.handshake import HANDSHAKE_S, Admission, Hello, NotAdmitted, admit, authenticate, require_tls
from headway.runtime.supervision import cancel_all

MOST_HANDSHAKES = 64  # under way at once; one more ends the oldest
_REPORTED_EVERY_S = 60.0
_MOST_CAUSES = 16  # reported in that time; further ones are counted together

OnClient = Callable[[socket.socket, Hello, str], Awaitable[None]]
"""Takes a client that has proved the key, given its socket, `Hello` and address, and admits it. Raises NotAdmitted."""
OnRefusal = Callable[[str], object]


class Listener:
    """Listens, runs the handshake on every connection, and hands over the clients that have proved the key.

    Others cost no more than `MOST_HANDSHAKES` connections and `HANDSHAKE_S` seconds each; refusals are reported once a
    minute for each cause, with their number.
    """

    def __init__(
        self,
        address: str,
        key: str,
        epoch: int,
        on_client: OnClient,
        on_refusal: OnRefusal = lambda cause: None,
        certificate: str = "",
    ) -> None:
        """``certificate``: with its key, as PEM, of connections that must be encrypted; empty: none is."""
        self._address = address
        self._key = key
        self._epoch = epoch
        self._encryption = ServerEncryption(certificate) if certificate else None
        self._on_client = on_client
        self._on_refusal = on_refusal
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: OrderedDict[asyncio.Task[None], None] = OrderedDict()  # oldest first
        self._refusals: Counter[str] = Counter()  # not reported yet, by cause
        self._reported_s: dict[str, float] = {}

    @property
    def address(self) -> str:
        """The address at which it listens, with the port that the system chose for port 0."""
        assert self._socket is not None
        return f"{split_address(self._address)[0]}:{self._socket.getsockname()[1]}"

    async def open(self) -> None:
        """Begin to listen. Raises ConfigurationError where that isn't possible."""
        listener = listening_socket(self._address, "cluster.address")
        self._socket = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="listener")

    async def close(self) -> None:
        """Close the port and end the handshakes under way."""
        await cancel_all(self._accepting, *self._handshakes)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer_address = await loop.sock_accept(listener)
            except OSError:  # no descriptors left, or the client is gone again
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(self._handshakes) >= MOST_HANDSHAKES:
                oldest_task, _ = self._handshakes.popitem(last=False)
                oldest_task.cancel()
                self._refused(f"more than {MOST_HANDSHAKES} unfinished handshakes at once")
            task = asyncio.create_task(self._admit(sock, peer_address[0]), name=f"handshake with {peer_address[0]}")
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _admit(self, sock: socket.socket, peer: str) -> None:
        is_taken = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                binding = b""
                if self._encryption is not None:
                    encrypted_sock = await self._encryption.encrypted(sock)
                    if encrypted_sock is None:
                        await require_tls(sock)
                        return
                    sock, binding = encrypted_sock, encrypted_sock.binding
                hello = await authenticate(sock, self._key, self._epoch, binding)
                try:
                    await self._on_client(sock, hello, peer)
                except NotAdmitted as refusal:
                    await admit(sock, Admission(refused=str(refusal), later=refusal.later, epoch=self._epoch))
                    raise
                is_taken = True
        except TimeoutError:
            self._refused(f"{peer} connected, but sent nothing in {HANDSHAKE_S:g} s: a firewall, or no node of Headway")
        except Exception as error:  # the boundary to a peer: refused, lost while it was taken, or it answers nonsense
            cause_text = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
            self._refused(f"{peer}: {cause_text}")
        finally:
            if not is_taken:
                with contextlib.suppress(OSError):
                    sock.close()

    def _refused(self, cause: str) -> None:
        """Count a refusal, and report it unless its cause was reported in the last minute."""
        now = time.monotonic()
        for old_cause in [known for known, at_s in self._reported_s.items() if now - at_s >= _REPORTED_EVERY_S]:
            del self._reported_s[old_cause]
            if repeat_count := self._refusals.pop(old_cause, 0):
                self._on_refusal(f"{old_cause} ({repeat_count} more times)")
        if cause not in self._reported_s and len(self._reported_s) >= _MOST_CAUSES:
            cause = "connections refused for other reasons"  # a client that invents causes must fill no memory or log
        if cause in self._reported_s:
            self._refusals[cause] += 1
        else:
            self._reported_s[cause] = now
            self._on_refusal(cause)


async def listen_on_first(
    host: str,
    ports: Sequence[int],
    key: str,
    epoch: int,
    on_client: OnClient,
    on_refusal: OnRefusal = lambda cause: None,
    certificate: str = "",
) -> Listener:
    """A `Listener` on the first port that is free. Raises ConfigurationError where none is."""
    reason = ""
    for port in ports:
        listener = Listener(f"{host}:{port}", key, epoch, on_client, on_refusal, certificate)
        try:
            await listener.open()
        except ConfigurationError as error:
            reason = str(error)
        else:
            return listener
    raise ConfigurationError(f"cluster.port_range {ports[0]}-{ports[-1]}: none is free ({reason})")

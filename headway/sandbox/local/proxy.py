"""An HTTP proxy in the owner's process, by which a sandbox reaches the hosts on its allow list.

The sandbox's network namespace only has a loopback. Its first process opens a listening socket there before any command
runs and sends it to the owner (`isolation.listen_for_proxy`). A socket stays in the network namespace in which it was
made, independently of the process that holds it. So the owner accepts the sandbox's connections, and no traffic is
relayed inside the sandbox.

Input is treated as hostile: heads are bounded and parsed strictly (`proxy_request.py`), and connections, bytes and time
are limited. Names are resolved here, and the proxy connects to the address that it has checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headway.records.network import AllowList, allow_list, host_of, is_address, is_public
from headway.records.sandbox import HostUse, NetworkUse
from headway.runtime.clock import RealClock
from headway.runtime.supervision import cancel_all
from headway.sandbox.local import proxy_request
from headway.sandbox.local.proxy_request import ProxyRefused, ProxyRequest
from headway.sandbox.rate_limiter import RateLimiter

CHUNK_BYTES = 1 << 16
REFUSAL_READ_S = 1.0  # for a refused caller to read the reason
KEPT_HOSTS = 256  # entries kept in the statistics; a sandbox may ask for any number of hosts
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # name and port -> addresses; raises OSError

# Separate threads, so that a sandbox that looks up slow names doesn't block the owner's other threads.
_resolvers = ThreadPoolExecutor(64, thread_name_prefix="resolver")


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one sandbox's use of the proxy in its owner's process."""

    connections: int = 32  # at once; more wait until one is over
    connections_per_s: float = 50.0
    bytes: int = 2 << 30  # in both directions, all its life
    head_bytes: int = 16 << 10  # of a request
    head_s: float = 10.0  # until it is complete
    lookups: int = 2  # of names, at once: each occupies one of all sandboxes' threads until it ends, however late
    connect_s: float = 15.0  # until a name is resolved, and until an address has answered
    idle_s: float = 60.0  # without a byte in either direction


class ProxyEntrance:
    """The socket pair over which a sandbox hands its listening socket to the owner."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)

    def receive(self) -> socket.socket:
        """Return the listener. Only for a sandbox that is ready, which has sent the listener before."""
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


async def resolve(name: str, port: int) -> list[str]:
    """Resolve a name by the machine's own resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    infos = await loop.run_in_executor(_resolvers, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


class Proxy:
    """Serves connections to ``listener`` until it is closed.

    Invariants: it connects only to listed addresses and to public addresses of listed names; never more than
    ``connections`` at once; `close` leaves no socket open.
    """

    def __init__(
        self,
        listener: socket.socket,
        allowed: Sequence[str],
        settings: ProxySettings | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._listener = listener
        self._allowed: AllowList = allow_list(allowed)
        self._settings = settings or ProxySettings()
        self._resolve = resolve
        self._slots = asyncio.Semaphore(self._settings.connections)
        self._lookups = asyncio.Semaphore(self._settings.lookups)
        per_s = self._settings.connections_per_s
        self._rate_limit = RateLimiter(per_s, max(1, int(per_s)), RealClock())
        self._open: set[asyncio.Task[None]] = set()
        self._bytes = self._peak = 0
        self._hosts: dict[tuple[str, int, str], list[int]] = {}  # host, port, why not -> requests, bytes
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="sandbox proxy")
        self._accepting.add_done_callback(lambda _: listener.close())  # only once the loop doesn't watch it any more

    def close(self) -> None:
        """End all connections; the tasks end with the loop's next turn."""
        self._accepting.cancel()
        for task in self._open:
            task.cancel()

    def statistics(self) -> NetworkUse:
        hosts = tuple(
            HostUse(host=host, port=port, refused=reason, requests=requests, bytes=transferred)
            for (host, port, reason), (requests, transferred) in self._hosts.items()
        )
        return NetworkUse(
            used=len(self._open),
            capacity=self._settings.connections,
            peak=self._peak,
            bytes=self._bytes,
            hosts=hosts,
        )

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            await self._rate_limit.wait()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptors left, or it went before it was accepted
                self._slots.release()
                await asyncio.sleep(0.05)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._open.add(task)
            self._peak = max(self._peak, len(self._open))
            task.add_done_callback(functools.partial(self._on_served, connection))

    def _on_served(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # a task that was cancelled before it began hasn't closed it
        self._open.discard(task)
        self._slots.release()

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=self._settings.head_bytes)
        try:
            try:
                await self._forward(reader, writer)
            except ProxyRefused as refusal:
                await _refuse(reader, writer, refusal)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # either end has gone, or does nothing: closed below
        finally:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = proxy_request.read(await self._read_head(reader))
        host_key = (request.host, request.port, "")
        try:
            server_reader, server = await self._connect(request)
        except ProxyRefused as refusal:
            self._count_request((request.host, request.port, refusal.reason))
            raise
        self._count_request(host_key)
        try:
            if request.tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                server.write(request.head)
            async with asyncio.timeout(self._settings.idle_s) as idle:
                await self._relay((reader, writer), (server_reader, server), request, idle, self._hosts.get(host_key))
        finally:
            server.transport.abort()

    async def _read_head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._settings.head_s):
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise ProxyRefused(408, "Request Timeout", f"no whole head in {self._settings.head_s:g} s") from None
        except asyncio.LimitOverrunError:
            reason = f"a head has at most {self._settings.head_bytes} bytes here"
            raise ProxyRefused(431, "Request Header Fields Too Large", reason) from None

    # Allowed hosts.

    async def _connect(self, request: ProxyRequest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the host if it is listed, by an address that is public or listed. Raises ProxyRefused."""
        host, port = request.host, request.port
        if not self._allowed.allows(host, port):
            raise self._not_listed(f"{host} port {port}")
        if self._bytes >= self._settings.bytes:
            reason = f"this sandbox has sent and received its {self._settings.bytes} bytes"
            raise ProxyRefused(403, "Out of bytes", reason)
        addresses = [host] if is_address(host) else await self._addresses(host, port)
        last_error: Exception | None = None
        for address in addresses[:4]:
            try:
                async with asyncio.timeout(self._settings.connect_s):
                    return await self._connect_to(address, port)
            except (OSError, TimeoutError) as connect_error:
                last_error = connect_error
        reason = f"{host} port {port} can't be reached: {last_error or 'no answer'}"
        raise ProxyRefused(502, "Bad Gateway", reason) from last_error

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            async with asyncio.timeout(self._settings.connect_s):
                ips = [host_of(f"[{ip}]" if ":" in ip else ip) for ip in await self._look_up(host, port)]
        except (OSError, TimeoutError, UnicodeError) as error:
            raise ProxyRefused(502, "Bad Gateway", f"{host} can't be resolved: {error or 'no answer'}") from error
        addresses = [ip for ip in ips if ip and (is_public(ip) or self._allowed.allows(ip, port))]
        if not addresses:
            raise self._not_listed(f"{host} is {', '.join(map(str, ips[:4]))}, which isn't public, and", "Not public")
        return addresses

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        await self._lookups.acquire()
        lookup_future = asyncio.ensure_future(self._resolve(host, port))
        lookup_future.add_done_callback(self._on_lookup_done)
        await asyncio.wait({lookup_future})  # continues after a caller's timeout: a thread can't be cancelled
        return lookup_future.result()

    def _on_lookup_done(self, lookup: asyncio.Future[Sequence[str]]) -> None:
        self._lookups.release()
        if not lookup.cancelled():
            lookup.exception()  # there may be no waiter

    async def _connect_to(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(address, port, limit=CHUNK_BYTES)
        is_this_machine = writer.get_extra_info("sockname")[0] == writer.get_extra_info("peername")[0]
        if is_this_machine and not self._allowed.allows(address, port):  # public, but this machine's
            writer.transport.abort()
            raise self._not_listed(f"{address} is this machine's, and", "Not public")
        return reader, writer

    def _not_listed(self, target: str, reason: str = "Not on the allow-list") -> ProxyRefused:
        listed = ", ".join(self._allowed.written)
        return ProxyRefused(403, reason, f"{target} isn't on this sandbox's list of hosts (network = {listed})")

    # Bytes.

    async def _relay(
        self,
        inside: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        outside: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        request: ProxyRequest,
        idle: asyncio.Timeout,
        use: list[int] | None,
    ) -> None:
        """Relay both directions until both have ended; for a plain request, until the answer has ended."""
        loop = asyncio.get_running_loop()

        def on_bytes(count: int) -> None:
            idle.reschedule(loop.time() + self._settings.idle_s)
            self._bytes += count
            if use is not None:
                use[1] += count
            if self._bytes > self._settings.bytes:
                raise ConnectionAbortedError("out of bytes")

        body_limit_bytes = None if request.tunnel else request.body_bytes
        up_task = asyncio.create_task(_pump(inside[0], outside[1], on_bytes, body_limit_bytes))
        down_task = asyncio.create_task(_pump(outside[0], inside[1], on_bytes))
        try:
            running_tasks = {up_task, down_task}
            while down_task in running_tasks or (request.tunnel and running_tasks):
                finished_tasks, running_tasks = await asyncio.wait(running_tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in finished_tasks:
                    task.result()
        finally:
            await cancel_all(up_task, down_task)
        for _, writer in (inside, outside):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _count_request(self, entry: tuple[str, int, str]) -> None:
        if entry in self._hosts or len(self._hosts) < KEPT_HOSTS:
            self._hosts.setdefault(entry, [0, 0])[0] += 1


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, on_data: Callable[[int], None], limit: int | None = None
) -> None:
    """Copy ``source`` to ``target``, its end of file included. ``limit``: bytes allowed; more raise
    ConnectionAbortedError, and the end of file isn't copied."""
    while chunk := await source.read(CHUNK_BYTES):
        if limit is not None:
            limit -= len(chunk)
            if limit < 0:  # a second request, perhaps to another host: one at a time
                raise ConnectionAbortedError("more than one request")
        on_data(len(chunk))
        target.write(chunk)
        await target.drain()
    if limit is None:
        target.write_eof()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refused: ProxyRefused) -> None:
    body = f"{refused}\n".encode()
    head = f"HTTP/1.1 {refused.status} {refused.reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    writer.write_eof()
    async with asyncio.timeout(REFUSAL_READ_S):  # closing with unread input would lose the answer
        while await reader.read(CHUNK_BYTES):
            pass

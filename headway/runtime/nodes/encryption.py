"""Encrypted connections between machines: TLS below the links, which it doesn't change.

An `ssl` object belongs to one process and one thread, where links are handed to workers' processes and are read and
written by threads of their own. So a relay, a thread for each connection, carries bytes between the TLS connection and
a socket pair; the user of the connection holds the pair's other end. The certificate is the run's own and unsigned: its
digest is part of what both ends prove by the run's key (`handshake`), so that a man in the middle is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
import socket
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path

from headway.records.errors import ConfigurationError
from headway.runtime.framing import tune
from headway.runtime.nodes.handshake import ConnectionRefused

BLOCK_BYTES = 256 * 1024
_LINGER_S = 5.0  # after our last byte, for the other end to read it
_VALID_DAYS = 365
_TLS_HANDSHAKE = b"\x16\x03"  # first bytes of a TLS connection


class EncryptedSocket(socket.socket):
    """The end of a relay: a socket like any other, whose bytes travel encrypted."""

    outer: ssl.SSLSocket  # the connection itself, for its options
    binding: bytes  # digest of the server's certificate


def make_certificate() -> str:
    """Make a certificate with its key, as PEM, by the `openssl` program: Python's ssl makes none, and a package for it
    would be one more to trust. Raises ConfigurationError."""
    with tempfile.TemporaryDirectory() as folder:  # of mode 0700
        files = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", str(_VALID_DAYS), "-subj", "/CN=headway", "-keyout", str(files[0]), "-out", str(files[1])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigurationError(
                f"cluster.encryption = 'tls' needs the openssl program on this machine ({error.strerror}): install it "
                "(Debian: openssl), or set 'none' in a network that you trust"
            ) from None
        if done.returncode:
            raise ConfigurationError(f"cluster.encryption: openssl makes no certificate: {done.stderr.strip()[-300:]}")
        return "".join(file.read_text() for file in files)


class ServerEncryption:
    """The server's side of encrypted connections."""

    def __init__(self, certificate: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads it from a file alone; mode 0600
            file.write(certificate)
            file.flush()
            self._context.load_cert_chain(file.name)
        public = certificate[certificate.index("-----BEGIN CERTIFICATE") :]
        self._binding = _digest(ssl.PEM_cert_to_DER_cert(public.strip()))

    async def encrypted(self, sock: socket.socket) -> EncryptedSocket | None:
        """Accept the encrypted connection that begins on ``sock``; None when the client's isn't encrypted. Raises
        ConnectionRefused."""
        await _wait_until_ready(sock, write=False)
        try:
            first = sock.recv(len(_TLS_HANDSHAKE), socket.MSG_PEEK)
        except OSError as error:
            raise ConnectionRefused(f"the connection broke: {error}") from None
        if not first or not _TLS_HANDSHAKE.startswith(first):
            return None
        outer = await _handshake(self._context, sock, server=True)
        return _relayed(outer, self._binding)


async def encrypted_client(sock: socket.socket) -> EncryptedSocket:
    """Encrypt the connection to a server. Raises ConnectionRefused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is unsigned: the handshake that follows proves it by the run's key
    outer = await _handshake(context, sock, server=False)
    certificate = outer.getpeercert(binary_form=True)
    assert certificate is not None
    return _relayed(outer, _digest(certificate))


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


async def _handshake(context: ssl.SSLContext, sock: socket.socket, *, server: bool) -> ssl.SSLSocket:
    try:
        outer = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:  # gone already
        raise ConnectionRefused(f"no encryption: {error}") from None
    try:
        while True:
            try:
                outer.do_handshake()
                return outer
            except ssl.SSLWantReadError:
                await _wait_until_ready(outer, write=False)
            except ssl.SSLWantWriteError:
                await _wait_until_ready(outer, write=True)
    except OSError as error:
        outer.close()
        raise ConnectionRefused(f"no encryption: {error}") from None
    except BaseException:
        outer.close()
        raise


async def _wait_until_ready(sock: socket.socket, write: bool) -> None:
    """Wait until a socket can be read, or written."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(sock)


def _relayed(outer: ssl.SSLSocket, binding: bytes) -> EncryptedSocket:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (near, far):
        end.setblocking(False)
        tune(end)
    ours = EncryptedSocket(fileno=near.detach())
    ours.setblocking(False)
    ours.outer, ours.binding = outer, binding
    threading.Thread(target=_relay, args=(outer, far), name="encryption", daemon=True).start()
    return ours


class _Direction:
    """Bytes on their way from one socket to another."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._first = self._last = 0
        self.ended = False  # the source has, or nothing more can reach the target
        self.cut = False  # the target is gone, and what was for it lost

    @property
    def holds(self) -> bool:
        return self._first < self._last

    @property
    def done(self) -> bool:
        return self.ended and not self.holds

    def move(self) -> bool:
        """Read what is there and write what can be written. Returns whether anything moved."""
        moved = False
        if not self.holds and not self.ended:
            self._first = self._last = 0
            self._read()
            moved = self.holds or self.ended
        if self.holds:
            try:
                self._first += self._target.send(self._buffer[self._first : self._last])
                moved = True
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            except OSError:
                self.ended = self.cut = moved = True
                self._first = self._last
        return moved

    def _read(self) -> None:
        while self._last < BLOCK_BYTES:  # TLS gives no more than a record at a time
            try:
                count = self._source.recv_into(self._buffer[self._last :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                count = 0
            self._last += count
            if not count:
                self.ended = True
                return


def _relay(outer: ssl.SSLSocket, inner: socket.socket) -> None:
    """Carry bytes until one side ends; what it sent last still arrives, also where it ended before it read the rest."""
    inbound, outbound = ways = _Direction(outer, inner), _Direction(inner, outer)
    poll = select.poll()
    with outer, inner:
        try:
            while not all(way.done for way in ways) and not any(way.done and not way.cut for way in ways):
                if inbound.move() | outbound.move():
                    continue
                for sock, source, target in ((outer, inbound, outbound), (inner, outbound, inbound)):
                    mask = (0 if source.holds or source.ended else select.POLLIN) | (
                        select.POLLOUT if target.holds else 0
                    )
                    poll.register(sock, mask)
                    if not mask:  # a closed end would wake it again and again
                        poll.unregister(sock)
                poll.poll()
            if outbound.ended:  # closed at once, with bytes unread, the connection would lose what was sent last
                outer.shutdown(socket.SHUT_WR)
                outer.settimeout(_LINGER_S)
                while outer.recv(BLOCK_BYTES):
                    pass
        except OSError:  # gone already
            return

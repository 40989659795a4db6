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
        paths = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", str(_VALID_DAYS), "-subj", "/CN=headway", "-keyout", str(paths[0]), "-out", str(paths[1])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigurationError(
                f"cluster.encryption = 'tls' needs the openssl program on this machine ({error.strerror}): install it "
                "(Debian: openssl), or set 'none' in a network that you trust"
            ) from None
        if done.returncode:
            raise ConfigurationError(f"cluster.encryption: openssl makes no certificate: {done.stderr.strip()[-300:]}")
        return "".join(file.read_text() for file in paths)


class ServerEncryption:
    """The server's side of encrypted connections."""

    def __init__(self, certificate: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads it from a file alone; mode 0600
            file.write(certificate)
            file.flush()
            self._context.load_cert_chain(file.name)
        public_pem = certificate[certificate.index("-----BEGIN CERTIFICATE") :]
        self._binding = _digest(ssl.PEM_cert_to_DER_cert(public_pem.strip()))

    async def encrypted(self, sock: socket.socket) -> EncryptedSocket | None:
        """Accept the encrypted connection that begins on ``sock``; None when the client's isn't encrypted. Raises
        ConnectionRefused."""
        await _wait_until_ready(sock, write=False)
        try:
            first_bytes = sock.recv(len(_TLS_HANDSHAKE), socket.MSG_PEEK)
        except OSError as error:
            raise ConnectionRefused(f"the connection broke: {error}") from None
        if not first_bytes or not _TLS_HANDSHAKE.startswith(first_bytes):
            return None
        return _relayed(await _handshake(self._context, sock, server=True), self._binding)


async def encrypted_client(sock: socket.socket) -> EncryptedSocket:
    """Encrypt the connection to a server. Raises ConnectionRefused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is unsigned: the handshake that follows proves it by the run's key
    tls_socket = await _handshake(context, sock, server=False)
    certificate_der = tls_socket.getpeercert(binary_form=True)
    assert certificate_der is not None
    return _relayed(tls_socket, _digest(certificate_der))


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


async def _handshake(context: ssl.SSLContext, sock: socket.socket, *, server: bool) -> ssl.SSLSocket:
    try:
        tls_socket = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:  # gone already
        raise ConnectionRefused(f"no encryption: {error}") from None
    try:
        while True:
            try:
                tls_socket.do_handshake()
                return tls_socket
            except ssl.SSLWantReadError:
                await _wait_until_ready(tls_socket, write=False)
            except ssl.SSLWantWriteError:
                await _wait_until_ready(tls_socket, write=True)
    except OSError as error:
        tls_socket.close()
        raise ConnectionRefused(f"no encryption: {error}") from None
    except BaseException:
        tls_socket.close()
        raise


async def _wait_until_ready(sock: socket.socket, write: bool) -> None:
    """Wait until a socket can be read, or written."""
    loop = asyncio.get_running_loop()
    ready_future = loop.create_future()
    watch, unwatch = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    watch(sock, lambda: ready_future.done() or ready_future.set_result(None))
    try:
        await ready_future
    finally:
        unwatch(sock)


def _relayed(outer: ssl.SSLSocket, binding: bytes) -> EncryptedSocket:
    near_socket, far_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (near_socket, far_socket):
        sock.setblocking(False)
        tune(sock)
    encrypted_socket = EncryptedSocket(fileno=near_socket.detach())
    encrypted_socket.setblocking(False)
    encrypted_socket.outer, encrypted_socket.binding = outer, binding
    threading.Thread(target=_relay, args=(outer, far_socket), name="encryption", daemon=True).start()
    return encrypted_socket


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
                byte_count = self._source.recv_into(self._buffer[self._last :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                byte_count = 0
            self._last += byte_count
            if not byte_count:
                self.ended = True
                return


def _relay(outer: ssl.SSLSocket, inner: socket.socket) -> None:
    """Carry bytes until one side ends; what it sent last still arrives, also where it ended before it read the rest."""
    inbound, outbound = flows = _Direction(outer, inner), _Direction(inner, outer)
    poller = select.poll()
    with outer, inner:
        try:
            while not all(flow.done for flow in flows) and not any(flow.done and not flow.cut for flow in flows):
                if inbound.move() | outbound.move():
                    continue
                for sock, reading, writing in ((outer, inbound, outbound), (inner, outbound, inbound)):
                    event_mask = (0 if reading.holds or reading.ended else select.POLLIN) | (
                        select.POLLOUT if writing.holds else 0
                    )
                    poller.register(sock, event_mask)
                    if not event_mask:  # a closed end would wake it again and again
                        poller.unregister(sock)
                poller.poll()
            if outbound.ended:  # closed at once, with bytes unread, the connection would lose what was sent last
                outer.shutdown(socket.SHUT_WR)
                outer.settimeout(_LINGER_S)
                while outer.recv(BLOCK_BYTES):
                    pass
        except OSError:  # gone already
            return

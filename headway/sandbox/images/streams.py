"""Reads archives as streams that are decompressed, hashed and bounded, independently of their headers' claims."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import os
import sys
import zlib
from collections.abc import Callable
from typing import IO, Any, cast

from headway.sandbox.images.tree import ImageError

CHUNK_BYTES = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
UNSUPPORTED = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
DECOMPRESSION_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)


class FileRegion(io.RawIOBase):
    """A range of bytes of a file, read as a file of its own."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor = descriptor
        self._at = start
        self._end = start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = os.pread(self._descriptor, max(0, min(len(buffer), self._end - self._at)), self._at)
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)


class HashingReader:
    """A forward-only stream for `tarfile` that limits the size of a read and hashes all bytes.

    ``take``: as in `layers.unpack`; ``most_bytes``: limit on the bytes of the stream; more raise ImageError.
    """

    def __init__(self, source: IO[bytes], take: Callable[[int], None], most_bytes: int = sys.maxsize) -> None:
        self._source = source
        self._take = take
        self._most_bytes = most_bytes
        self._at = 0
        self.last = b""  # the bytes read last
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:
            raise ImageError(f"it has a header of {size} bytes: it is damaged or malicious")
        chunks: list[bytes] = []
        while size:
            try:
                chunk = self._source.read(size)
            except Exception as error:
                is_zstd_error = type(error).__name__ == "ZstdError"  # its package may not be installed
                if not (is_zstd_error or isinstance(error, DECOMPRESSION_ERRORS)):
                    raise
                raise ImageError(f"it is cut off or damaged: {error}") from None
            if not chunk:
                break
            size -= len(chunk)
            self._at += len(chunk)
            self._take(0)
            if self._at > self._most_bytes:
                raise ImageError(f"it unpacks to more than {self._most_bytes} bytes: give sandbox.store_bytes more")
            self.digest.update(chunk)
            chunks.append(chunk)
        self.last = b"".join(chunks)
        return self.last

    def tell(self) -> int:
        return self._at

    def seek(self, to: int) -> None:
        if to < self._at:
            raise ImageError("one of its headers points backwards: it is damaged or malicious")
        while self._at < to and self.read(min(CHUNK_BYTES, to - self._at)):
            pass

    def drain(self) -> None:
        while self.read(CHUNK_BYTES):
            pass


def decompress(raw: io.BufferedReader) -> tuple[IO[bytes], bool]:
    """Return the decompressed stream, and whether its first bytes show a compression at all. Raises ImageError."""
    first_bytes = raw.peek(8)
    if first_bytes.startswith(GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb")), True
    if first_bytes.startswith(ZSTD):
        return _zstd(raw), True
    for magic, name in UNSUPPORTED.items():
        if first_bytes.startswith(magic):
            raise ImageError(f"it is compressed with {name}: valid: gzip, zstd, and none")
    return raw, False


def _zstd(raw: io.BufferedReader) -> IO[bytes]:
    try:
        return importlib.import_module("compression.zstd").ZstdFile(raw)  # Python 3.14
    except ImportError:
        pass
    try:
        decompressor = importlib.import_module("zstandard").ZstdDecompressor()
        return decompressor.stream_reader(raw, read_across_frames=True)
    except ImportError:
        raise ImageError("it is compressed with zstd: pip install zstandard, or compress it with gzip") from None


def sha256_of(source: IO[bytes], take: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        take(0)
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"

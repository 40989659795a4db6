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
        data = os.pread(self._descriptor, max(0, min(len(buffer), self._end - self._at)), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


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
        parts: list[bytes] = []
        while size:
            try:
                part = self._source.read(size)
            except Exception as error:
                zstd = type(error).__name__ == "ZstdError"  # its package may not be installed
                if not (zstd or isinstance(error, DECOMPRESSION_ERRORS)):
                    raise
                raise ImageError(f"it is cut off or damaged: {error}") from None
            if not part:
                break
            size -= len(part)
            self._at += len(part)
            self._take(0)
            if self._at > self._most_bytes:
                raise ImageError(f"it unpacks to more than {self._most_bytes} bytes: give sandbox.store_bytes more")
            self.digest.update(part)
            parts.append(part)
        self.last = b"".join(parts)
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
    start = raw.peek(8)
    if start.startswith(GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb")), True
    if start.startswith(ZSTD):
        return _zstd(raw), True
    for mark, name in UNSUPPORTED.items():
        if start.startswith(mark):
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
    while data := source.read(CHUNK_BYTES):
        take(0)
        digest.update(data)
    return f"sha256:{digest.hexdigest()}"

"""Places outside the run's machines that versions go through: a bucket or folder of pyarrow's, or an HTTP server.

Objects are written once, under names that have their content's checksum, so that two publishers never mix. Nothing that
a store returns is trusted: readers hash what they have got. Torch-free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedDelta, PublishedWeights
from headway.weights.deltas import chain_to
from headway.weights.slot_file import HEADER, version_in

T = TypeVar("T")
_CHUNK_BYTES = 8 << 20
_CONNECTIONS = 4
_TRIES = 6
_FIRST_PAUSE_S = 0.2  # before the second try; then twice as long each time
_TIMEOUT_S = 60.0  # of one request without progress
_KEPT_WHOLE = 2  # versions in a store: one may still be read


class Store(Protocol):
    """Objects by name. Every method raises OSError, FileNotFoundError for an object that isn't there."""

    def write(self, name: str, path: Path) -> None:
        """Store a file's content."""
        ...

    def size(self, name: str) -> int:
        """The bytes of an object."""
        ...

    def read(self, name: str, first: int, count: int) -> bytes:
        """A range of an object."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object."""
        ...


def open_store(address: str) -> Store:
    """The store at ``address``: s3://BUCKET/PREFIX, file:///FOLDER and others of pyarrow's, or http(s)://HOST/PREFIX.
    Raises OSError."""
    return _HttpStore(address) if urlsplit(address).scheme in ("http", "https") else _ArrowStore(address)


class _ArrowStore:
    """Credentials are those of the environment (AWS_ACCESS_KEY_ID, ...) or of the machine."""

    def __init__(self, address: str) -> None:
        from pyarrow import fs  # here: its S3 client takes a while

        try:
            self._files, self._prefix = fs.FileSystem.from_uri(address)
        except ValueError as error:  # pyarrow's
            raise OSError(f"no store: {error}") from None

    def write(self, name: str, path: Path) -> None:
        with path.open("rb") as file, self._files.open_output_stream(f"{self._prefix}/{name}") as target:
            while content := file.read(_CHUNK_BYTES):
                target.write(content)

    def size(self, name: str) -> int:
        size = self._files.get_file_info(f"{self._prefix}/{name}").size
        if size is None:
            raise FileNotFoundError(2, "No such object", name)
        return size

    def read(self, name: str, first: int, count: int) -> bytes:
        with self._files.open_input_file(f"{self._prefix}/{name}") as source:
            source.seek(first)
            return source.read(count)

    def remove(self, name: str) -> None:
        self._files.delete_file(f"{self._prefix}/{name}")


class _HttpStore:
    """A server that takes PUT and DELETE, and answers GET with ranges."""

    def __init__(self, address: str) -> None:
        import httpx  # here: most runs have no such store

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs the URL of each request
        self._errors: Any = httpx.HTTPError
        # Ranges are of the object's bytes, not of compressed ones.
        self._client = httpx.Client(timeout=_TIMEOUT_S, headers={"Accept-Encoding": "identity"})
        self._address = address.rstrip("/")

    def write(self, name: str, path: Path) -> None:
        self._request("PUT", name, content=path.read_bytes())

    def size(self, name: str) -> int:
        length = self._request("HEAD", name).headers.get("content-length", "")
        if not length.isdecimal():
            raise OSError(f"HEAD {name}: no content-length")
        return int(length)

    def read(self, name: str, first: int, count: int) -> bytes:
        answer = self._request("GET", name, headers={"Range": f"bytes={first}-{first + count - 1}"})
        return answer.content if answer.status_code == 206 else answer.content[first : first + count]

    def remove(self, name: str) -> None:
        self._request("DELETE", name)

    def _request(self, method: str, name: str, **options: Any) -> Any:
        try:
            answer = self._client.request(method, f"{self._address}/{name}", **options)
        except self._errors as error:
            raise OSError(f"{method} {name}: {type(error).__name__}: {error}") from None
        if answer.status_code in (404, 410):
            raise FileNotFoundError(2, "No such object", name)
        if answer.status_code >= 300:  # nor is anything stored by a redirection
            raise OSError(f"{method} {name}: status {answer.status_code}")
        return answer


class StoreWriter:
    """Keeps a store such that a reader with nothing can have the newest version: a whole one, and deltas from there."""

    def __init__(self, store: Store, stem: str) -> None:
        """``stem``: of the objects' names."""
        self._store, self._stem = store, stem
        self._whole: list[PublishedWeights] = []  # in the store, the newest one last
        self._deltas: dict[str, str] = {}  # names of the objects, by digest

    def store(self, published: PublishedWeights) -> PublishedWeights:
        """Store what is new of a version that was published on this machine; returns the whole version that is there,
        as it was published. Raises WeightsCorrupt where the store fails."""
        for delta in published.deltas:
            if delta.digest not in self._deltas:
                self._deltas[delta.digest] = self._put(delta_name(self._stem, delta), delta)
        newest = self._whole[-1] if self._whole else None
        leads = newest is not None and bool(chain_to(published, newest.version, newest.checksum))
        if newest is None or not (leads or newest.checksum == published.checksum):
            self._put(whole_name(self._stem, published), published)
            self._whole.append(published)
        self._remove_old(published)
        return self._whole[-1]

    def close(self) -> None:
        """Remove all objects."""
        self._remove([*self._deltas.values(), *(whole_name(self._stem, version) for version in self._whole)])

    def _put(self, name: str, file: PublishedDelta | PublishedWeights) -> str:
        again(f"version {file.version} can't be stored", lambda: self._store.write(name, Path(file.path)))
        return name

    def _remove_old(self, published: PublishedWeights) -> None:
        old_digests = self._deltas.keys() - {delta.digest for delta in published.deltas}
        old_names = [whole_name(self._stem, old) for old in self._whole[:-_KEPT_WHOLE]]
        del self._whole[:-_KEPT_WHOLE]
        self._remove([*old_names, *map(self._deltas.pop, old_digests)])

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                again(name, partial(self._store.remove, name))
            except WeightsCorrupt as error:
                logging.getLogger(__name__).warning("objects stay in the store: %s", error)
                return


def whole_name(stem: str, published: PublishedWeights) -> str:
    """The object of a whole version."""
    return f"{stem}-{published.version}-{published.checksum}.weights"


def delta_name(stem: str, delta: PublishedDelta) -> str:
    """The object of a delta."""
    return f"{stem}-{delta.version}-{delta.digest}.delta"


class StoreTransfer:
    """The transfer of an object, over some connections: a `transfers.MirrorTransfer` of another source."""

    def __init__(self, store: Store, name: str, version: int, *, is_delta: bool = False) -> None:
        """Raises WeightsCorrupt if the object isn't there, or the store fails."""
        self._store, self._name, self._version, self._is_delta = store, name, version, is_delta
        self._why = f"version {version} from the store"
        self.size, self.header = again(self._why, lambda: store.size(name)), b""

    def receive_into(self, content: memoryview, on_chunk: Callable[[int, int], bool]) -> None:
        """See `MirrorTransfer.receive_into`."""

        def fetch(first: int) -> None:
            count = min(_CHUNK_BYTES, self.size - first)
            chunk = again(self._why, lambda: self._store.read(self._name, first, count))
            if len(chunk) != count:
                raise WeightsCorrupt(f"{self._why}: {len(chunk)} bytes of {count}")
            skipped_bytes = 0 if first or self._is_delta else HEADER.size
            if skipped_bytes:
                self.header = chunk[:skipped_bytes]
            content[first + skipped_bytes : first + count] = chunk[skipped_bytes:]
            on_chunk(first, first + count)

        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(fetch, range(0, self.size, _CHUNK_BYTES)))
        if not self._is_delta and version_in(self.header) != self._version:
            raise WeightsCorrupt(f"{self._why} is another one: {version_in(self.header)}")


def problem_with(address: str, stem: str, scratch: Sequence[Path]) -> str:
    """Explain why a store can't be written and read; "" where it can. ``scratch``: folders for a small file."""
    name, path = f"{stem}-check", scratch[0] / f"{stem}-check"
    try:
        path.write_bytes(b"headway")
        store = open_store(address)
        store.write(name, path)
        content = store.read(name, 2, 3)
        store.remove(name)
    except OSError as error:
        return str(error)
    finally:
        path.unlink(missing_ok=True)
    return "" if content == b"adw" else f"it returned {content!r} for bytes 2 to 4 of {name}"


def again(why: str, call: Callable[[], T]) -> T:
    """Call a store until it succeeds; raises WeightsCorrupt, which begins with ``why``, after the last of some tries,
    and at once for an object that isn't there."""
    for attempt in range(1, _TRIES + 1):
        try:
            return call()
        except FileNotFoundError as error:
            raise WeightsCorrupt(f"{why}: {error}") from None
        except OSError as error:
            if attempt == _TRIES:
                raise WeightsCorrupt(f"{why}: {error}") from None
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("unreachable")

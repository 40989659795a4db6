"""The file that `headway serve --record` keeps: a line for each session that is over, through times without room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec

from headway.generator.recording.sessions import Session, key_digest
from headway.records.errors import HeadwayError
from headway.records.tokens import plain
from headway.runtime.line_file import LineFile

_KEY_DIGITS = 16  # of the BLAKE2b digest of a key: sessions of one name are told apart, and the key isn't given away
_MOST_KEPT_BYTES = 256 << 20  # of lines that there is no room for


class SessionRecord:
    """Lines are written in the order in which sessions end. What the file doesn't take is kept, and written once it
    does; while that is so, serving goes on. Never half a line: LineFile.

    Whoever stops using it, or serves on for long, is told what was lost, or would be: `close`, `write`.
    """

    def __init__(
        self, file: LineFile, on_event: Callable[[str, str], object], most_kept_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        """``on_event(name, detail)`` is told when there is no room, and when there is again."""
        self._file = file
        self._on_event = on_event
        self._most_kept_bytes = most_kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._why = ""  # the file takes nothing; "": it does

    def add(self, session: Session) -> None:
        """Write down a session that is over. Raises nothing: its caller is somebody's request."""
        line = recorded_line(session)
        if line is not None:
            self._kept.append(line)
            self._kept_bytes += len(line)
            self._try()

    def write(self) -> None:
        """Try again. Raises HeadwayError when more is kept than may be: serving on would lose it."""
        self._try()
        if self._kept_bytes > self._most_kept_bytes:
            raise HeadwayError(f"{len(self._kept)} sessions, {self._kept_bytes} bytes, wait for room: {self._why}")

    def close(self) -> None:
        """Raises HeadwayError where sessions were not written."""
        self._try()
        if self._kept:
            raise HeadwayError(f"{len(self._kept)} sessions are lost: {self._why}")

    def _try(self) -> None:
        why = ""
        while self._kept and not why:
            try:
                self._file.append(self._kept[0])
            except HeadwayError as error:
                why = str(error)
            else:
                self._kept_bytes -= len(self._kept.popleft())
        if why and not self._why:
            self._on_event("record_waits", f"{why}; sessions that are over are kept until there is room")
        elif self._why and not why:
            self._on_event("record_goes_on", f"{self._file.path} takes them again")
        self._why = why

    def __enter__(self) -> SessionRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def recorded_line(session: Session) -> bytes | None:
    """A session that is over as a line of JSON: its name, its key's digest shortened, its reward, its token-exact
    branches. None: nothing was answered."""
    recorded = session.seal()
    if not recorded.branches:
        return None
    key = key_digest(session.key).hex()[:_KEY_DIGITS] if session.key else ""
    return msgspec.json.encode(
        {"rollout": session.rollout, "key": key, **msgspec.to_builtins(recorded, enc_hook=plain)}
    )

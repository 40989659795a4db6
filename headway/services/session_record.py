"""The file of `headway serve --record`: a line for each ended session; lines wait in memory while the disk is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from headway.generator.recording.sessions import Session, key_digest
from headway.records.errors import HeadwayError
from headway.records.tokens import plain
from headway.runtime.line_file import LineFile

_KEY_DIGITS = 16  # of a key's BLAKE2b digest: tells sessions of one name apart without revealing the key
_MOST_KEPT_BYTES = 256 << 20  # of lines that wait for room


class SessionRecord:
    """Writes ended sessions to a file, a line each, in the order in which they end.

    Lines that the file can't take (a full disk) are kept in memory and written once it can; serving continues. LineFile
    never leaves half a line. `close` raises when lines are lost, `write` when more wait than may be kept.
    """

    def __init__(
        self, file: LineFile, on_event: Callable[[str, str], object], most_kept_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        """``on_event(name, detail)`` is called when the file takes no more lines, and when it does again."""
        self._file = file
        self._on_event = on_event
        self._most_kept_bytes = most_kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._why = ""  # the error with which the file refuses lines; "": it takes them

    def add(self, session: Session) -> None:
        """Record an ended session. Never raises: the caller is a request of some other session."""
        line = recorded_line(session)
        if line is not None:
            self._kept.append(line)
            self._kept_bytes += len(line)
            self._try()

    def write(self) -> None:
        """Retry the lines that wait. Raises HeadwayError when they are more bytes than may be kept."""
        self._try()
        if self._kept_bytes > self._most_kept_bytes:
            raise HeadwayError(f"{len(self._kept)} sessions, {self._kept_bytes} bytes, wait for room: {self._why}")

    def close(self) -> None:
        """Retry the lines that wait for the last time. Raises HeadwayError when sessions remain unwritten."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


def recorded_line(session: Session) -> bytes | None:
    """The JSON line of an ended session: its name, its key's shortened digest, its reward and its token-exact branches.
    None: nothing was answered."""
    recorded = session.seal()
    if not recorded.branches:
        return None
    key = key_digest(session.key).hex()[:_KEY_DIGITS] if session.key else ""
    return msgspec.json.encode(
        {"rollout": session.rollout, "key": key, **msgspec.to_builtins(recorded, enc_hook=plain)}
    )

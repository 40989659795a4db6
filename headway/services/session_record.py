"""Writes the file of `headway serve --record`, a line for each ended session. Lines wait in memory while the disk is
full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from headway.generator.recording.sessions import Session, key_digest
from headway.records.errors import HeadwayError
from headway.records.tokens import plain
from headway.runtime.line_file import LineFile

_KEY_DIGITS = 16  # of a key's BLAKE2b digest: distinguishes sessions of one name without revealing the key
_MAX_KEPT_BYTES = 256 << 20  # of lines that wait for disk space


class SessionRecord:
    """Writes a line for each ended session to a file, in the order in which the sessions end.

    Lines that can't be written (the disk is full) are kept in memory and written later; serving continues. LineFile
    never leaves half a line. `close` raises when lines are lost, `write` when more bytes wait than may be kept.
    """

    def __init__(
        self, file: LineFile, on_event: Callable[[str, str], object], max_kept_bytes: int = _MAX_KEPT_BYTES
    ) -> None:
        """Write to ``file``. ``on_event(name, detail)`` is called when writing starts to fail, and works again."""
        self._file = file
        self._on_event = on_event
        self._max_kept_bytes = max_kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._why = ""  # error of the last write; "": it succeeded

    def add(self, session: Session) -> None:
        """Record an ended session. Never raises, since the caller is a request of another session."""
        line = recorded_line(session)
        if line is not None:
            self._kept.append(line)
            self._kept_bytes += len(line)
            self._write_kept()

    def write(self) -> None:
        """Retry the lines that wait. Raises HeadwayError when they are more bytes than may be kept."""
        self._write_kept()
        if self._kept_bytes > self._max_kept_bytes:
            raise HeadwayError(f"{len(self._kept)} sessions, {self._kept_bytes} bytes, wait for space: {self._why}")

    def close(self) -> None:
        """Retry the lines that wait for the last time. Raises HeadwayError when sessions remain unwritten."""
        self._write_kept()
        if self._kept:
            raise HeadwayError(f"{len(self._kept)} sessions are lost: {self._why}")

    def _write_kept(self) -> None:
        error_text = ""
        while self._kept and not error_text:
            try:
                self._file.append(self._kept[0])
            except HeadwayError as error:
                error_text = str(error)
            else:
                self._kept_bytes -= len(self._kept.popleft())
        if error_text and not self._why:
            self._on_event("record_waits", f"{error_text}; sessions that are over are kept until there is space")
        elif self._why and not error_text:
            self._on_event("record_goes_on", f"{self._file.path} takes them again")
        self._why = error_text

    def __enter__(self) -> SessionRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recorded_line(session: Session) -> bytes | None:
    """Return the JSON line of an ended session: name, shortened digest of its key, reward and token-exact branches.
    None: the session has no answers."""
    recorded_session = session.seal()
    if not recorded_session.branches:
        return None
    key_text = key_digest(session.key).hex()[:_KEY_DIGITS] if session.key else ""
    return msgspec.json.encode(
        {"rollout": session.rollout, "key": key_text, **msgspec.to_builtins(recorded_session, enc_hook=plain)}
    )

"""An append-only file of lines, in which a kill or a full disk never leaves a torn line in the middle."""

from __future__ import annotations

import os
from pathlib import Path

from headway.records.errors import ConfigurationError, HeadwayError

_BLOCK_BYTES = 1 << 16


class LineFile:
    """The writer of a file of lines.

    Each line is one ``write`` call, so a kill tears at most the last line; opening truncates a torn end. After
    ``append`` returned, the line is with the operating system; on a full disk it is truncated again.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``. Raises ConfigurationError when that fails."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"{path} can't be opened: {error.strerror}") from None
        os.ftruncate(self._fd, self._end_of_lines())

    def _end_of_lines(self) -> int:
        """Size of the file without a torn end, found from its tail: a long run's file is not read whole."""
        end = os.fstat(self._fd).st_size
        while end:
            start = max(0, end - _BLOCK_BYTES)
            newline_index = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline_index >= 0:
                return start + newline_index + 1
            end = start
        return 0

    def append(self, line: bytes) -> None:
        """Append ``line``, which has no line break. Raises HeadwayError on a full disk."""
        written_bytes, reason = 0, "no space left"
        try:
            written_bytes = os.write(self._fd, line + b"\n")
        except OSError as error:
            reason = error.strerror or str(error)
        if written_bytes <= len(line):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written_bytes)
            raise HeadwayError(f"{self.path} can't be written: {reason}")

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

"""An agent's output, in a file of limited size."""

from __future__ import annotations

import contextlib
import os

_LAST_BYTES = 1 << 16  # kept of the output after the file is full
_PIECE_BYTES = 1 << 16
_MOST_PIECES = 64  # read from the pipe at the end: a pipe holds 16


class AgentLog:
    """A pipe for an agent's output, and the file it is written to: the first ``most_bytes`` as they arrive, and at the
    agent's end the last ones, after a note of how many were left out.

    The agent notices neither a full file nor a full disk.
    """

    def __init__(self, path: str, most_bytes: int) -> None:
        """Raises OSError where no pipe can be made."""
        self.pipe, self.output = os.pipe()  # the end that is read here; the agent's end
        os.set_blocking(self.pipe, False)
        self.ended = False  # all writers have closed the pipe
        self._remaining_bytes = most_bytes
        self._left_out_bytes = 0
        self._last = b""
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """Read available output into the file; returns False where there is none."""
        try:
            chunk = os.read(self.pipe, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self.ended = not chunk
        file_part, tail_part = chunk[: self._remaining_bytes], chunk[self._remaining_bytes :]
        self._remaining_bytes -= len(file_part)
        self._write(file_part)
        if tail_part:
            self._last += tail_part
            self._left_out_bytes += max(0, len(self._last) - _LAST_BYTES)
            self._last = self._last[-_LAST_BYTES:]
        return bool(chunk)

    def close_output(self) -> None:
        """Close this process's copy of the agent's end of the pipe."""
        os.close(self.output)

    def close(self) -> None:
        """Write an ended agent's last output to the file, and close the pipe and the file."""
        for _ in range(_MOST_PIECES):
            if not self.take():
                break
        if self._left_out_bytes:
            self._write(f"\n[{self._left_out_bytes} bytes left out]\n".encode())
        self._write(self._last)
        os.close(self.pipe)
        if self._file is not None:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        if self._file is not None and data:
            with contextlib.suppress(OSError):
                os.write(self._file, data)

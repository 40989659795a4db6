"""The trace of a run, ``RUN/trace.jsonl``: spans and marks over time, written during the run for `headway trace`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine
from headway.records.trace import Mark, Span, TraceLine, TraceSession
from headway.runtime.line_file import LineFile
from headway.runtime.run_directory import require_schema

if TYPE_CHECKING:
    from headway.runtime.clock import Clock

FILE_NAME = "trace.jsonl"
OLD_NAME = "trace.old.jsonl"  # the previous file; the two hold the newest part of a long run
SEGMENT_BYTES = 64 << 20
TICK_S = 0.5  # between two writes; a kill loses at most this part of a trace
EVENT_TRACE_FAILED = "trace_failed"

Line = TypeVar("Line")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceLine)


class TraceFile:
    """The writer of a run's trace, which writes twice a second and at its end. A failed write ends the trace, not the
    run, and calls ``on_failure(event, detail)``.

    Invariant: at most two files of about SEGMENT_BYTES, each starting with the session its times belong to.
    """

    def __init__(
        self,
        run_dir: str | Path,
        clock: Clock,
        unix_s: float,
        *,
        on_failure: Callable[[str, str], None] = lambda event, detail: None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """``unix_s``: the present Unix time. Raises ConfigurationError if the file can't be opened."""
        self.path = Path(run_dir) / FILE_NAME
        self._on_failure = on_failure
        self._clock = clock
        self._session = TraceSession(clock_s=clock.now(), unix_s=unix_s)
        self._segment_bytes = segment_bytes
        self._file: LineFile | None = None
        self._size = 0
        self._pending: list[bytes] = []
        self._written_s = -math.inf
        self._open()

    def write(self, line: TraceLine) -> None:
        """Append ``line`` at the next tick; never raises."""
        if self._file is None:
            return
        encoded_line = _encoder.encode(line)
        self._pending.append(encoded_line)
        self._size += len(encoded_line) + 1
        if self._size >= self._segment_bytes or self._clock.now() - self._written_s >= TICK_S:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._file is None or not self._pending:
            return
        pending, self._pending = self._pending, []
        self._written_s = self._clock.now()
        try:
            self._file.append(b"\n".join(pending))
            if self._size >= self._segment_bytes:
                self._rotate()
        except (OSError, HeadwayError) as error:
            self.close()
            self._on_failure(EVENT_TRACE_FAILED, f"the trace ends here: {error}")

    def on_line(self, line: LedgerLine) -> None:
        """Add evaluations and events to the trace, as a subscriber of the ledger."""
        now_s = self._clock.now()
        if isinstance(line, EvaluationRecord):
            name = f"{line.split} {line.phase}"
            start_s = now_s - line.duration_s
            self.write(Span(track="evaluation", name=name, start_s=start_s, end_s=now_s, step=line.step))
        elif isinstance(line, EventRecord):
            self.write(Mark(event=line.event, detail=line.detail[:300], time_s=now_s))

    def close(self) -> None:
        """Write pending lines and close the file; a second call is a no-op."""
        self._write_pending()
        file, self._file = self._file, None
        if file is not None:
            file.__exit__(None, None, None)

    def _open(self) -> None:
        self._file = LineFile(self.path)
        self._size = os.path.getsize(self.path)
        encoded_line = _encoder.encode(self._session)
        self._file.append(encoded_line)
        self._size += len(encoded_line) + 1

    def _rotate(self) -> None:
        self.close()
        os.replace(self.path, self.path.with_name(OLD_NAME))
        self._open()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(run_dir: str | Path) -> list[TraceLine]:
    """Read the lines of a run's trace, oldest first. A torn last line, from a kill or from reading while the run
    writes, is left out. Raises ConfigurationError if there is no trace, the run has another schema, or a line is
    damaged."""
    folder = Path(run_dir)
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise ConfigurationError(f"{run_dir} holds no run: there is no such folder")
    require_schema(folder)
    content_by_path: dict[Path, bytes] = {}
    for file in (folder / OLD_NAME, path):
        with contextlib.suppress(FileNotFoundError):
            content_by_path[file] = file.read_bytes()
    if path not in content_by_path:
        missing_text = "no trace" if (folder / "ledger.jsonl").exists() else "no run"
        hint_text = "; ledger.trace may be false" if missing_text == "no trace" else ""
        raise ConfigurationError(f"{run_dir} holds {missing_text}: there is no {path}{hint_text}")
    return [line for file, content in content_by_path.items() for line in decoded_lines(file, content, _decoder.decode)]


def decoded_lines(path: Path, data: bytes, decode: Callable[[bytes], Line]) -> list[Line]:
    """Decode the lines of a file's ``data``, without a torn last line. Raises ConfigurationError, which names a damaged
    line."""
    decoded: list[Line] = []
    complete_lines = data.split(b"\n")[:-1]  # text after the last line break is torn, or empty
    for line_number, line_bytes in enumerate(complete_lines, start=1):
        try:
            decoded.append(decode(line_bytes))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}, line {line_number} is damaged: {error}") from None
    return decoded

"""The ledger: an append-only JSONL file of a run's measurements, its subscribers and its reader."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine
from headway.runtime.line_file import LineFile
from headway.runtime.run_directory import require_schema

if TYPE_CHECKING:
    from headway.runtime.clock import Clock

FILE_NAME = "ledger.jsonl"

# Events whose names the readers know. Any other name is displayed unchanged.
EVENT_START = "start"  # a run started; data: counts and digests of its training tasks and demonstrations
EVENT_RESUME = "resume"  # a run was resumed: steps recorded after it may repeat earlier ones; data as above
EVENT_LEFT_OUT = (
    "tasks_left_out"  # their own answers don't solve them; detail: a row and why; data: split, source, tasks
)
EVENT_ACCOUNTING = "accounting"  # data: balanced 0/1, open, and the accounting's counts (`Accounting.data`)
EVENT_COUNTED = "counted"  # of a resumed run, before its next step: endings so far; data: the accounting's counts
EVENT_NO_PROGRESS = "no_progress"  # consecutive groups end untrained; data: groups, the last group's reason, and the
# accounting's counts if the run ends because of it
EVENT_MOSTLY_SOLVED = "mostly_solved"  # ... because their tasks are solved already; data as above
EVENT_CONTROL = "control"  # the controller; data: kind, knob, old, new, predicted, measured (rate ratios), mode; for a
# recommendation the experiment's keys with their values
EVENT_PLAN_CHANGED = "plan_changed"  # data: before, after, gain and rate (samples/s before), cost_s, as expected too
EVENT_PLAN_KEPT = "plan_kept"  # a change of plan failed and was reverted; data as above
EVENT_PLAN_OUTCOME = "plan_outcome"  # some steps after a change; data: rate, expected, measured (samples/s), cost_s
EVENT_SERVICE = "buffer_service"  # detail: where outside workers lease members
EVENT_BEST = "best"  # data: version of the checkpoint that is now the best
EVENT_LAST_KEPT = "last_kept"  # there was no validation: best/ has the last version
EVENT_END = "end"  # the run ended in order; detail: the reason
EVENT_STALLED = "stalled"  # a wait is too long; detail: its cause; data: wait, expected_s, stacks of waiter and worker
EVENT_STALL_ENDED = "stall_ended"  # of the same worker
EVENT_ALERT = "alert"  # a rule of [alerts] holds; data: rule, at (Unix time), host
EVENT_ALERT_CLEARED = "alert_cleared"  # a rule no longer holds; data: rule
EVENT_SIMULATED = "simulated"  # the run is a simulation; detail names the scenario

_BLOCK_BYTES, _MAX_LINE_BYTES = 1 << 22, 1 << 26  # of a read; of a line
_ENDING_BYTES = 256  # of the line that was read last; if they differ later, the file was truncated
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LedgerLine)

Subscriber = Callable[[LedgerLine], None]


class Ledger:
    """The writer of ``RUN/ledger.jsonl``.

    Lifecycle: *open* (``record`` appends) -> *closed*. Each line is one ``write`` call, so a kill leaves at most
    one torn line, at the end; opening the ledger of a resumed run truncates it.

    Invariant: after ``record`` returns, the operating system has the line, which survives a kill of this process.
    ``record`` never leaves a partial line: on a full disk it truncates the line again and raises.

    Example: ``ledger.record(StepRecord(step=0, version=1)); ledger.event("checkpoint", step=1)``.
    """

    def __init__(self, run_dir: str | Path, clock: Clock) -> None:
        """Open the ledger of ``run_dir``; ``clock`` stamps events. Raises ConfigurationError if the existing ledger is
        damaged."""
        self.path = Path(run_dir) / FILE_NAME
        self._clock = clock
        self._opened_s = clock.now()
        self._subscribers: list[Subscriber] = []
        with contextlib.suppress(OSError):  # there is no ledger yet, or it can't be opened, which LineFile reports
            _truncate_torn_end(self.path)
        self._file: LineFile | None = LineFile(self.path)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with every line recorded from now on, after it is written."""
        self._subscribers.append(subscriber)

    def record(self, line: LedgerLine) -> None:
        """Append ``line``, then call the subscribers with it. Raises HeadwayError on a full disk."""
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        self._file.append(_encoder.encode(line))
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(line)
            except Exception as error:
                # The boundary to subscribers: a view that fails must not end the run.
                self._subscribers.remove(subscriber)
                self.event("view_failed", f"{type(error).__name__}: {error}")

    def event(self, event: str, detail: str = "", step: int = 0, **data: float | int | str) -> None:
        """Record an EventRecord stamped with the time since the ledger was opened."""
        self.record(EventRecord(event=event, detail=detail, step=step, time_s=self.time_s, data=data))

    @property
    def time_s(self) -> float:
        """The time since the ledger was opened."""
        return self._clock.now() - self._opened_s

    def close(self) -> None:
        """Close the file; a second call is a no-op."""
        file, self._file = self._file, None
        if file is not None:
            file.__exit__(None, None, None)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_ledger(run_dir: str | Path) -> list[LedgerLine]:
    """Read the lines of ``RUN/ledger.jsonl``, in the order they were recorded, with replays resolved.

    A step or an evaluation that was recorded again after a resume keeps only its last record, a step with the skipped
    attempts before it. A torn last line, from a kill or from reading while the run writes, is left out.
    Raises ConfigurationError if there is no ledger, its schema is another one, or a line inside it is damaged.
    """
    return list(read_ledger_tail(run_dir).lines.values())


def read_ledger_tail(run_dir: str | Path) -> LedgerTail:
    """Read ``RUN/ledger.jsonl`` to its end as a LedgerTail, with the errors of `read_ledger`."""
    path = Path(run_dir) / FILE_NAME
    require_schema(run_dir)
    try:
        return _read_to_the_end(path)
    except (FileNotFoundError, NotADirectoryError):
        folder_text = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigurationError(f"{run_dir} holds no run: there is no {path}{folder_text}") from None


def _read_to_the_end(path: Path) -> LedgerTail:
    tail = LedgerTail(path)
    tail.read()
    # The last line may be damaged: after a power failure its length may be on disk but not its bytes.
    if tail.damaged and (tail.first_damaged < tail.read_lines - 1 or tail.torn.strip()):
        lineno = tail.first_damaged + 1
        raise ConfigurationError(
            f"{path}, line {lineno} is damaged: {tail.damage}; remove it (sed -i {lineno}d {path}): reports and "
            "--resume need none of the lines, and lack what this one held"
        )
    return tail


class LedgerTail:
    """The lines of a ledger so far, with replays resolved. `refresh` reads appended lines, and counts unreadable ones.
    ``max_bytes``: the first read skips everything before the file's last ``max_bytes``."""

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path, self._max_bytes = path, max_bytes
        self.lines: dict[int, LedgerLine] = {}  # by number, from 0
        self.read_lines = 0
        self.damaged, self.first_damaged, self.damage = 0, -1, ""  # lines, the first one's number, its error
        self.torn = b""  # the first bytes after the last line's end, half-written or damaged
        self.intact_bytes = 0  # of the file, up to the end of the last readable line
        self.written_unix_s: float | None = None
        self._inode, self._offset, self._size = -1, 0, -1
        self._ending = b""  # the last bytes that were read
        self._replays = Replays()

    @property
    def duration_s(self) -> float:
        """The summed time of all sessions so far, in seconds; each session restarts its clock."""
        return self._replays.duration_s

    @property
    def earlier_s(self) -> float:
        """The summed time of the sessions before the present one, in seconds."""
        return self._replays.earlier_s

    @property
    def problems(self) -> list[str]:
        """Sentences on unreadable parts of the file."""
        problems = [f"{self.damaged} damaged lines, the first: {self.damage}"] if self.damaged else []
        if self.torn.startswith(b"{"):
            problems.append("the last line is half-written")
        elif self.torn:
            problems.append("what follows the last line is damaged")
        return [f"{self.path.name}: {problem}" for problem in problems]

    def replaced(self) -> bool:
        """Whether the path now has another file, or the file was truncated, as a resume removes a damaged end; the file
        may have grown since. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(max(0, self._offset - len(self._ending)))
            is_same = file.read(len(self._ending)) == self._ending
            return self._inode >= 0 and (os.fstat(file.fileno()).st_ino != self._inode or not is_same)

    def read(self) -> None:
        """Read the appended lines. Raises OSError if the file can't be read."""
        deque(self.refresh(), maxlen=0)

    def refresh(self) -> Iterator[tuple[int, LedgerLine, list[int]]]:
        """Read the appended lines, and yield each with its number and the numbers of earlier lines that it replaces.
        Raises OSError if the file can't be read."""
        with self.path.open("rb") as file:
            file_status, incomplete = os.fstat(file.fileno()), b""
            if file_status.st_size == self._size:
                return
            self._inode = file_status.st_ino
            if self._max_bytes and not self._offset and file_status.st_size > self._max_bytes:
                file.seek(file_status.st_size - self._max_bytes)
                file.readline()  # a part of a line
            else:
                file.seek(self._offset)
            position = file.tell()
            while block := file.read(_BLOCK_BYTES):
                *texts, incomplete = (incomplete + block).split(b"\n")
                for text in texts:
                    position = self._offset = position + len(text) + 1  # where an interrupted read continues
                    self._ending = text[-_ENDING_BYTES:] + b"\n"
                    yield from self._take(text, position)
                if len(incomplete) > _MAX_LINE_BYTES:  # no line of a ledger
                    position, self._ending = position + len(incomplete), incomplete[-_ENDING_BYTES:]
                    self._offset = position
                    yield from self._take(incomplete, position)
                    incomplete = b""
            self.written_unix_s, self.torn = file_status.st_mtime, incomplete[:64]
            self._size = file_status.st_size

    def _take(self, text: bytes, position: int) -> Iterator[tuple[int, LedgerLine, list[int]]]:
        line_number, self.read_lines = self.read_lines, self.read_lines + 1
        try:
            line = decode_line(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if not self.damaged:
                self.first_damaged, self.damage = line_number, str(error)[:120]
            self.damaged += 1
            return
        replaced_numbers = self._replays.take(line_number, line)
        for replaced_number in replaced_numbers:
            del self.lines[replaced_number]
        self.lines[line_number], self.intact_bytes = line, position
        yield line_number, line, replaced_numbers


def duration_of(lines: Iterable[LedgerLine]) -> float:
    """The summed time of all sessions in ``lines``, in seconds; each session restarts its clock."""
    sessions = Replays()
    for line_number, line in enumerate(lines):
        sessions.take(line_number, line)
    return sessions.duration_s


class Replays:
    """Finds the lines that later lines replace, and the duration of all sessions, including the replaced lines' time.

    Several records of a step belong together if all but the last were skipped (a skipped step makes no version and is
    repeated). A record of the step after a resume, or after a later step, is a replay and replaces them.
    """

    def __init__(self) -> None:
        self._of_step: dict[int, tuple[int, list[int]]] = {}  # step -> (session, line numbers)
        self._of_evaluation: dict[tuple[str, str, int], int] = {}
        self._session, self._version = 0, -1
        self.earlier_s = self._session_s = 0.0  # time of the sessions before this one; of this one

    @property
    def duration_s(self) -> float:
        """The summed time of all sessions so far, in seconds; each session restarts its clock."""
        return self.earlier_s + self._session_s

    def take(self, number: int, line: LedgerLine) -> list[int]:
        """The numbers of the earlier lines that ``line`` replaces. ``number``: the line's."""
        replaced_numbers: list[int] = []
        if isinstance(line, EventRecord):
            if line.event in (EVENT_START, EVENT_RESUME):
                self._session += 1
                self.earlier_s, self._session_s = self.duration_s, 0.0
        elif isinstance(line, EvaluationRecord):
            evaluation_key = (line.split, line.phase, line.step)
            replaced_numbers = [self._of_evaluation[evaluation_key]] if evaluation_key in self._of_evaluation else []
            self._of_evaluation[evaluation_key] = number
        else:
            self._session += line.step < self._version
            self._version = line.version
            recorded_session, line_numbers = self._of_step.get(line.step, (self._session, []))
            if recorded_session != self._session:
                replaced_numbers, line_numbers = line_numbers, []
            self._of_step[line.step] = (self._session, [*line_numbers, number])
        self._session_s = max(self._session_s, line.time_s)
        return replaced_numbers


def decode_line(text: bytes) -> LedgerLine:
    """Decode a line of a ledger. Raises msgspec.DecodeError or ValueError for any other text."""
    if b"null" not in text:
        return _decoder.decode(text)
    # JSON has no NaN and no infinity: both are written as null, which no field of a line has otherwise.
    return msgspec.convert(_nulls_to_nan(json.loads(text)), LedgerLine)


def _nulls_to_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _nulls_to_nan(member) for key, member in value.items()}
    return value


def _truncate_torn_end(path: Path) -> None:
    """Truncate a torn last line. Raises ConfigurationError if a line before it is damaged."""
    intact_bytes = _read_to_the_end(path).intact_bytes
    if intact_bytes < path.stat().st_size:
        os.truncate(path, intact_bytes)

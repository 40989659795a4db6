"""The ledger: an append-only JSONL file of a run's measurements, its subscribers and its reader."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
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

# Events whose names the readers know. Any other name is shown unchanged.
EVENT_START = "start"  # a run started; data: count (tasks) and digest (tasks_digest) of its training tasks
EVENT_RESUME = "resume"  # a run was resumed: steps recorded after it may repeat earlier ones; data as above
EVENT_LEFT_OUT = (
    "tasks_left_out"  # their own answers don't solve them; detail: a row and why; data: split, source, tasks
)
EVENT_BOOKS = "books"  # data: balanced 0/1, open, and the books' counts (`Books.data`)
EVENT_COUNTED = "counted"  # of a resumed run, before its next step: what ended so far; data: the books' counts
EVENT_NO_PROGRESS = "no_progress"  # groups end untrained, one after another; data: groups, the last one's reason,
# and where the run ends of it the books' counts
EVENT_MOSTLY_SOLVED = "mostly_solved"  # ... because their tasks are solved already; data as above
EVENT_CONTROL = "control"  # the controller; data: kind, knob, old, new, predicted, measured (rate ratios), mode; of
# what it recommends the keys of the experiment with their values
EVENT_PLAN_CHANGED = "plan_changed"  # data: before, after, gain and rate (samples/s before), cost_s, as expected too
EVENT_PLAN_KEPT = "plan_kept"  # a change of plan failed and was taken back; data as above
EVENT_PLAN_OUTCOME = "plan_outcome"  # some steps after a change; data: rate, expected, measured (samples/s), cost_s
EVENT_SERVICE = "buffer_service"  # detail: where outside workers lease members
EVENT_BEST = "best"  # data: version of the checkpoint that is now the best
EVENT_LAST_KEPT = "last_kept"  # there was no validation: best/ has the last version
EVENT_END = "end"  # the run ended in order; detail: why
EVENT_STALLED = "stalled"  # a wait is too long; detail names its cause, data: wait, expected_s, stacks of both sides
EVENT_STALL_ENDED = "stall_ended"  # of the same worker
EVENT_ALERT = "alert"  # a rule of [alerts] holds; data: rule, at (Unix time), host
EVENT_ALERT_CLEARED = "alert_cleared"  # ... and no longer; data: rule
EVENT_SIMULATED = "simulated"  # the run is a simulation: detail names the scenario

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LedgerLine)

Subscriber = Callable[[LedgerLine], None]


class Ledger:
    """The writer of ``RUN/ledger.jsonl``.

    Lifecycle: *open* (``record`` appends) -> *closed*. Each line is one ``write`` call, so a kill leaves at most
    one torn line, at the end; opening the ledger of a resumed run truncates it.

    Invariant: after ``record`` returns, the line is with the operating system and survives a kill of this
    process. ``record`` never leaves a partial line: on a full disk it truncates the line again and raises.

    Example: ``ledger.record(StepRecord(step=0, version=1)); ledger.event("checkpoint", step=1)``.
    """

    def __init__(self, run_dir: str | Path, clock: Clock) -> None:
        """Open the ledger of ``run_dir``; ``clock`` stamps events. Raises ConfigurationError when an earlier ledger
        there is damaged."""
        self.path = Path(run_dir) / FILE_NAME
        self._clock = clock
        self._opened_s = clock.now()
        self._subscribers: list[Subscriber] = []
        with contextlib.suppress(OSError):  # there is none yet, or none that can be opened, which LineFile reports
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
                # The boundary to subscribers: a view that can't draw must not end the run.
                self._subscribers.remove(subscriber)
                self.event("view_failed", f"{type(error).__name__}: {error}")

    def event(self, event: str, detail: str = "", step: int = 0, **data: float | int | str) -> None:
        """Record an EventRecord stamped with the time since the ledger was opened."""
        time_s = self._clock.now() - self._opened_s
        self.record(EventRecord(event=event, detail=detail, step=step, time_s=time_s, data=data))

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

    A step that was recorded again after a resume keeps only its last record (with the skipped tries before it),
    an evaluation likewise. A torn last line, from a kill or from reading while the run writes, is left out.
    Raises ConfigurationError when there is no ledger, it is of another schema, or a line inside it is damaged.
    """
    path = Path(run_dir) / FILE_NAME
    require_schema(run_dir)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigurationError(f"{run_dir} holds no run: there is no {path}{here}") from None
    whole, _ = _parse(data, path)
    return resolve_replays(whole)


def resolve_replays(lines: Iterable[LedgerLine]) -> list[LedgerLine]:
    """Keep the last record of each step and of each evaluation, and all other lines, in order (`Replays`)."""
    kept: dict[int, LedgerLine] = {}  # line number -> line
    replays = Replays()
    for number, line in enumerate(lines):
        for old in replays.take(number, line):
            del kept[old]
        kept[number] = line
    return list(kept.values())


class Replays:
    """Finds the lines that later ones replace.

    Several records of one step are one history when all but the last were skipped (a skipped step makes no version
    and is tried again); the same step after a resume, or after a later step, is a replay and replaces it.
    """

    def __init__(self) -> None:
        self._of_step: dict[int, tuple[int, list[int]]] = {}  # step -> (session, line numbers)
        self._of_evaluation: dict[tuple[str, str, int], int] = {}
        self._session, self._version = 0, -1

    def take(self, number: int, line: LedgerLine) -> list[int]:
        """Numbers of the earlier lines that ``line`` replaces; ``number``: its own."""
        replaced: list[int] = []
        if isinstance(line, EventRecord):
            self._session += line.event in (EVENT_START, EVENT_RESUME)
        elif isinstance(line, EvaluationRecord):
            key = (line.split, line.phase, line.step)
            replaced = [self._of_evaluation[key]] if key in self._of_evaluation else []
            self._of_evaluation[key] = number
        else:
            self._session += line.step < self._version
            self._version = line.version
            recorded_in, numbers = self._of_step.get(line.step, (self._session, []))
            if recorded_in != self._session:
                replaced, numbers = numbers, []
            self._of_step[line.step] = (self._session, [*numbers, number])
        return replaced


def _parse(data: bytes, path: Path) -> tuple[list[LedgerLine], int]:
    """Parse the lines of ``data``; return them and the number of bytes they take: the rest is a torn end."""
    lines: list[LedgerLine] = []
    position = 0
    while (end := data.find(b"\n", position)) >= 0:
        try:
            lines.append(decode_line(data[position:end]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if data.find(b"\n", end + 1) < 0 and not data[end + 1 :].strip():
                break  # the last line: after a power failure its length may be on disk but not its bytes
            number = len(lines) + 1
            raise ConfigurationError(
                f"{path}, line {number} is damaged: {error}; remove it (sed -i {number}d {path}): reports and --resume "
                "need none of the lines, and are without what this one said"
            ) from None
        position = end + 1
    return lines, position


def decode_line(text: bytes) -> LedgerLine:
    """Decode one line of a ledger. Raises msgspec.DecodeError or ValueError for anything else."""
    if b"null" not in text:
        return _decoder.decode(text)
    # JSON has no NaN and no infinity: both are written as null, which no field of a line has otherwise.
    return msgspec.convert(_nulls_to_nan(json.loads(text)), LedgerLine)


def _nulls_to_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _nulls_to_nan(item) for key, item in value.items()}
    return value


def _truncate_torn_end(path: Path) -> None:
    """Cut off a torn last line. Raises ConfigurationError when a line before it is damaged."""
    data = path.read_bytes()
    _, length = _parse(data, path)
    if length < len(data):
        os.truncate(path, length)

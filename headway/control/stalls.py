"""Decides which waits are stalls, and on what they wait, from a run's own durations and facts about workers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headway.records.stalls import Stack, Stall, Wait, WorkerStatus

LOOPS = "orchestrator"  # owner of waits for other parts of the orchestrator
_IDLE = (
    "<library>/threading.py",
    "<library>/queue.py",
    "<library>/selectors.py",
    "<library>/concurrent/futures/thread.py",
    "headway/runtime/child.py",
)


class StallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on waits, beyond which they are stalls."""

    floor_s: float = 20.0  # no wait is overdue sooner
    unknown_s: float = 600.0  # expected of a kind of wait of which fewer than ``enough`` have ended
    enough: int = 3
    window: int = 512  # durations kept of each kind
    factor: float = 4.0  # the expected time is at least this many times the 0.99 quantile
    fact_s: float = 8.0  # seconds after which a fact is reported
    confirmations: int = 2  # consecutive checks with a stall before it is reported, and without it before it is over
    grace_s: float = 30.0  # after a stall's end, waits of the loops are not judged: they were its consequences


class Expectations:
    """The longest time that a wait of a kind should take, learned from those that ended well.

    With q50 and q99, the quantiles of the last ``window`` durations: q99 x max(``factor``, q99 / q50), and no less than
    ``floor_s``. On a logarithmic scale that is as far above q99 as q99 is above the median, so that a kind with a long
    tail has a higher limit. Example: score takes 0.2 s, in one of a hundred cases 6 s: 6 x 30 = 180 s. It exceeds
    ``unknown_s`` only up to q99 x ``factor`` squared: one of a run's first steps may take a thousand medians.
    """

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=limits.window))
        self._known: dict[str, float] = {}  # expectations computed since the last duration of the kind

    def learn(self, durations: Iterable[tuple[str, float]]) -> None:
        """Add (kind, seconds) of waits that ended."""
        for kind, seconds in durations:
            self._durations[kind].append(seconds)
            self._known.pop(kind, None)

    def expected_s(self, kind: str) -> float:
        """Return the longest time that a wait of this kind should take."""
        if kind not in self._known:
            self._known[kind] = self._computed(sorted(self._durations.get(kind, ())))
        return self._known[kind]

    def _computed(self, ordered: Sequence[float]) -> float:
        limits = self._limits
        if len(ordered) < limits.enough:
            return max(limits.unknown_s, limits.floor_s)
        median_s, p99_s = ordered[len(ordered) // 2], ordered[math.ceil(0.99 * len(ordered)) - 1]
        p99_ratio = p99_s / median_s if median_s > 0 else 1.0
        limit_s = max(limits.unknown_s, p99_s * limits.factor**2)
        return max(limits.floor_s, min(p99_s * max(limits.factor, p99_ratio), limit_s))


def role_of(worker: str) -> str:
    """Return the role of a worker ("trainer" for "trainer-0"): workers of a role do the same work."""
    return worker.rstrip("-0123456789")


def workers_to_inspect(
    waits: Sequence[Wait], silent_s: Mapping[str, float], expectations: Expectations, now_s: float, limits: StallLimits
) -> set[str]:
    """Return the workers, keys of ``silent_s``, to inspect: silent ones, and those waited for too long.

    With one trainer rank all ranks are inspected, as another may be missing in its collective; while a loop waits for
    too long, all workers are."""
    if _first_overdue([wait for wait in waits if wait.owner == LOOPS], expectations, now_s) is not None:
        return set(silent_s)
    chosen_workers = {worker for worker, silence_s in silent_s.items() if silence_s >= limits.fact_s / 2}
    for wait in waits:
        waited_s = now_s - wait.since_s
        if wait.owner in silent_s and waited_s >= min(limits.fact_s, expectations.expected_s(wait.kind)):
            chosen_workers.add(wait.owner)
    chosen_roles = {role_of(worker) for worker in chosen_workers if role_of(worker) == "trainer"}
    return chosen_workers | {worker for worker in silent_s if role_of(worker) in chosen_roles}


def find_stalls(
    waits: Sequence[Wait],
    statuses: Mapping[str, WorkerStatus],
    silent_since_s: Mapping[str, float],
    expectations: Expectations,
    now_s: float,
    limits: StallLimits,
) -> list[Stall]:
    """Find the stalls that explain the others, not their consequences.

    These are facts about workers; for a worker without one, calls and requests beyond their expected time; and without
    any of these, loops that wait for too long. ``waits``: oldest first. ``silent_since_s``: clock at the last sign of
    life of silent workers."""
    oldest: dict[str, Wait] = {}
    for wait in waits:
        oldest.setdefault(wait.owner, wait)
    proven = [_stall_of(status, oldest, silent_since_s, expectations, now_s, limits) for status in statuses.values()]
    stalls = [stall for stall in proven if stall is not None]
    stalls += _missing_ranks(statuses, oldest, expectations, now_s, limits)
    explained_owners = {stall.owner for stall in stalls} | {
        name for stall in stalls if role_of(stall.owner) == "trainer" for name in statuses if role_of(name) == "trainer"
    }
    for owner, wait in oldest.items():
        if owner in explained_owners or owner == LOOPS:
            continue
        late_wait = _first_overdue([candidate for candidate in waits if candidate.owner == owner], expectations, now_s)
        # Later calls queue behind the first: where that isn't overdue, neither are they.
        if late_wait is not None and (late_wait is wait or late_wait.kind.startswith("environment.")):
            stalls.append(_overdue(late_wait, statuses.get(owner), expectations))
    if not stalls:
        late_wait = _first_overdue([candidate for candidate in waits if candidate.owner == LOOPS], expectations, now_s)
        troubled_status = next((status for status in statuses.values() if status.trouble), None)
        stalls += [] if late_wait is None else [_overdue(late_wait, troubled_status, expectations)]
    return stalls


def current_frame(status: WorkerStatus) -> tuple[str, tuple[Stack, ...]]:
    """Return a worker's innermost frame outside libraries, and the stacks behind it, the most informative first.

    The frame is that of the thread or task that does the work; "" where nothing is known."""
    main_stacks = [stack for stack in status.stacks if stack.of == "main"]
    tasks = [stack for stack in status.stacks if stack.of.startswith("task ") and stack.frames]
    threads = [stack for stack in status.stacks if stack not in main_stacks and stack not in tasks and not _idle(stack)]
    working_stacks = [stack for stack in main_stacks if status.call not in ("", "tick") or not _idle(stack)]
    tasks.sort(key=lambda stack: _user_frame(stack).startswith(("headway/", "<")))  # the user's own code first
    # The thread of a running event loop is busy only briefly: its tasks' awaits are more informative.
    stacks = [*working_stacks, *threads, *tasks, *(stack for stack in main_stacks if stack not in working_stacks)]
    return (_user_frame(stacks[0]) if stacks else ""), tuple(stacks[:4])


def _user_frame(stack: Stack) -> str:
    """Return the innermost frame outside libraries."""
    frames = [frame for frame in stack.frames if not frame.startswith("<library>")]
    return frames[-1] if frames else stack.frames[-1] if stack.frames else ""


def _idle(stack: Stack) -> bool:
    return not stack.frames or stack.frames[-1].startswith(_IDLE)


def _stall_of(
    status: WorkerStatus,
    oldest: Mapping[str, Wait],
    silent_since_s: Mapping[str, float],
    expectations: Expectations,
    now_s: float,
    limits: StallLimits,
) -> Stall | None:
    """Return the stall that one worker's status proves, if any."""
    wait = oldest.get(status.worker)
    since_s = silent_since_s.get(status.worker, now_s)
    if status.condition == "answers" or now_s - since_s < limits.fact_s / 2:
        return None
    frame, stacks = current_frame(status)
    if status.condition == "stopped":
        reason, kind = "is stopped by a signal or a debugger", "stopped"
    elif frame:
        reason, kind = f"holds the interpreter's lock in {frame}", "lock held"
    else:
        reason, kind = "sends no heartbeat", "silent"
    text = f"{_waiting(wait)} for {status.worker}, which {reason}" if wait is not None else f"{status.worker} {reason}"
    return Stall(
        owner=status.worker,
        kind=kind,
        since_s=since_s,
        cause=text,
        expected_s=limits.fact_s if wait is None else expectations.expected_s(wait.kind),
        hard=True,
        stacks=tuple((status.worker, stack) for stack in stacks),
    )


def _missing_ranks(
    statuses: Mapping[str, WorkerStatus],
    oldest: Mapping[str, Wait],
    expectations: Expectations,
    now_s: float,
    limits: StallLimits,
) -> list[Stall]:
    """Find the rank that others wait for in a collective.

    It is a fact where the rank has ended its call or is in another collective; while it still computes, it is a stall
    once that takes longer than expected. Ranks wait in groups, of which one may wait for another: the first one is that
    which computes, or has entered the fewest collectives."""
    trainers = [rank for rank in statuses.values() if role_of(rank.worker) == "trainer" and rank.condition == "answers"]
    waiters = [rank for rank in trainers if rank.in_collective_s is not None and rank.in_collective_s >= limits.fact_s]
    if not waiters:
        return []
    ahead_status = max(waiters, key=lambda status: (status.collectives, status.in_collective_s or 0.0))
    for status in sorted(trainers, key=lambda rank: (rank.in_collective_s is not None, rank.collectives)):
        same_collective = (status.collectives, status.collective) == (ahead_status.collectives, ahead_status.collective)
        if status is ahead_status or (same_collective and status.in_collective_s is not None):
            continue
        wait = oldest.get(ahead_status.worker)
        is_overdue = wait is not None and now_s - wait.since_s > expectations.expected_s(wait.kind)
        is_hard = not status.call or (status.in_collective_s or 0.0) >= limits.fact_s
        if not is_hard and not is_overdue:
            return []
        frame, stacks = current_frame(status)
        if status.in_collective_s is not None:
            activity_text = f"is in {status.collective} {status.collectives}, at {frame}"
        elif not status.call:
            activity_text = f"has ended its call after {status.collectives} collectives"
        else:
            activity_text = f"is in {frame}"
        wait_text = f"{ahead_status.worker} waits in {ahead_status.collective} {ahead_status.collectives}"
        return [
            Stall(
                owner=status.worker,
                kind="missing rank",
                since_s=now_s - (ahead_status.in_collective_s or 0.0),
                cause=f"{wait_text} for {status.worker}, which {activity_text}",
                expected_s=limits.fact_s if wait is None else expectations.expected_s(wait.kind),
                hard=is_hard,
                stacks=(
                    *((status.worker, stack) for stack in stacks),
                    *((ahead_status.worker, stack) for stack in current_frame(ahead_status)[1]),
                ),
            )
        ]
    return []


def _first_overdue(waits: Sequence[Wait], expectations: Expectations, now_s: float) -> Wait | None:
    return next((wait for wait in waits if now_s - wait.since_s > expectations.expected_s(wait.kind)), None)


def _overdue(wait: Wait, status: WorkerStatus | None, expectations: Expectations) -> Stall:
    frame, stacks = ("", ()) if status is None else current_frame(status)
    owner = wait.owner
    if status is not None and status.trouble:
        cause_text = f"{f'while {status.worker}' if owner == LOOPS else 'which'} reports: {status.trouble}"
        owner = status.worker
    elif status is not None and status.blocked_events:
        cause_text = "which waits until its events are read here"
    else:
        cause_text = (
            f"which is in {frame}" if frame else f"longer than the {expectations.expected_s(wait.kind):.0f} s expected"
        )
    owner_suffix = "" if wait.owner == LOOPS else f" for {wait.owner}"
    return Stall(
        owner=owner,
        kind=wait.kind,
        since_s=wait.since_s,
        cause=f"{_waiting(wait)}{owner_suffix}, {cause_text}",
        expected_s=expectations.expected_s(wait.kind),
        hard=False,
        stacks=tuple((owner, stack) for stack in stacks),
    )


def _waiting(wait: Wait | None) -> str:
    if wait is None:
        return ""
    return f"{wait.waiter} waits {'for' if wait.owner == LOOPS else 'in'} {wait.kind}"


class StallTracker:
    """Decides when a stall is reported and when it is over: after ``confirmations`` in a row with or without."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._seen: dict[tuple[str, str], int] = {}
        self._missed: dict[tuple[str, str], int] = {}
        self.open: dict[tuple[str, str], Stall] = {}  # reported, not over
        self.grace_until_s = -math.inf  # waits of the loops are not judged before

    def update(self, stalls: Iterable[Stall], now_s: float) -> tuple[list[Stall], list[Stall]]:
        """Enter the stalls of a check. Returns those to report now, and those that are over."""
        present_stalls = {
            (stall.owner, stall.kind): stall
            for stall in stalls
            if stall.owner != LOOPS or now_s >= self.grace_until_s or (stall.owner, stall.kind) in self.open
        }
        begun_stalls: list[Stall] = []
        self._seen = {stall_key: self._seen.get(stall_key, 0) + 1 for stall_key in present_stalls}
        for stall_key, stall in present_stalls.items():
            self._missed.pop(stall_key, None)
            if stall_key not in self.open and self._seen[stall_key] >= self._limits.confirmations:
                begun_stalls.append(stall)
                self.open[stall_key] = stall
        ended_stalls: list[Stall] = []
        for stall_key in [stall_key for stall_key in self.open if stall_key not in present_stalls]:
            self._missed[stall_key] = self._missed.get(stall_key, 0) + 1
            if self._missed[stall_key] >= self._limits.confirmations:
                ended_stalls.append(self.open.pop(stall_key))
                del self._missed[stall_key]
        if self.open or ended_stalls:
            self.grace_until_s = now_s + self._limits.grace_s
        return begun_stalls, ended_stalls

"""The accounting of rollouts: each is open, left at the end, or ended once, with a reason (design.md, rule 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from headway.records.errors import AccountingError
from headway.records.rollout import BOUNDARIES, ENDINGS, Boundary, Ending


class Accounting:
    """Counts of rollouts by ending, reason and failure boundary, and which members of which group are open.

    Lifecycle of an entry: ``admit`` -> open -> ``end`` (once). A rollout still open when a run stops was *left
    at the end*: it stays open in the buffer and is continued on resume.

    Invariant: admitted == open + sum(endings); a second ending, or one of an unknown rollout, raises.

    Example: ``admit(0, 2); end(0, 0, "trained", "step"); end(0, 1, "failed", "timeout", "engine")`` leaves
    ``endings == {"trained": 1, "failed": 1}``, ``failures == {"engine": 1}`` and ``open_rollouts == 0``.

    Memory grows with open groups only; every operation is O(1) per rollout.
    """

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}
        self._next_index = 0
        self._open_rollouts = 0
        self._taken: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
        self.admitted = 0  # rollouts
        self.endings: Counter[str] = Counter()  # ending -> rollouts
        self.reasons: Counter[tuple[str, str]] = Counter()  # (ending, reason) -> rollouts
        self.failures: Counter[str] = Counter()  # boundary -> rollouts that failed there (not their failed siblings)

    @property
    def open_rollouts(self) -> int:
        return self._open_rollouts

    @property
    def open_groups(self) -> tuple[int, ...]:
        """Groups with an open member, ascending by admission."""
        return tuple(self._open)

    @property
    def data(self) -> dict[str, int]:
        """Counts for a ledger event: rollouts by ending, and failures as ``failed_at_BOUNDARY``."""
        failures = {f"failed_at_{failure_boundary}": self.failures[failure_boundary] for failure_boundary in BOUNDARIES}
        return {ending: self.endings[ending] for ending in ENDINGS} | failures

    def admit(self, group: int, size: int) -> None:
        """Open the ``size`` rollouts of a group. Raises AccountingError when its index was used before."""
        if group < self._next_index:
            raise AccountingError(f"group {group} is admitted again (next index is {self._next_index})")
        if size < 1:
            raise AccountingError(f"group {group} is admitted with {size} rollouts")
        self._next_index = group + 1
        self._open[group] = set(range(size))
        self._open_rollouts += size
        self.admitted += size

    def end(self, group: int, member: int, ending: Ending, reason: str, boundary: Boundary | None = None) -> None:
        """End one rollout. ``boundary``: where it failed, if it did. Raises AccountingError if it isn't open."""
        members = self._open.get(group)
        if members is None or member not in members:
            was_admitted = group < self._next_index
            raise AccountingError(
                f"rollout {group}-{member} ends as {ending} ({reason}) but "
                + ("has ended before" if was_admitted else "was never admitted")
            )
        if ending not in ENDINGS:
            raise AccountingError(f"rollout {group}-{member}: {ending!r} isn't one of {', '.join(ENDINGS)}")
        members.discard(member)
        if not members:
            del self._open[group]
        self._open_rollouts -= 1
        self.endings[ending] += 1
        self.reasons[ending, reason] += 1
        if boundary is not None:
            self.failures[boundary] += 1

    def end_group(self, group: int, ending: Ending, reason: str, boundary: Boundary | None = None) -> int:
        """End every open member of a group; return their number. Raises AccountingError for none."""
        members = sorted(self._open.get(group, ()))
        if not members:
            raise AccountingError(f"group {group} ends as {ending} ({reason}) but has no open rollout")
        for member in members:
            self.end(group, member, ending, reason, boundary)
        return len(members)

    def restore(
        self,
        *,
        next_index: int,
        open_members: Mapping[int, Iterable[int]],
        ended: Mapping[tuple[Ending, str], int],
        failures: Mapping[str, int],
    ) -> None:
        """Enter the rollouts of a buffer when a run is resumed. Raises AccountingError if any were admitted."""
        if self.admitted:
            raise AccountingError("an accounting that is in use can't be restored")
        self._open = {
            group: member_set for group, members in sorted(open_members.items()) if (member_set := set(members))
        }
        self._open_rollouts = sum(len(members) for members in self._open.values())
        self._next_index = next_index
        for (ending, reason), count in ended.items():
            self.endings[ending] += count
            self.reasons[ending, reason] += count
        self.failures.update(failures)
        self.admitted = self._open_rollouts + self.endings.total()
        self._taken = self._counts()

    def take_recent(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return the counts (endings, failures by boundary, filtered ones by reason) since the last call."""
        now = self._counts()
        endings, failures, filtered = (dict(recent - former) for recent, former in zip(now, self._taken, strict=True))
        self._taken = now
        return endings, failures, filtered

    def _counts(self) -> tuple[Counter[str], ...]:
        filtered_by_reason = {reason: count for (ending, reason), count in self.reasons.items() if ending == "filtered"}
        return self.endings.copy(), self.failures.copy(), Counter(filtered_by_reason)

    def check(self, *, admitted: int, open_now: int) -> None:
        """Compare with an independent count of rollouts admitted and open. Raises AccountingError."""
        ended_count = self.endings.total()
        problems: list[str] = []
        if self.admitted != admitted:
            problems.append(f"{self.admitted} rollouts were entered, {admitted} admitted")
        if self._open_rollouts != open_now:
            problems.append(f"{self._open_rollouts} rollouts are open in the accounting, {open_now} in the system")
        if self.admitted != self._open_rollouts + ended_count:
            problems.append(f"{self.admitted} entered != {self._open_rollouts} open + {ended_count} ended")
        if self._open_rollouts != sum(len(members) for members in self._open.values()):
            problems.append("the open count differs from the open entries")
        if self.failures.total() > self.endings["failed"]:
            problems.append(f"{self.failures.total()} failures by boundary, but {self.endings['failed']} failed")
        if problems:
            raise AccountingError("the accounting doesn't balance: " + "; ".join(problems))

"""The fragments of a run by round: their admission, their selection under the budget, and their accounting."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.control.accounting import Accounting
from headway.control.admission import credit
from headway.control.staleness import OpenGroup, OpenGroups
from headway.records.errors import AccountingError
from headway.records.rollout import Ending

COUNTS_FILE = "fragments.json"  # of a checkpoint


class FragmentCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run's fragments at a checkpoint; in one that is resumed nothing is open."""

    admitted: int = 0
    rounds: int = 0  # that have ended: number of the next one
    ended: tuple[tuple[str, str, int], ...] = ()  # ending, reason, fragments; a pair may stand several times
    lives: tuple[int, ...]  # of each block: how often it was built again

    def resumed(self, admitted: int) -> FragmentCounts:
        """The counts with which a run of ``admitted`` fragments, by its ledger, resumes from this checkpoint: all that
        have not ended in its steps have failed, because observations aren't kept; every block is built again."""
        admitted = max(admitted, self.admitted)
        lost_count = admitted - sum(count for *_, count in self.ended)
        ended = (*self.ended, ("failed", "lost with its process", lost_count)) if lost_count else self.ended
        lives = tuple(life + 1 for life in self.lives)
        return msgspec.structs.replace(self, admitted=admitted, ended=ended, lives=lives)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A fragment of every block."""

    number: int  # of its fragments
    version: int  # of the policy that acts in it
    indices: range  # of admission, by block
    channel: Any  # of its fragments
    call: Any  # of the simulators


class Rounds:
    """Rounds under way, oldest first; each fragment is a group of one to admission, selection and accounting.

    Invariant: rounds are trained in the order of their numbers, a step each, at a staleness of at most ``budget``."""

    def __init__(self, blocks: int, budget: int, counts: FragmentCounts) -> None:
        """``counts``: of the fragments before."""
        self.blocks, self._budget = blocks, budget
        self.admitted = counts.admitted
        self.accounting = Accounting()
        ended = Counter[tuple[Ending, str]]()
        for ending, reason, count in counts.ended:
            ended[msgspec.convert(ending, Ending), reason] += count
        self.accounting.restore(next_index=counts.admitted, open_members={}, ended=ended, failures={})
        self._open_groups = OpenGroups(blocks, budget, "wait")
        self.under_way: deque[Round] = deque()
        self.next_number = counts.rounds  # of the round that begins next

    def __len__(self) -> int:
        return len(self.under_way)

    @property
    def ended(self) -> int:
        """The number of rounds that have ended since the run began."""
        return self.next_number - len(self.under_way)

    @property
    def open_fragments(self) -> int:
        return len(self.under_way) * self.blocks

    def admissible(self, completed: int, last: int) -> int:
        """The number of rounds that may begin now, at version ``completed``, in a run of ``last`` steps."""
        fragments = credit(
            open_groups=self.open_fragments,
            completed_steps=completed,
            applied_version=completed,
            groups_per_step=self.blocks,
            budget=self._budget,
        )
        return max(0, min(fragments // self.blocks, last - completed - len(self.under_way)))

    def begin(self, version: int, channel: Any, call: Any) -> None:
        """Add the next round."""
        indices = range(self.admitted, self.admitted + self.blocks)
        for index in indices:
            self.accounting.admit(index, 1)
            self._open_groups.add(OpenGroup(index=index, first_version=version, state="running"))
        self.admitted = indices.stop
        number, self.next_number = self.next_number, self.next_number + 1
        self.under_way.append(Round(number=number, version=version, indices=indices, channel=channel, call=call))

    def take(self, step: int) -> Round:
        """Take the oldest round, all of whose fragments are there, for ``step``. Raises BudgetExceeded, and
        AccountingError where the selection under the budget is another."""
        oldest = self.under_way[0]
        for index in oldest.indices:
            self._open_groups.add(OpenGroup(index=index, first_version=oldest.version, state="finished"))
        selection = self._open_groups.select(step)
        if selection.groups != tuple(oldest.indices):
            raise AccountingError(f"step {step} would take fragments {selection.groups} of round {oldest.number}")
        return oldest

    def end(self, taken: Round, *, skipped: bool) -> None:
        """End the fragments of the round that `take` returned: trained, or lost for a step that wasn't finite."""
        self.under_way.popleft()
        ending, reason = ("discarded", "step not finite") if skipped else ("trained", "step")
        for index in taken.indices:
            self._open_groups.remove(index)
            self.accounting.end(index, 0, ending, reason)

    def check(self) -> None:
        """Compare the accounting with the rounds. Raises AccountingError."""
        self.accounting.check(admitted=self.admitted, open_now=self.open_fragments)

    def counts(self, lives: tuple[int, ...]) -> FragmentCounts:
        """Counts for a checkpoint."""
        ended = tuple((*pair, count) for pair, count in self.accounting.reasons.items())
        return FragmentCounts(admitted=self.admitted, rounds=self.ended, ended=ended, lives=lives)

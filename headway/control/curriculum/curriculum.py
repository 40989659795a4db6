"""Chooses the next task and the size of its group.

It combines solve rates as Beta distributions, a band of tasks whose outcomes are likely to differ, replays of unsolved
tasks after a while, and a sequential walk over all tasks.

A group trains by the difference between its members' rewards, so a task is worth drawing by its *signal*, the
probability that a group of it has mixed outcomes: E[1 - p^G - (1-p)^G] under what is known of its solve rate p. All
decisions depend on counts, so the same draws and the same finished groups, in the order in which they finished, give
the same state, however the two are interleaved.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.config.curriculum import CurriculumConfig
from headway.control.curriculum.beta import group_size, mixed_probability
from headway.control.curriculum.fenwick import WeightTree
from headway.records.curriculum import BandMove, Draw, DrawReason, Region, TaskEvidence

BAND_WINDOW_GROUPS = 64  # groups drawn from the band between two adjustments of its limit
BAND_STEP = 0.05  # largest adjustment
PRIOR_GROUPS = 2.0  # weight of "nothing is known" (Beta(1, 1)) beside a source's own groups
WEAKEST_PRIOR, STRONGEST_PRIOR = 0.2, 4.0  # bounds on the attempts that a prior counts as
MOST_DOUBLINGS = 12  # of the delay after which an unsolved task is due
_UNIT = 1 << 20  # a signal of 1 as a weight


class TaskChoice(NamedTuple):
    """A chosen task, and the reason."""

    task: int  # its number within its source
    draw: Draw

    @property
    def walks(self) -> bool:
        """True for the sequential walk's next task."""
        return self.draw.reason in ("cursor", "explore")


class Band:
    """The lower limit of signal, adjusted by the measured share of flat groups among those drawn from the band.

    It is adjusted once ``BAND_WINDOW_GROUPS`` groups drawn from the band have finished, by ``BAND_STEP``: up (narrower)
    when more of them were flat than ``zero_variance_range`` allows, down (wider: more tasks) when fewer. Within
    the range it stays. Only finished groups move it.
    """

    def __init__(self, settings: CurriculumConfig) -> None:
        self._settings = settings
        self.limit = settings.min_signal
        self.changes: list[BandMove] = []
        self._groups = 0
        self._flat = 0

    def learn(self, *, flat: bool) -> BandMove | None:
        self._groups += 1
        self._flat += flat
        if self._groups < BAND_WINDOW_GROUPS:
            return None
        share, count = self._flat / self._groups, self._groups
        self._groups = self._flat = 0
        low, high = self._settings.zero_variance_range
        lowest_limit, highest_limit = self._settings.min_signal_range
        if share > high:
            limit, why = self.limit + BAND_STEP, f"more than {high:.0%} of its groups were flat: the band is narrowed"
        elif share < low:
            limit, why = self.limit - BAND_STEP, f"less than {low:.0%} of its groups were flat: the band is widened"
        else:
            return None
        limit = min(highest_limit, max(lowest_limit, round(limit, 6)))
        if limit == self.limit:
            return None
        band_move = BandMove(old_limit=self.limit, new_limit=limit, zero_variance_share=share, groups=count, reason=why)
        self.limit = limit
        self.changes.append(band_move)
        return band_move


class _Prior:
    """The prior of a source's unseen tasks, a Beta distribution.

    Its mean and spread over tasks are those of the groups that the sequential walk drew (the only unbiased sample of
    all tasks).

    A group with k of n solved estimates E[p] by k / n and E[p^2] by k (k - 1) / n (n - 1), both without bias; from the
    two follows the strength a + b = (m - q) / (q - m^2).
    """

    def __init__(self, half_life_steps: float) -> None:
        self._half_life = half_life_steps
        self._weight = self._first = self._second = 0.0
        self._version = 0
        self.alpha = self.beta = 1.0

    def learn(self, solved: float, valid: int, version: int) -> None:
        old_weight, new_weight = _aged(self._version, version, self._half_life)
        self._version = max(self._version, version)
        pair_count = valid * (valid - 1)
        second_moment = solved * (solved - 1) / pair_count if pair_count else (solved / valid) ** 2
        self._weight = old_weight * self._weight + new_weight
        self._first = old_weight * self._first + new_weight * solved / valid
        self._second = old_weight * self._second + new_weight * max(0.0, second_moment)
        total_weight = self._weight + PRIOR_GROUPS
        mean = (self._first + PRIOR_GROUPS / 2) / total_weight
        mean_square = (self._second + PRIOR_GROUPS / 3) / total_weight
        variance = mean_square - mean * mean
        strength = (mean - mean_square) / variance if variance > 0 else STRONGEST_PRIOR
        strength = min(STRONGEST_PRIOR, max(WEAKEST_PRIOR, strength))
        self.alpha, self.beta = mean * strength, (1.0 - mean) * strength


def _aged(then: int, now: int, half_life: float) -> tuple[float, float]:
    """Return the weights of the evidence as of version ``then`` and of new evidence of version ``now``."""
    return 0.5 ** (max(0, now - then) / half_life), 0.5 ** (max(0, then - now) / half_life)


class SourceCurriculum:
    """The curriculum of one source's tasks, by number.

    Lifecycle of a task: *unseen* -> (a group of it finishes) -> in the *band* while its signal reaches the band's
    limit, else *trivial* or *unsolved*; each further group moves it. ``choose`` decides without visible changes;
    ``drawn`` and ``learn`` are the only transitions, and are independent of each other: applying all draws and then all
    evidence gives the same state as any interleaving.

    No starvation: a fixed share of the source's draws takes the walk's next task, at least floor(k x cursor_share) of
    any k in a row, and no task waits longer than 2 n / cursor_share + 1 draws.

    Costs: O(log n) for ``choose``, ``drawn``, ``learn``; O(n) when the band moves.
    """

    def __init__(
        self, tasks: int, settings: CurriculumConfig, band: Band, *, size: int, rest: tuple[int, int], seed: int | str
    ) -> None:
        """Create the curriculum of ``tasks`` unseen tasks.

        ``size``: rollout.group_size; signals are those of groups of that size. ``rest``: number of groups before a task
        of the band is drawn again: the minimum, and the value used where there is a choice."""
        self._settings = settings
        self._band = band
        self._size = size
        self._seed = seed
        self._least_rest, self._rest = rest
        self._now = 0  # next admission index, as far as known here
        self.prior = _Prior(settings.half_life_steps)
        self.draws = 0
        self.undrawn = tasks
        self.solved: npt.NDArray[np.float64] = np.zeros(tasks)  # attempts, aged
        self.failed: npt.NDArray[np.float64] = np.zeros(tasks)
        self.alpha: npt.NDArray[np.float64] = np.zeros(tasks)  # as of the last evidence; 0: unseen
        self.beta: npt.NDArray[np.float64] = np.zeros(tasks)
        self.signal: npt.NDArray[np.float64] = np.full(tasks, -1.0)  # -1: unseen
        self.version: npt.NDArray[np.int64] = np.zeros(tasks, dtype=np.int64)  # newest with evidence
        self.drawn_at: npt.NDArray[np.int64] = np.full(tasks, -1)  # admission index; -1: never
        self.due: npt.NDArray[np.int64] = np.full(tasks, -1)  # admission index from which it may be replayed
        self.misses: npt.NDArray[np.int64] = np.zeros(tasks, dtype=np.int64)  # unsolved groups in a row
        self._weights = WeightTree(np.zeros(tasks, dtype=np.int64))  # of the band's tasks that don't rest
        self._resting: deque[tuple[int, int]] = deque()  # (drawn at, task), ascending
        self._waiting: list[tuple[int, int]] = []  # heap of (due, task), outdated ones included
        self._resting_in_band: list[tuple[int, int]] = []  # heap of (drawn at, task), likewise

    # -- decisions -----------------------------------------------------------------------------------

    def choose(self, index: int, walk_next: int) -> TaskChoice:
        """Choose the task for the group with admission index ``index``; ``walk_next``: the walk's next task."""
        self._wake(index)
        settings, draw_number = self._settings, self.draws
        walked_draws = int(draw_number * settings.cursor_share)
        if int((draw_number + 1) * settings.cursor_share) > walked_draws:
            return self._choice(walk_next, "cursor", 1.0)
        other_draws = draw_number - walked_draws
        replay_share = settings.replay_share / max(settings.replay_share, 1.0 - settings.cursor_share)
        if int((other_draws + 1) * replay_share) > int(other_draws * replay_share):
            due_task = self._first_due(index)
            if due_task is not None:
                return self._choice(due_task, "replay", 1.0)
        known_weight, unknown_weight = self._weights.total, self._unknown_weight()
        if known_weight + unknown_weight == 0:
            rested_task = None if self.undrawn else self._longest_rested(index)
            if rested_task is not None:
                return self._choice(rested_task, "band", 1.0)
            return self._choice(walk_next, "explore", 1.0)
        weight_offset = (_random64(self._seed, index) * (known_weight + unknown_weight)) >> 64
        if weight_offset >= known_weight:
            return self._choice(walk_next, "explore", unknown_weight / (known_weight + unknown_weight))
        task = self._weights.find(weight_offset)
        return self._choice(task, "band", self._weights[task] / (known_weight + unknown_weight))

    def posterior(self, task: int) -> tuple[float, float]:
        """Return (alpha, beta) of a task's solve rate: as of its last evidence, or the source's current prior."""
        if self.signal[task] < 0:
            return self.prior.alpha, self.prior.beta
        return float(self.alpha[task]), float(self.beta[task])

    def region(self, task: int) -> Region:
        if self.signal[task] < 0:
            return "unseen"
        if self.signal[task] >= self._band.limit:
            return "band"
        return "trivial" if self.alpha[task] >= self.beta[task] else "unsolved"

    def regions(self) -> dict[Region, int]:
        """Count the tasks in each region."""
        is_seen, in_band = self.signal >= 0, self.signal >= self._band.limit
        is_trivial = is_seen & ~in_band & (self.alpha >= self.beta)
        region_counts = [int(np.count_nonzero(mask)) for mask in (~is_seen, in_band, is_trivial)]
        unsolved = len(self.signal) - sum(region_counts)
        return {"unseen": region_counts[0], "unsolved": unsolved, "band": region_counts[1], "trivial": region_counts[2]}

    def band_probability(self, task: int, index: int) -> float:
        """Return the probability that a draw from the band at ``index`` is ``task``."""
        self._wake(index)
        total_weight = self._weights.total + self._unknown_weight()
        return self._weights[task] / total_weight if total_weight else 0.0

    # -- transitions ---------------------------------------------------------------------------------

    def drawn(self, index: int, task: int) -> None:
        """Record that the group with admission index ``index`` is of ``task``. Called in the order of indices."""
        self._now = index + 1
        self.draws += 1
        if self.drawn_at[task] < 0:
            self.undrawn -= 1
        self.drawn_at[task] = index
        self._resting.append((index, task))
        self._refresh(task)

    def learn(self, task: int, evidence: TaskEvidence, reason: DrawReason) -> BandMove | None:
        """Update ``task`` by a finished group of it that was drawn for ``reason``. Called in the order of finishing.
        Returns the band's move if it moved."""
        valid_count, solved_count = evidence.valid, float(evidence.solved)
        if not evidence.zero_variance and evidence.solved in (0, valid_count):
            solved_count = valid_count / 2  # rewards differ although outcomes don't: an equally good signal
        if reason in ("cursor", "explore"):
            self.prior.learn(solved_count, valid_count, evidence.version)
        old_weight, new_weight = _aged(int(self.version[task]), evidence.version, self._settings.half_life_steps)
        self.version[task] = max(int(self.version[task]), evidence.version)
        self.solved[task] = old_weight * self.solved[task] + new_weight * solved_count
        self.failed[task] = old_weight * self.failed[task] + new_weight * (valid_count - solved_count)
        alpha = float(self.prior.alpha + self.solved[task])
        beta = float(self.prior.beta + self.failed[task])
        self.alpha[task], self.beta[task] = alpha, beta
        self.signal[task] = mixed_probability(alpha, beta, self._size)
        self.misses[task] = self.misses[task] + 1 if solved_count == 0 else 0
        self.due[task] = -1
        if solved_count == 0:
            doublings = min(int(self.misses[task]) - 1, MOST_DOUBLINGS)
            self.due[task] = evidence.group + (self._settings.replay_after_groups << doublings)
            heapq.heappush(self._waiting, (int(self.due[task]), task))
        self._refresh(task)
        return self._band.learn(flat=evidence.zero_variance) if reason == "band" else None

    def band_moved(self) -> None:
        """Rebuild weights and heaps of all tasks for the band's new limit. O(n)."""
        self._weights = WeightTree(self._all_weights())
        is_waiting = (self.due >= 0) & (self.drawn_at < self.due) & (self.signal < self._band.limit)
        self._waiting = [(int(self.due[task]), int(task)) for task in np.flatnonzero(is_waiting)]
        heapq.heapify(self._waiting)
        is_resting = (self.drawn_at >= 0) & (self.signal >= self._band.limit)
        self._resting_in_band = [(int(self.drawn_at[task]), int(task)) for task in np.flatnonzero(is_resting)]
        heapq.heapify(self._resting_in_band)

    # -- internals -----------------------------------------------------------------------------------

    def _choice(self, task: int, reason: DrawReason, probability: float) -> TaskChoice:
        alpha, beta = self.posterior(task)
        settings = self._settings
        smallest_size, largest_size = settings.min_group_size or self._size, settings.max_group_size or self._size
        draw = Draw(
            reason=reason,
            probability=probability,
            alpha=alpha,
            beta=beta,
            signal=mixed_probability(alpha, beta, self._size),
            min_signal=self._band.limit,
            size=group_size(alpha, beta, smallest_size, largest_size, settings.member_gain),
        )
        return TaskChoice(task, draw)

    def _unknown_weight(self) -> int:
        """Return the weight of all undrawn tasks: their expected signal, where that reaches the band's limit."""
        if not self.undrawn:
            return 0
        signal = mixed_probability(self.prior.alpha, self.prior.beta, self._size)
        return self.undrawn * int(signal * _UNIT) if signal >= self._band.limit else 0

    def _first_due(self, index: int) -> int | None:
        waiting_heap = self._waiting
        while waiting_heap and waiting_heap[0][0] <= index:
            due_index, task = waiting_heap[0]
            if self.due[task] == due_index and self.drawn_at[task] < due_index and self.signal[task] < self._band.limit:
                return task
            heapq.heappop(waiting_heap)
        return None

    def _longest_rested(self, index: int) -> int | None:
        """Return the band's task that was drawn longest ago; None where a group of it may still be open.

        It is used when all of the band's tasks rest and none is unseen."""
        resting_heap = self._resting_in_band
        while resting_heap and resting_heap[0][0] + self._least_rest <= index:
            drawn_index, task = resting_heap[0]
            if self.drawn_at[task] == drawn_index and self.signal[task] >= self._band.limit:
                return task
            heapq.heappop(resting_heap)
        return None

    def _wake(self, index: int) -> None:
        """Return tasks that have rested long enough to the band's draws."""
        self._now = max(self._now, index)
        while self._resting and self._resting[0][0] + self._rest <= self._now:
            _, task = self._resting.popleft()
            self._refresh(task)

    def _refresh(self, task: int) -> None:
        signal, drawn_index = self.signal[task], self.drawn_at[task]
        is_rested = drawn_index < 0 or drawn_index + self._rest <= self._now
        in_band = signal >= self._band.limit
        self._weights.set(task, int(signal * _UNIT) if is_rested and in_band else 0)
        if in_band and not is_rested:
            heapq.heappush(self._resting_in_band, (int(drawn_index), task))

    def _all_weights(self) -> npt.NDArray[np.int64]:
        is_rested = (self.drawn_at < 0) | (self.drawn_at + self._rest <= self._now)
        return np.where(is_rested & (self.signal >= self._band.limit), self.signal * _UNIT, 0.0).astype(np.int64)


class Curriculum:
    """The curricula of all task sources, one for each, with a common limit of the band.

    Example, a source of three tasks, groups of 4: at first all are unseen and have equal weight, so draws follow the
    walk; task 0 is solved 4 times of 4, task 1 never, task 2 twice: from then on 2 is drawn, the others on the walk's
    turns, and 1 once more when it is due.
    """

    def __init__(
        self, sizes: Sequence[int], settings: CurriculumConfig, *, group_size: int, rest: tuple[int, int], seed: int
    ) -> None:
        """``sizes``: tasks of each source. Other arguments: see ``SourceCurriculum``."""
        self.band = Band(settings)
        self.sources = [
            SourceCurriculum(tasks, settings, self.band, size=group_size, rest=rest, seed=f"{seed}:{i}")
            for i, tasks in enumerate(sizes)
        ]

    def learn(self, source: int, task: int, evidence: TaskEvidence, reason: DrawReason) -> BandMove | None:
        """Update a source's task, see ``SourceCurriculum.learn``; a move of the band is applied to all sources."""
        band_move = self.sources[source].learn(task, evidence, reason)
        if band_move is not None:
            for source_curriculum in self.sources:
                source_curriculum.band_moved()
        return band_move

    def regions(self) -> dict[str, int]:
        """Count the tasks in each region over all sources."""
        region_counts = Counter[str]()
        for source in self.sources:
            region_counts.update(source.regions())
        return dict(region_counts)


def _random64(seed: int | str, index: int) -> int:
    """Return 64 random bits that depend on (seed, index) alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:draw:{index}".encode(), digest_size=8).digest(), "little")

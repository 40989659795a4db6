"""Selects the task and the size of the next group: a plain walk over the tasks, or that walk under a curriculum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from headway.algorithms.groups.batches import trains_without_reward
from headway.algorithms.groups.outcome import is_zero_variance
from headway.buffer.store import GroupBuffer
from headway.config.curriculum import CurriculumConfig
from headway.config.schema import AlgorithmConfig, Experiment
from headway.control.curriculum.curriculum import Curriculum, TaskChoice
from headway.records.curriculum import DRAW_REASONS, BandMove, CurriculumStep, Draw, DrawnGroup, TaskEvidence
from headway.records.rollout import FinishedGroup
from headway.records.task import Task
from headway.tasks.cursor import TaskCursor, make_task_orders

# the draw that stands for a group of the plain walk when a curriculum replays it
_IN_TURN = Draw(reason="cursor", probability=1.0, alpha=1.0, beta=1.0, signal=0.0, min_signal=0.0, size=0)


class SelectedTask(NamedTuple):
    """The next group's task, size and draw."""

    task: Task
    size: int  # attempts
    draw: Draw | None  # the curriculum's reason; None: the plain walk reached the task


class TaskSelector(Protocol):
    """Hands out tasks without end. The next task depends on the earlier ones and on finished groups alone."""

    def peek(self) -> SelectedTask:
        """The task that ``take`` would hand out now."""
        ...

    def take(self) -> SelectedTask:
        """Hand out one task and move on."""
        ...

    def learn(self, evidence: TaskEvidence) -> BandMove | None:
        """Update the selection with a finished group's evidence. Calls come in the order of commits."""
        ...

    def restore(self, buffer: GroupBuffer) -> None:
        """Restore the position that the run of ``buffer`` had."""
        ...

    def take_step(self) -> CurriculumStep | None:
        """The curriculum's draws and moves since the last call; None where there is no curriculum."""
        ...


def make_task_selector(
    experiment: Experiment, tasks: Sequence[Task], weights: Mapping[str, float] | None
) -> TaskSelector:
    """The selector that ``[curriculum]`` asks for. Raises ConfigurationError without tasks, or for an empty source."""
    if experiment.curriculum.mode == "uniform":
        return UniformSelector(TaskCursor(tasks, experiment.run.seed, weights), experiment.rollout.group_size)
    return AdaptiveSelector(experiment, tasks, weights)


def evidence_of(finished: FinishedGroup, rule: AlgorithmConfig) -> TaskEvidence | None:
    """The evidence of a group on its task; None when no member was judged. Members that a filter removed count: without
    them the task would seem easier or harder than it is. Equal rewards don't count as no variance if more than these
    trains the group under its ``rule``."""
    judged_rollouts = [r for r in finished.rollouts if r.failure is None and r.removal in (None, "filtered")]
    if not judged_rollouts:
        return None
    return TaskEvidence(
        group=finished.group.index,
        solved=sum(rollout.solved for rollout in judged_rollouts),
        valid=len(judged_rollouts),
        zero_variance=is_zero_variance([rollout.reward for rollout in judged_rollouts])
        and not trains_without_reward(judged_rollouts, rule),
        version=finished.first_version,
    )


class UniformSelector:
    """Selects every task in turn."""

    def __init__(self, cursor: TaskCursor, size: int) -> None:
        self._cursor = cursor
        self._size = size
        self._next: SelectedTask | None = None

    def peek(self) -> SelectedTask:
        """See ``TaskSelector``."""
        if self._next is None:
            self._next = SelectedTask(self._cursor.next(), self._size, None)
        return self._next

    def take(self) -> SelectedTask:
        """See ``TaskSelector``."""
        selected, self._next = self.peek(), None
        return selected

    def learn(self, evidence: TaskEvidence) -> BandMove | None:
        """Ignore the evidence: the order is fixed."""
        return None

    def restore(self, buffer: GroupBuffer) -> None:
        """See ``TaskSelector``."""
        self._cursor.seek(buffer.next_index)  # each group has taken one task
        self._next = None

    def take_step(self) -> None:
        return None


class AdaptiveSelector:
    """Selects tasks by a curriculum within each source. The weights of the sources alone determine their order.

    The state is a fold over what the buffer keeps: every group's draw, then every finished group's outcome in the order
    of commits. So a resumed run draws as one that was never killed would, given the same finished groups.
    """

    def __init__(self, experiment: Experiment, tasks: Sequence[Task], weights: Mapping[str, float] | None) -> None:
        self._orders, self._mixture = make_task_orders(tasks, experiment.run.seed, weights)
        self._walk_positions = [0] * len(self._orders)  # positions of the walks
        self._location_by_task: dict[str, tuple[int, int]] = {}  # id -> (source, number); of equal tasks, the first
        for source, task_order in enumerate(self._orders):
            for number, task in enumerate(task_order.tasks):
                self._location_by_task.setdefault(task.task_id, (source, number))
        self.curriculum = Curriculum(
            [len(task_order.tasks) for task_order in self._orders],
            CurriculumConfig.of(experiment.curriculum),
            group_size=experiment.rollout.group_size,
            rest=experiment.task_cooldown_groups,
            seed=experiment.run.seed,
        )
        self._index = 0
        self._next_source: int | None = None  # the source of the next group, once drawn
        self._draw_by_group: dict[int, tuple[int, int, Draw]] = {}  # open or failed: source, number, draw
        self._recent: list[Draw] = []

    def location_of(self, task_id: str) -> tuple[int, int] | None:
        """The (source, number) of a task; None for an unknown one."""
        return self._location_by_task.get(task_id)

    @property
    def next_index(self) -> int:
        """Admission index of the next group."""
        return self._index

    def peek(self) -> SelectedTask:
        """See ``TaskSelector``."""
        source, choice = self._choose()
        return SelectedTask(self._orders[source].tasks[choice.task], choice.draw.size, choice.draw)

    def take(self) -> SelectedTask:
        """See ``TaskSelector``."""
        source, choice = self._choose()
        self._next_source = None
        self._enter(source, choice.task, choice.draw)
        self._recent.append(choice.draw)
        return SelectedTask(self._orders[source].tasks[choice.task], choice.draw.size, choice.draw)

    def learn(self, evidence: TaskEvidence) -> BandMove | None:
        """See ``TaskSelector``."""
        drawn = self._draw_by_group.pop(evidence.group, None)
        if drawn is None:  # the experiment no longer has its task
            return None
        source, task, draw = drawn
        return self.curriculum.learn(source, task, evidence, draw.reason)

    def restore(self, buffer: GroupBuffer) -> None:
        """See ``TaskSelector``."""
        self.replay(buffer.drawn_groups())

    def replay(self, groups: Sequence[DrawnGroup]) -> None:
        """Fold over a run's groups, in the order of their indices. The selector must be new."""
        for group in self.replay_draws(groups):
            self.learn_group(group)

    def replay_draws(self, groups: Sequence[DrawnGroup]) -> list[DrawnGroup]:
        """Enter the draws of all ``groups``; returns the finished ones in the order of commits, for ``learn_group``."""
        for group in groups:
            source = self._mixture.next()
            location = self._location_by_task.get(group.task_id)
            self._index = group.index
            if location is None or location[0] != source:  # the experiment no longer has the task
                self._index += 1
            else:
                self._enter(source, location[1], group.draw or _IN_TURN)
        finished = [group for group in groups if group.evidence is not None]
        return sorted(finished, key=lambda group: group.finished_as)

    def learn_group(self, group: DrawnGroup) -> None:
        if group.evidence is not None:
            self.learn(group.evidence)

    def take_step(self) -> CurriculumStep:
        """See ``TaskSelector``."""
        draws, self._recent = self._recent, []
        reason_counts = Counter(draw.reason for draw in draws)
        draw_count = max(1, len(draws))
        return CurriculumStep(
            draws={reason: reason_counts[reason] for reason in DRAW_REASONS},
            solve_rate_mean=sum(draw.alpha / (draw.alpha + draw.beta) for draw in draws) / draw_count,
            signal_mean=sum(draw.signal for draw in draws) / draw_count,
            group_size_mean=sum(draw.size for draw in draws) / draw_count,
            min_signal=self.curriculum.band.limit,
            tasks=self.curriculum.regions(),
        )

    def _choose(self) -> tuple[int, TaskChoice]:
        if self._next_source is None:
            self._next_source = self._mixture.next()
        source = self._next_source
        next_task = self._orders[source].tasks[self._orders[source].number(self._walk_positions[source])]
        walk_next = self._location_by_task[next_task.task_id][1]
        return source, self.curriculum.sources[source].choose(self._index, walk_next)

    def _enter(self, source: int, number: int, draw: Draw) -> None:
        if TaskChoice(number, draw).walks:
            self._walk_positions[source] += 1
        self.curriculum.sources[source].drawn(self._index, number)
        self._draw_by_group[self._index] = (source, number, draw)
        self._index += 1

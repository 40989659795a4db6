"""Explains why tasks of a run were drawn, from its folder: a resume's fold, with its intermediate states kept."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headway.buffer.readers import read_history
from headway.config.curriculum import CurriculumConfig
from headway.config.schema import Experiment
from headway.control.curriculum.beta import group_size, interval, known_limits, mixed_probability
from headway.control.curriculum.curriculum import SourceCurriculum
from headway.orchestrator.preflight.references import read_left_out
from headway.orchestrator.task_selection import AdaptiveSelector
from headway.orchestrator.task_sets import load_task_sets, training_weights
from headway.records.curriculum import (
    DRAW_REASONS,
    CurriculumExplanation,
    Draw,
    DrawExplanation,
    DrawnGroup,
    Posterior,
    TaskExplanation,
)
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.runtime.run_directory import RunDirectory

NEXT_DRAWS = 5
LISTED_MATCHES = 8


class RunHistory:
    """A run's draws and outcomes beside its tasks. The run may be going on."""

    def __init__(self, run: str | Path, tasks: Sequence[Task] | None = None) -> None:
        """``tasks``: the training tasks; default: read as the run did. Raises ConfigurationError when there is no such
        run, or its tasks can't be read."""
        directory = RunDirectory(run)
        self.experiment = directory.read_experiment()
        if not directory.buffer.is_file():
            raise ConfigurationError(f"{directory.path}: no buffer.db, so no task was drawn yet")
        self.groups = read_history(directory.buffer)
        left_out_ids = read_left_out(directory.left_out)
        tasks = load_task_sets(self.experiment)["train"] if tasks is None else tasks
        self.tasks = [task for task in tasks if task.task_id not in left_out_ids]
        self.settings = CurriculumConfig.of(self.experiment.curriculum)
        self.adaptive = self.settings.mode == "adaptive"

    def _new_selector(self) -> AdaptiveSelector:
        return AdaptiveSelector(self.experiment, self.tasks, training_weights(self.experiment))

    # -- one task ------------------------------------------------------------------------------------

    def find(self, query: str) -> Task:
        """The task whose id is or begins with ``query``, or whose prompt holds it. Raises ConfigurationError, with
        the nearest, when there is none, or several."""
        exact_matches = [task for task in self.tasks if task.task_id == query]
        matches = exact_matches or [task for task in self.tasks if task.task_id.startswith(query)]
        matches = matches or [task for task in self.tasks if query and query in task.prompt]
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = _listed(matches)
            raise ConfigurationError(f"task {query!r}: {len(matches)} tasks match; give more of the id/text: {listed}")
        task_by_id = {task.task_id: task for task in self.tasks}
        near_ids = difflib.get_close_matches(query, sorted(task_by_id), n=3, cutoff=0.0)
        raise ConfigurationError(
            f"task {query!r}: none of the {len(task_by_id)} training tasks has this id or text; nearest: "
            + _listed([task_by_id[task_id] for task_id in near_ids])
        )

    def explain(self, task: Task) -> TaskExplanation:
        """Explain every draw of ``task``, the changes of its posterior, and its present state."""
        selector = self._new_selector()
        posteriors: dict[int, tuple[Posterior, Posterior]] = {}  # group -> before and after its evidence
        location = selector.location_of(task.task_id)
        assert location is not None
        source, task_number = selector.curriculum.sources[location[0]], location[1]
        for group in selector.replay_draws(self.groups):
            if group.task_id == task.task_id:
                prior = self._posterior(source, task_number)
                selector.learn_group(group)
                posteriors[group.index] = (prior, self._posterior(source, task_number))
            else:
                selector.learn_group(group)
        task_groups = [group for group in self.groups if group.task_id == task.task_id]
        due_index, drawn = int(source.due[task_number]), int(source.drawn_at[task_number])
        rest_groups = max(0, drawn + self.experiment.task_cooldown_groups[1] - selector.next_index) if drawn >= 0 else 0
        smallest_size, largest_size = self.experiment.smallest_group, self.experiment.largest_group
        return TaskExplanation(
            task_id=task.task_id,
            source=task.source if len(self.experiment.tasks.train) > 1 else "",
            prompt=task.prompt,
            answer=task.answer,
            adaptive=self.adaptive,
            region=source.region(task_number),
            now=self._posterior(source, task_number),
            min_signal=selector.curriculum.band.limit,
            size=group_size(*source.posterior(task_number), smallest_size, largest_size, self.settings.member_gain),
            rests_groups=rest_groups,
            due_groups=max(0, due_index - selector.next_index) if due_index > drawn and due_index >= 0 else None,
            band_probability=source.band_probability(task_number, selector.next_index),
            next_index=selector.next_index,
            draws=[_draw_explanation(group, posteriors.get(group.index), self.experiment) for group in task_groups],
        )

    # -- the whole run -------------------------------------------------------------------------------

    def overview(self) -> CurriculumExplanation:
        """Summarise regions, band, draws by reason, and the next draws if no group finished meanwhile."""
        selector = self._new_selector()
        selector.replay(self.groups)
        rate_counts = [0] * 10
        for source in selector.curriculum.sources:
            is_seen = source.signal >= 0
            for mean_rate in source.alpha[is_seen] / (source.alpha[is_seen] + source.beta[is_seen]):
                rate_counts[min(9, int(mean_rate * 10))] += 1
        reason_counts = Counter(map(_reason, self.groups))
        finished_counts = Counter(_reason(group) for group in self.groups if group.evidence is not None)
        flat = Counter(_reason(group) for group in self.groups if group.evidence and group.evidence.zero_variance)
        min_signal = selector.curriculum.band.limit
        regions, band_changes = selector.curriculum.regions(), list(selector.curriculum.band.changes)
        next_draws: list[DrawExplanation] = []
        for index in range(selector.next_index, selector.next_index + (NEXT_DRAWS if self.adaptive else 0)):
            task, size, draw = selector.take()
            planned_group = DrawnGroup(
                index=index, task_id=task.task_id, size=size, admitted_version=-1, draw=draw, ending=None
            )
            next_draws.append(_draw_explanation(planned_group, None, self.experiment, task.prompt))
        return CurriculumExplanation(
            adaptive=self.adaptive,
            tasks=len(self.tasks),
            groups=len(self.groups),
            regions=regions,
            min_signal=min_signal,
            known_limits=known_limits(min_signal, self.experiment.rollout.group_size),
            group_size=self.experiment.rollout.group_size,
            solve_rates=rate_counts,
            draws={reason: reason_counts[reason] for reason in DRAW_REASONS},
            zero_variance_share={
                reason: flat[reason] / finished_counts[reason] for reason in DRAW_REASONS if finished_counts[reason]
            },
            band_changes=band_changes,
            following=next_draws,
        )

    def _posterior(self, source: SourceCurriculum, number: int) -> Posterior:
        return _posterior_of(*source.posterior(number), self.experiment.rollout.group_size)


def _posterior_of(alpha: float, beta: float, size: int) -> Posterior:
    """Convert a Beta distribution to the numbers that people read."""
    low, high = interval(alpha, beta)
    return Posterior(
        mean=alpha / (alpha + beta), low=low, high=high, attempts=alpha + beta,
        signal=mixed_probability(alpha, beta, size),
    )  # fmt: skip


def _reason(group: DrawnGroup) -> str:
    return group.draw.reason if group.draw is not None else "cursor"


def _listed(tasks: Sequence[Task]) -> str:
    more_text = f" and {len(tasks) - LISTED_MATCHES} more" if len(tasks) > LISTED_MATCHES else ""
    return ", ".join(f"{task.task_id} ({task.prompt[:30]!r})" for task in tasks[:LISTED_MATCHES]) + more_text


def _draw_explanation(
    group: DrawnGroup, moved: tuple[Posterior, Posterior] | None, experiment: Experiment, prompt: str = ""
) -> DrawExplanation:
    draw, evidence = group.draw, group.evidence
    size = experiment.rollout.group_size
    return DrawExplanation(
        group=group.index,
        task_id=group.task_id,
        prompt=prompt,
        version=group.admitted_version,
        reason=_reason(group),
        probability=draw.probability if draw is not None else 1.0,
        explanation=_draw_reason(draw, experiment),
        size=group.size,
        size_explanation=_size_reason(draw, group.size, experiment),
        posterior=_posterior_of(draw.alpha, draw.beta, size) if draw is not None else None,
        outcome=_outcome(group),
        solved=evidence.solved if evidence is not None else None,
        valid=evidence.valid if evidence is not None else None,
        posterior_before=moved[0] if moved else None,
        posterior_after=moved[1] if moved else None,
    )


def _draw_reason(draw: Draw | None, experiment: Experiment) -> str:
    if draw is None:
        return "it was its turn (curriculum.mode = 'uniform')"
    cursor_share = CurriculumConfig.of(experiment.curriculum).cursor_share
    if draw.reason == "cursor":
        return f"a draw of the plain walk, as {cursor_share:.0%} of draws are, so that every task is drawn"
    if draw.reason == "replay":
        return "unsolved when last seen, and due again"
    if draw.reason == "band":
        return f"outcomes differ with probability {draw.signal:.2f}, {draw.min_signal:.2f} or more is in the band"
    if draw.probability == 1.0:
        return "no task of the band was free, so the walk's next"
    return f"the walk's next: unseen tasks are expected to reach the band (probability {draw.probability:.2f} of one)"


def _size_reason(draw: Draw | None, size: int, experiment: Experiment) -> str:
    if draw is None or experiment.smallest_group == experiment.largest_group:
        return "rollout.group_size"
    probability = mixed_probability(draw.alpha, draw.beta, size)
    signal_gain = mixed_probability(draw.alpha, draw.beta, size + 1) - probability
    if size == experiment.largest_group and signal_gain >= CurriculumConfig.of(experiment.curriculum).member_gain:
        return f"curriculum.max_group_size; one more would add {signal_gain:.3f} to the probability of a signal"
    return f"one more would add only {signal_gain:.3f} to the probability of a signal"


def _outcome(group: DrawnGroup) -> str:
    if group.ending is None:
        return "open" if group.evidence is None else "finished, waits to be trained"
    step_text = f" at step {group.step}" if group.ending == "trained" else ""
    return f"{group.ending}{step_text}" + (f" ({group.reason})" if group.reason and not step_text else "")

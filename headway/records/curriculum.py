"""Records of a curriculum: why a task was drawn, what its group showed, and the curriculum's own statistics."""

from __future__ import annotations

from typing import Literal

import msgspec

# cursor: next in the plain walk; explore: the walk's next task, because an unknown task is worth as much as known ones,
# or none in the band is free; band: outcomes are likely to differ; replay: unsolved, and due again
DrawReason = Literal["cursor", "explore", "band", "replay"]
DRAW_REASONS: tuple[DrawReason, ...] = ("cursor", "explore", "band", "replay")
# unseen: no group of it has finished; trivial and unsolved: outcomes are likely to be all the same, solved or not
Region = Literal["unseen", "trivial", "band", "unsolved"]
REGIONS: tuple[Region, ...] = ("unseen", "unsolved", "band", "trivial")


class Draw(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a task was drawn: stored with its group. Solve rates are Beta(alpha, beta) under what was known then."""

    reason: DrawReason
    probability: float  # that the turn fell on this task, of all that it could have fallen on
    alpha: float
    beta: float
    signal: float  # probability that outcomes of a group of the experiment's size differ
    min_signal: float  # lower limit of the band
    size: int  # attempts


class TaskEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of a finished group as evidence about its task. Groups that failed give none."""

    group: int  # admission index
    solved: int  # judged members that solve it
    valid: int  # judged members: neither failed nor stopped early; >= 1
    zero_variance: bool  # their rewards are all equal
    version: int  # of the oldest first token


class BandMove(msgspec.Struct, frozen=True, kw_only=True):
    """The band's limit moved, and why."""

    old_limit: float
    new_limit: float
    zero_variance_share: float  # of the last groups drawn from the band
    groups: int  # on which it was measured
    reason: str


class CurriculumStep(msgspec.Struct, frozen=True, kw_only=True):
    """The curriculum's part of a step's record: draws since the last one, and the state after them."""

    draws: dict[str, int] = {}  # reason -> groups
    solve_rate_mean: float = 0.0  # expected, of the tasks drawn; 0.0: none was
    signal_mean: float = 0.0  # probability that their outcomes differ
    group_size_mean: float = 0.0
    min_signal: float = 0.0  # lower limit of the band
    tasks: dict[str, int] = {}  # region -> tasks


class DrawnGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the choice of tasks sees it: the draw, its ending and its evidence."""

    index: int  # admission index
    task_id: str
    size: int
    admitted_version: int
    draw: Draw | None  # None: drawn by the plain walk
    ending: str | None  # None: it has not ended
    reason: str = ""  # of its ending
    step: int | None = None  # step that trained or trains it
    evidence: TaskEvidence | None = None  # once it has finished, unless it failed
    finished_as: int = 0  # its rank among groups with evidence, in the order they finished


class Posterior(msgspec.Struct, frozen=True, kw_only=True):
    """The posterior of a task's solve rate: mean, 5 % and 95 % quantiles, weight and expected signal."""

    mean: float
    low: float  # 5 % quantile
    high: float  # 95 % quantile
    attempts: float  # behind it, a prior's and aged ones included
    signal: float  # probability that outcomes of a group of the experiment's size differ


class DrawExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """A draw and its outcome, for people."""

    group: int  # admission index
    task_id: str
    prompt: str = ""
    version: int  # of the weights at admission; -1: not drawn yet
    reason: str
    probability: float
    explanation: str
    size: int
    size_explanation: str
    posterior: Posterior | None  # at the draw; None: no posterior was considered
    outcome: str
    solved: int | None
    valid: int | None
    posterior_before: Posterior | None  # when the group finished, other groups' outcomes meanwhile included
    posterior_after: Posterior | None


class TaskExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """A task's history."""

    task_id: str
    source: str  # "": the run has one only
    prompt: str
    answer: str
    adaptive: bool  # the run has a curriculum
    region: Region
    now: Posterior
    min_signal: float  # lower limit of the band
    size: int  # attempts, were it drawn now
    rests_groups: int  # until the band may draw it again
    due_groups: int | None  # until it may be replayed; None: it need not be
    band_probability: float  # that the next draw from the band falls on it
    next_index: int  # admission index of the next group
    draws: list[DrawExplanation]


class CurriculumExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """A run's curriculum as a whole."""

    adaptive: bool
    tasks: int
    groups: int  # drawn
    regions: dict[str, int]
    min_signal: float
    known_limits: tuple[float, float]  # solve rates that reach it, were they known
    group_size: int
    solve_rates: list[int]  # seen tasks by expected solve rate, ten bins
    draws: dict[str, int]  # reason -> groups
    zero_variance_share: dict[str, float]  # reason -> of its groups that finished
    band_changes: list[BandMove]
    following: list[DrawExplanation]  # what would be drawn next if no group finished meanwhile

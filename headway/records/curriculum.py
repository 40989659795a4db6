"""Why a task was drawn, what its group showed, and what a curriculum says of itself."""

from __future__ import annotations

from typing import Literal

import msgspec

# cursor: the plain walk's turn; explore: the walk's next task, because what isn't known is worth as much as what is, or
# nothing in the band is free; band: outcomes are likely to differ; replay: unsolved, and due again
DrawReason = Literal["cursor", "explore", "band", "replay"]
DRAW_REASONS: tuple[DrawReason, ...] = ("cursor", "explore", "band", "replay")
# unseen: no group of it has finished; trivial and unsolved: outcomes are likely to be all alike, solved or not
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


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished group shows of its task. Groups that failed show nothing."""

    group: int  # admission index
    solved: int  # valid members that solve it
    valid: int  # >= 1
    zero_variance: bool  # their rewards are all equal
    version: int  # of the oldest first token


class BandMove(msgspec.Struct, frozen=True, kw_only=True):
    """The band's limit moved, and why."""

    before: float
    after: float
    zero_variance_share: float  # of the last groups drawn from the band
    groups: int  # that it was measured on
    why: str


class CurriculumStep(msgspec.Struct, frozen=True, kw_only=True):
    """The curriculum's part of a step's record: draws since the last one, and the state after them."""

    draws: dict[str, int] = {}  # reason -> groups
    solve_rate_mean: float = 0.0  # expected, of the tasks drawn; 0.0: none was
    signal_mean: float = 0.0  # probability that their outcomes differ
    group_size_mean: float = 0.0
    min_signal: float = 0.0  # lower limit of the band
    tasks: dict[str, int] = {}  # region -> tasks

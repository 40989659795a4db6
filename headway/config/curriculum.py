"""The curriculum's keys: the choice of the next task, and of its group's size."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway.config.section import Positive, Probability, Section

Share = Annotated[float, Field(ge=0, lt=1)]


_MIN_SIGNAL_RANGE = (0.25, 0.8)
REPEAT_STEPS = 16  # cool-down of a task of the band: the groups of this number of steps


class CurriculumSection(Section):
    """The choice of the next task, and of its group's size: docs/curriculum.md."""

    # Tune: "adaptive" when most groups are filtered for equal rewards: too easy, or too hard
    mode: Literal["uniform", "adaptive"] = "uniform"  # every task in turn, or those whose outcomes are likely to differ
    half_life_steps: Annotated[float, Field(gt=0)] = 32.0  # versions after which an observation's weight is halved
    min_signal: Probability = 0.5  # a task is in the band when its group's outcomes differ with this probability
    min_group_size: Positive | None = None  # fewest attempts at a task; default: rollout.group_size
    # Tune: raise it for hard tasks, which need more attempts for one success
    max_group_size: Positive | None = None  # most attempts at a task; default: rollout.group_size

    @model_validator(mode="after")
    def _in_range(self) -> CurriculumSection:
        low, high = _MIN_SIGNAL_RANGE
        if not low <= self.min_signal <= high:
            raise ValueError(f"min_signal = {self.min_signal:g}: valid: {low:g} to {high:g}, where it is adjusted")
        return self


class CurriculumConfig(CurriculumSection):
    """The curriculum's settings: the keys of the file, and values that no file can set."""

    cursor_share: Annotated[float, Field(gt=0, le=1)] = 0.1  # share of draws from the cursor, which reaches all tasks
    replay_share: Share = 0.05  # share of draws that repeat an unsolved task, when one is due
    replay_after_groups: Positive = 256  # groups until an unsolved task is due; doubles each time
    min_signal_range: tuple[Probability, Probability] = _MIN_SIGNAL_RANGE  # min_signal is adjusted within it ...
    zero_variance_range: tuple[Share, Probability] = (0.1, 0.4)  # ... to keep the band's share of flat groups in this
    member_gain: Probability = 0.02  # a group grows while another member raises the signal's probability by this much

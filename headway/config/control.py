"""The controller's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.section import Positive, Section, named_once

KnobName = Literal["open_groups", "concurrent_rollouts", "steps_per_publish", "resting", "verifier_workers"]


class ControlConfig(Section):
    """Matches the two rates while the run goes on: docs/control.md."""

    # Tune: "advise" to see what it would set; "act" where lengths or tools change while the model learns
    mode: Literal["off", "advise", "act"] = "off"  # advise: write act's settings to the ledger, and set nothing
    # Tune: "move" on machines where both sides can use every device
    devices: Literal["recommend", "move"] = "recommend"  # another split of them that pays; move: change to it live
    interval_steps: Positive = 2  # least steps between two decisions; a decision is based on these
    # Tune: name knobs that must stay as they are, for a comparison
    pin: Annotated[tuple[KnobName, ...], named_once("knob")] = ()  # knobs that stay as the experiment sets them
    max_steps_per_publish: Positive = 4  # upper limit it may set; queue.budget + 1 where that is less
    max_verifier_workers: Positive = 8  # upper limit it may set, where cores and free memory suffice
    length_bias_limit: Annotated[float, Field(ge=0, le=1)] = 0.1  # KS due to scheduling; beyond it no load is added
    staleness_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01  # share of the rate given up for younger samples

"""The controller's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from headway.config.section import Section, named_once

KnobName = Literal["open_groups", "concurrent_rollouts", "steps_per_publish", "resting", "verifier_workers"]


class ControlConfig(Section):
    """Matches the two rates while the run goes on: docs/control.md."""

    # Tune: "advise" to see what it would set; "act" where lengths or tools change while the model learns
    mode: Literal["off", "advise", "act"] = "off"  # advise: write act's settings to the ledger, and set nothing
    # Tune: "move" on machines where both sides can use every device
    devices: Literal["recommend", "move"] = "recommend"  # another split of them that pays; move: change to it live
    # Tune: name knobs that must stay as they are, for a comparison
    pin: Annotated[tuple[KnobName, ...], named_once("knob")] = ()  # knobs that stay as the experiment sets them

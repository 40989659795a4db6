"""`[control]`: the keys of the controller, which changes a run's settings by its measurements."""

from __future__ import annotations

from typing import Annotated, Literal

from headway.config.section import Section, distinct_names

KnobName = Literal["open_groups", "concurrent_rollouts", "steps_per_publish", "idle_replicas", "verifier_workers"]


class ControlConfig(Section):
    """The controller, which matches the rates of generation and training during the run: docs/control.md."""

    # Tune: "advise" to see its settings without their effect; "act" where lengths or tools change during training
    mode: Literal["off", "advise", "act"] = "off"  # advise: write act's settings to the ledger, and set nothing
    # Tune: "move" on machines where generator and trainer can use every device
    devices: Literal["recommend", "move"] = "recommend"  # for a better split of the devices; move: change to it live
    # Tune: name knobs that must stay as they are, for a comparison
    pin: Annotated[tuple[KnobName, ...], distinct_names("knob")] = ()  # knobs that stay as the experiment sets them

"""`[critic]`: the values that ``algorithm.advantage = "gae"`` compares rewards with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.section import Section

Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
GAE = "gae"  # the advantage that needs a critic
TRUNK, ADAPTER = "trunk", "adapter"
_HEAD_STEP = 0.3  # learning rate x width of a head: AdamW changes values by about so many deviations in a step


class CriticConfig(Section):
    """The critic of `algorithm.advantage = "gae"`, and how its values become advantages: docs/objectives.md."""

    # Tune: "adapter" or a folder where explained_variance stays low: more memory, and passes of its own
    path: Text = TRUNK  # trunk: a head on the policy's hidden states; adapter: on one of model.path; a model's folder
    # Tune: higher while value_error still falls at the end, lower where it jumps
    learning_rate: Annotated[float, Field(ge=0)] | None = None  # constant; 0.3 / width, adapter: 1e-4, folder: 1e-5
    # Tune: the second to 1 for short answers with one reward, "length" for long ones, 0.95 for rewards by turn
    gae: tuple[Share, Share | Literal["length"]] = (1.0, 0.95)  # discount and decay of a loss token; length: as in VAPO

    @property
    def network_rate(self) -> float:
        """The learning rate of an adapter or a folder's model."""
        return (1e-4 if self.path == ADAPTER else 1e-5) if self.learning_rate is None else self.learning_rate

    def head_rate(self, width: int) -> float:
        """The learning rate of the head on hidden states of ``width`` numbers; ``learning_rate`` on the trunk alone."""
        return _HEAD_STEP / width if self.path != TRUNK or self.learning_rate is None else self.learning_rate

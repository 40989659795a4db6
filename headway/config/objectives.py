"""The parameters of losses and advantages: ``[algorithm.parameters]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headway.config.section import Positive, Section

# The losses and advantages that take parameters, and which; the others take none.
PARAMETERS: Mapping[str, Sequence[str]] = {
    "ppo_clip": ("dual_clip",),
    "decoupled_ppo": ("dual_clip",),
    "gspo": ("dual_clip",),
    "sapo": ("temperature_positive", "temperature_negative"),
    "dro": ("beta",),
    "dppo": ("divergence", "divergence_limit"),
    "pass_at_k": ("k",),
}


class ObjectiveParameters(Section):
    """Parameters of the chosen loss and advantage. A loss of your own takes any, in ``settings.parameters``."""

    model_config = ConfigDict(extra="allow")

    dual_clip: Annotated[float, Field(gt=1)] | None = None  # PPO's, GSPO: bound of the ratio where A < 0
    temperature_positive: Annotated[float, Field(gt=0)] = 1.0  # sapo: steepness of its gate if A > 0
    temperature_negative: Annotated[float, Field(gt=0)] = 1.05  # sapo: the same otherwise; higher fades sooner
    beta: Annotated[float, Field(gt=0)] = 0.05  # dro: weight of half the squared log ratio
    divergence: Literal["tv", "kl"] = "tv"  # dppo: of a token, |difference in probability| or binary KL in nats
    divergence_limit: Annotated[float, Field(gt=0, lt=1)] = 0.15  # dppo: most of a token (paper: kl 0.05)
    k: Positive = 2  # pass_at_k: the best of so many attempts is what counts

    def taken_by(self, loss: str, advantage: str) -> dict[str, Any]:
        """The parameters that ``loss`` and ``advantage`` take, by name: the defaults of those that aren't given, too.
        Raises ValueError where another's is given, or one that only a loss of the user's own (module:function) could
        take."""
        taken = [*PARAMETERS.get(loss, ()), *PARAMETERS.get(advantage, ())]
        for name in sorted(self.model_fields_set.difference(taken) if ":" not in loss else ()):
            others = ", ".join(of for of, names in PARAMETERS.items() if name in names)
            raise ValueError(
                f"algorithm.parameters.{name} = {getattr(self, name)!r} is {f'of {others}' if others else 'unknown'}: "
                f"the loss {loss!r} and the advantage {advantage!r} take {', '.join(taken) or 'none'}"
            )
        return {name: getattr(self, name) for name in dict.fromkeys([*taken, *sorted(self.model_fields_set)])}

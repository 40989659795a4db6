"""The parameters of losses and advantages: ``[algorithm.parameters]``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from headway.config.section import Positive, Section

# loss or advantage -> the parameters that it takes; the others take none.
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

    dual_clip: Annotated[float, Field(gt=1)] | None = None  # PPO losses, gspo: bound of the ratio where A < 0
    temperature_positive: Annotated[float, Field(gt=0)] = 1.0  # sapo: steepness of its gate if A > 0
    temperature_negative: Annotated[float, Field(gt=0)] = 1.05  # sapo: steepness otherwise; higher fades sooner
    beta: Annotated[float, Field(gt=0)] = 0.05  # dro: weight of half the squared log ratio
    divergence: Literal["tv", "kl"] = "tv"  # dppo: a token's |difference in probability| or binary KL in nats
    divergence_limit: Annotated[float, Field(gt=0, lt=1)] = 0.15  # dppo: limit for a token (paper: kl 0.05)
    k: Positive = 2  # pass_at_k: the best of k attempts counts
    _own: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])  # parameters of a user's loss, as set

    @classmethod
    def of_own_loss(cls, parameters: Mapping[str, Any], advantage: str) -> ObjectiveParameters:
        """Make the parameters of a user's loss, with those of the ``advantage``. Raises ValueError for a value that
        isn't JSON, which couldn't be stored with the run."""
        try:
            json.dumps(parameters, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"valid: texts, finite numbers, booleans, lists and tables of them ({error})") from None
        taken_names = PARAMETERS.get(advantage, ())
        instance = cls(**{name: value for name, value in parameters.items() if name in taken_names})
        instance._own.update((name, value) for name, value in parameters.items() if name not in taken_names)
        return instance

    def taken_by(self, loss: str, advantage: str) -> dict[str, Any]:
        """Return the parameters that ``loss`` and ``advantage`` take, by name, with defaults for those that aren't set.
        Raises ValueError where a parameter of another loss or advantage is set."""
        taken_names = [*PARAMETERS.get(loss, ()), *PARAMETERS.get(advantage, ())]
        for name in sorted(self.model_fields_set.difference(taken_names)):
            owners = ", ".join(owner for owner, names in PARAMETERS.items() if name in names)
            raise ValueError(
                f"algorithm.parameters.{name} = {getattr(self, name)!r} is of {owners}: the loss {loss!r} and the "
                f"advantage {advantage!r} take {', '.join(taken_names) or 'none'}"
            )
        return {name: getattr(self, name) for name in taken_names} | self._own


def _checked(value: Any, validated: ValidatorFunctionWrapHandler, info: ValidationInfo) -> ObjectiveParameters:
    if ":" not in info.data.get("loss", "") or not isinstance(value, dict):
        return validated(value)
    return ObjectiveParameters.of_own_loss(cast("dict[str, Any]", value), info.data.get("advantage", ""))


CheckedParameters = Annotated[ObjectiveParameters, WrapValidator(_checked)]  # uses the section's loss, validated first

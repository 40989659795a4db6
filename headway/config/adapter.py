"""`[model.adapter]`: low-rank weights that are trained beside a frozen model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway.config.section import Positive, Section

Quantization = Literal["4bit", "8bit"]


class AdapterConfig(Section):
    """Low-rank weights, W x + (alpha / rank) B A x: with this section the model's own weights W stay as they are. The
    keys have their meaning in PEFT's ``LoraConfig``."""

    path: str = ""  # folder of an adapter in PEFT's format to continue; its rank, alpha and targets then apply
    # Tune: 8 to 64; higher for SFT on much data, while RL needs little
    rank: Positive | None = None  # columns of B and rows of A
    # Tune: leave it at twice the rank, and tune trainer.learning_rate instead
    alpha: Annotated[float, Field(gt=0)] | None = None  # the adapter's product is scaled by alpha / rank
    rslora: bool = False  # the product is scaled by alpha / sqrt(rank) instead
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the adapter's input dropped; headway sft alone
    targets: tuple[str, ...] = ("all-linear",)  # ends of matrices' names; "all-linear": all but head and experts
    target_parameters: tuple[str, ...] = ()  # ends of names of experts' parameters, say "mlp.experts.gate_up_proj"

    @model_validator(mode="after")
    def _complete(self) -> AdapterConfig:
        fields = type(self).model_fields  # by value: a worker is given every key of the experiment
        keys = ("rank", "alpha", "rslora", "targets", "target_parameters")
        overridden = [key for key in keys if getattr(self, key) != fields[key].default]
        if self.path and overridden:
            raise ValueError(f"path and {', '.join(overridden)}: the adapter in the folder already sets these")
        if not self.path and (self.rank is None or self.alpha is None):
            missing_key = "rank" if self.rank is None else "alpha"
            raise ValueError(f"{missing_key} is missing: valid: rank and alpha, say 16 and 32, or path")
        if not self.path and not self.targets and not self.target_parameters:
            raise ValueError("targets and target_parameters are empty: no weights would be trained")
        if self.dropout and self.target_parameters:
            raise ValueError(f"dropout = {self.dropout:g} and target_parameters: all experts share an input; valid: 0")
        return self

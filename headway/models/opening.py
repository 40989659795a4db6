"""Opens the model of a run under the implementation that it asks for, and writes it back."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.config.model import ModelConfig
from headway.models.decoder import Decoder
from headway.models.hub.configuration import implementation_of
from headway.models.loading import load_model, save_model
from headway.models.packed_model import PackedModel
from headway.records.errors import ConfigurationError


def open_model(
    chosen: ModelConfig, dtype: str | torch.dtype, device: str | torch.device, path: str | Path | None = None
) -> PackedModel:
    """The model in ``path`` (default: that of ``chosen``) as the run's implementation loads it. Raises
    ConfigurationError."""
    folder = Path(path or chosen.path)
    if implementation_of(folder, chosen.implementation) == "headway":
        return load_model(folder, dtype, device)
    from headway.models.hub.model import load_hub  # transformers, which the project's own decoder does without

    return load_hub(folder, dtype, device, chosen.trust_remote_code)


def save_opened(model: PackedModel, path: str | Path, source: str | Path) -> None:
    """Write ``model`` into the folder ``path``, with the tokenizer of the folder ``source``. Not atomic: callers write
    into a folder of their own, and rename that."""
    if isinstance(model, Decoder):
        save_model(model, path, source)
    else:
        from headway.models.hub.model import HubModel

        assert isinstance(model, HubModel)
        model.save(path, source)


def require_decoder(model: PackedModel, what: str) -> Decoder:
    """``model``, which has to be the project's own. Raises ConfigurationError that names ``what`` needs it."""
    if not isinstance(model, Decoder):
        raise ConfigurationError(f"{what}: valid with a family of Headway's own; this model runs in transformers")
    return model

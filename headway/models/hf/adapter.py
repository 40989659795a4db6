"""Adapters of transformers models, as PEFT's modules and in PEFT's format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.config.adapter import AdapterConfig, Quantization
from headway.models.adapter_targets import ALL_LINEAR, BASE, WEIGHTS_FILE, base_digest, stored_metadata
from headway.models.hf.model import HfModel
from headway.models.loading import checked
from headway.models.lora import Dropout
from headway.models.packed_model import PackedModel, WithoutAdapter
from headway.records.errors import ConfigurationError

_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # keys that scale the product


class HfAdapter:
    """An adapter's float32 weights, which PEFT has put into the modules of an `HfModel`, whose own weights are frozen.
    Its methods and attributes that a trainer uses have the names of `Lora`'s."""

    quantization: Quantization | None = None  # of the base: none

    def __init__(self, model: HfModel, folder: str | Path, settings: AdapterConfig, seed: int) -> None:
        """``folder``: of the model. ``seed``: of a new adapter's weights. Raises ConfigurationError for settings that
        PEFT refuses for this architecture, and for an adapter of another base."""
        if settings.dropout:
            raise ConfigurationError(f"model.adapter.dropout = {settings.dropout:g}: valid beside transformers: 0")
        self.dropout = Dropout()
        self._model, self._folder = model, folder
        with torch.random.fork_rng(), _peft_errors("model.adapter"):
            torch.manual_seed(seed)
            if settings.path:
                stored_metadata(Path(settings.path), folder)
                self._peft = PeftModel.from_pretrained(model.module, settings.path, is_trainable=True)
            else:
                self._peft = get_peft_model(model.module, _lora_config(settings, model.module))
        self._peft.eval()
        named = self._peft.named_parameters()
        self.parameters: dict[str, nn.Parameter] = {name: param for name, param in named if param.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """The published weights: every matrix by name, without copying."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors``, the matrices of a revision, for `computing`. Raises ConfigurationError if names or
        shapes differ from the adapter's."""
        parameters = checked(self.parameters, tensors)
        return {name: tensors[name].to(param.device, param.dtype, copy=True) for name, param in parameters.items()}

    @contextmanager
    def computing(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Make the model compute with these matrices, which become the adapter's parameters; None: without adapter."""
        if weights is None:
            with self._peft.disable_adapter():
                yield
            return
        for name, parameter in self.parameters.items():
            parameter.data = weights[name]
        yield

    def merged(self) -> HfModel:
        """Merge the adapter into the model's weights, and return the model; the adapter can't be used afterwards."""
        self._peft.merge_and_unload()
        return self._model

    def load(self, path: str | Path) -> None:
        """Overwrite the matrices with those of an adapter in folder ``path``. Raises ConfigurationError, before any
        change, for an adapter with another base, other scales or other targets."""
        stored_metadata(Path(path), self._folder)
        present = self._peft.peft_config["default"]
        with _peft_errors(str(path)):
            stored = LoraConfig.from_pretrained(str(path))
            tensors = load_file(Path(path) / WEIGHTS_FILE)
        if keys := [key for key in _SCALING if getattr(stored, key) != getattr(present, key)]:
            raise ConfigurationError(
                f"{path}: {keys[0]} = {getattr(stored, keys[0])}, the run's {getattr(present, keys[0])}"
            )
        if different_names := sorted(tensors.keys() ^ self._peft_tensors().keys()):
            raise ConfigurationError(f"{path}: the adapter's weights differ in names: {', '.join(different_names[:4])}")
        with _peft_errors(str(path)):
            set_peft_model_state_dict(self._peft, tensors)

    def save(self, path: str | Path) -> None:
        """Write the adapter so that PEFT and `load` can read it. Not atomic: callers write into a scratch folder and
        rename it."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._peft_tensors().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt", BASE: base_digest(self._folder)})
        self._peft.peft_config["default"].save_pretrained(str(folder))

    def base_model(self) -> PackedModel:
        """The model without the adapter, which shares the weights' tensors."""
        return WithoutAdapter(self._model, self._peft.disable_adapter)

    def _peft_tensors(self) -> Mapping[str, Tensor]:
        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)


def _lora_config(settings: AdapterConfig, module: PreTrainedModel) -> LoraConfig:
    adapts_all = tuple(settings.targets) == (ALL_LINEAR,)
    excluded = None  # pattern of modules outside of the decoder: in a multimodal model only the decoder is adapted
    if module.config.get_text_config() is not module.config:
        decoder = module.get_decoder()
        name = next(name for name, submodule in module.named_modules() if submodule is decoder)
        excluded = f"(?!{re.escape(name)}[.]).*"
    return LoraConfig(
        r=settings.rank or 0,
        lora_alpha=settings.alpha or 0,  # pyright: ignore[reportArgumentType]  # any number
        use_rslora=settings.rslora,
        target_modules=ALL_LINEAR if adapts_all else list(settings.targets),
        exclude_modules=excluded,
        target_parameters=list(settings.target_parameters) or None,
        task_type="CAUSAL_LM",
    )


@contextmanager
def _peft_errors(subject: str) -> Iterator[None]:
    """Convert PEFT's errors in the block to a ConfigurationError about ``subject``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigurationError | torch.OutOfMemoryError):
            raise
        raise ConfigurationError(f"{subject}: PEFT refuses it: {str(error).strip()[:300]}") from error

"""Adapters beside a model of transformers: PEFT's own modules, in PEFT's format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
from headway.models.hub.model import HubModel
from headway.models.hub.pixels import Pixels
from headway.models.loading import checked
from headway.models.lora import Dropout
from headway.models.packed_model import PackedModel
from headway.records.errors import ConfigurationError

_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # keys that scale the product


class HubAdapter:
    """An adapter's weights, float32, which PEFT has put into the modules of a `HubModel`; the model's own are frozen.
    With the names of `Lora` for what a trainer asks of both."""

    quantization: Quantization | None = None  # of the base: none

    def __init__(self, model: HubModel, folder: str | Path, settings: AdapterConfig, seed: int) -> None:
        """``folder``: of the model. ``seed``: of a new adapter's weights. Raises ConfigurationError for what PEFT can't
        put into this architecture, and for an adapter of another base."""
        if settings.dropout:
            raise ConfigurationError(f"model.adapter.dropout = {settings.dropout:g}: valid beside transformers: 0")
        self.dropout = Dropout()
        self._model, self._folder = model, folder
        with torch.random.fork_rng(), _refused("model.adapter"):
            torch.manual_seed(seed)
            if settings.path:
                stored_metadata(Path(settings.path), folder)
                self._peft = PeftModel.from_pretrained(model.module, settings.path, is_trainable=True)
            else:
                self._peft = get_peft_model(model.module, _lora_config(settings, model.module))
        self._peft.eval()
        named = self._peft.named_parameters()
        self.parameters: dict[str, nn.Parameter] = {name: one for name, one in named if one.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Every matrix by name, without copying: what is published."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors``, the matrices of a revision, for `computing`. Raises ConfigurationError when names or
        shapes differ from the adapter's."""
        mine = checked(self.parameters, tensors)
        return {name: tensors[name].to(one.device, one.dtype, copy=True) for name, one in mine.items()}

    @contextmanager
    def computing(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Let the model compute with these matrices, which become the adapter's own; None: without an adapter."""
        if weights is None:
            with self._peft.disable_adapter():
                yield
            return
        for name, parameter in self.parameters.items():
            parameter.data = weights[name]
        yield

    def merged(self) -> HubModel:
        """The model with the adapter merged into its weights; this one is of no use any more."""
        self._peft.merge_and_unload()
        return self._model

    def load(self, path: str | Path) -> None:
        """Overwrite the matrices with those of an adapter in folder ``path``. Raises ConfigurationError, with nothing
        changed, for one of another base, other scales or other targets."""
        stored_metadata(Path(path), self._folder)
        mine = self._peft.peft_config["default"]
        with _refused(str(path)):
            its = LoraConfig.from_pretrained(str(path))
            tensors = load_file(Path(path) / WEIGHTS_FILE)
        if other := [key for key in _SCALING if getattr(its, key) != getattr(mine, key)]:
            raise ConfigurationError(
                f"{path}: {other[0]} = {getattr(its, other[0])}, the run's {getattr(mine, other[0])}"
            )
        if different := sorted(tensors.keys() ^ self._theirs().keys()):
            raise ConfigurationError(f"{path}: the adapter's weights differ in names: {', '.join(different[:4])}")
        with _refused(str(path)):
            set_peft_model_state_dict(self._peft, tensors)

    def save(self, path: str | Path) -> None:
        """Write the adapter so that PEFT and `load` can read it. Not atomic: callers write into a folder of their own,
        and rename that."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: one.detach().cpu().contiguous() for name, one in self._theirs().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt", BASE: base_digest(self._folder)})
        self._peft.peft_config["default"].save_pretrained(str(folder))

    def without(self) -> PackedModel:
        """The model without the adapter, whose weights are the same tensors."""
        return _Without(self._model, self._peft)

    def _theirs(self) -> Mapping[str, Tensor]:
        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)


class _Without(PackedModel):
    """A `HubModel` whose adapter is left out of every call."""

    shares_prefixes = False

    def __init__(self, model: HubModel, peft: PeftModel) -> None:
        super().__init__()
        self.config, self.checkpoints_layers = model.config, False
        self._both = (model, peft)  # in a tuple, so that no parameter is counted twice

    @property
    def device(self) -> torch.device:
        return self._both[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._both[0].dtype

    def forward_packed(
        self, ids_n: Tensor, lengths: list[int], continues: list[int] | None = None, pictures: Sequence[Pixels] = ()
    ) -> Tensor:
        """See `HubModel.forward_packed`."""
        model, peft = self._both
        with peft.disable_adapter():
            return model.forward_packed(ids_n, lengths, continues, pictures)

    def head(self, x_nd: Tensor) -> Tensor:
        """See `HubModel.head`."""
        model, peft = self._both
        with peft.disable_adapter():
            return model.head(x_nd)


def _lora_config(settings: AdapterConfig, module: PreTrainedModel) -> LoraConfig:
    every = tuple(settings.targets) == (ALL_LINEAR,)
    outside = None  # of the decoder: of a model that sees, the language model alone is adapted
    if module.config.get_text_config() is not module.config:
        decoder = module.get_decoder()
        name = next(name for name, one in module.named_modules() if one is decoder)
        outside = f"(?!{re.escape(name)}[.]).*"
    return LoraConfig(
        r=settings.rank or 0,
        lora_alpha=settings.alpha or 0,  # pyright: ignore[reportArgumentType]  # any number
        use_rslora=settings.rslora,
        target_modules=ALL_LINEAR if every else list(settings.targets),
        exclude_modules=outside,
        target_parameters=list(settings.target_parameters) or None,
        task_type="CAUSAL_LM",
    )


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what PEFT raises of a configuration into a ConfigurationError of ``what``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigurationError | torch.OutOfMemoryError):
            raise
        raise ConfigurationError(f"{what}: PEFT refuses it: {str(error).strip()[:300]}") from error

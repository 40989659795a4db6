"""Reference of the probes of vLLM: the trainer's forward pass on the published weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headway.config.model import ModelConfig
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.hf.configuration import HfConfig, read_config
from headway.models.layout import hugging_face_entries
from headway.models.loading import build
from headway.models.lora import Lora, use
from headway.models.packed_model import PackedModel
from headway.models.run_model import open_model
from headway.records.errors import ConfigurationError


class PublishedModel:
    """The last published model: a decoder, or a model of transformers, whose parameters are the published tensors
    themselves.

    It takes no memory of its own, returns the tensors by Hugging Face's names, and is the reference of the probes.
    """

    def __init__(self, shape: DecoderConfig | HfConfig, chosen: ModelConfig | None = None) -> None:
        """``chosen``: the configuration by which `load`, or `take` in transformers, makes the model; None: unused."""
        self.shape = shape
        self._chosen = chosen
        self._model: PackedModel | None = None  # None before the first version

    @classmethod
    def of(cls, chosen: ModelConfig) -> PublishedModel:
        """Make the reference of a model as the trainer runs it. Raises ConfigurationError."""
        return cls(read_config(chosen), chosen)

    def load(self, dtype: str | torch.dtype) -> None:
        """Use the weights of the model's folder from now on."""
        assert self._chosen is not None
        self._model = model = open_model(self._chosen, dtype, "cpu")
        if isinstance(self.shape, HfConfig):  # prompts are scored with all tokens, also those never sampled
            model.placeholders = []  # pyright: ignore[reportArgumentType]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Use ``tensors`` from now on. Raises ConfigurationError, with nothing changed, if they aren't this model's."""
        dtypes = {tensor.dtype for tensor in tensors.values()}
        model, dtype = self._model, next(iter(dtypes))
        if isinstance(self.shape, HfConfig):
            if model is None:
                self.load(dtype)
                model = self._model
        elif model is None or dtypes != {model.dtype}:
            model = build(self.shape, dtype)  # its memory is never touched
        assert model is not None
        parameters = dict(model.named_parameters())
        expected_shapes = {name: parameter.shape for name, parameter in parameters.items()}
        published_shapes = {name: tensor.shape for name, tensor in tensors.items()}
        differing = {name for name, _ in expected_shapes.items() ^ published_shapes.items()}
        if differing:
            raise ConfigurationError(f"the published weights are not this model's: {', '.join(sorted(differing)[:4])}")
        for name, parameter in parameters.items():
            parameter.requires_grad_(False)
            parameter.data = tensors[name]
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by Hugging Face's names, layer by layer; a tied head is not repeated."""
        if isinstance(self._model, Decoder):
            yield from ((entry.name, entry.view.reshape(entry.shape)) for entry in hugging_face_entries(self._model))
            return
        from headway.models.hf.model import HfModel

        assert isinstance(self._model, HfModel)
        yield from self._model.tensors_in_files().items()

    def multiplied(self) -> dict[str, Tensor]:
        """Return the tensors by the names of `tensors`, without the matrices that are transposed in vLLM: those of
        transformers' Conv1D (GPT-2)."""
        assert self._model is not None
        class_by_name = {f"{name}.weight": type(module).__name__ for name, module in self._model.named_modules()}
        return {name: tensor for name, tensor in self.tensors() if class_by_name.get(f"module.{name}") != "Conv1D"}

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0, lora: Lora | None = None) -> list[float]:
        """Return log-softmax(z / ``temperature``) of ``ids[1:]``, each given the tokens before it, by the trainer's
        forward pass on the CPU, with an adapter of a decoder if one is given."""
        assert self._model is not None
        sequence = torch.tensor(ids)
        if isinstance(self._model, Decoder):
            use(self._model, None if lora is None else lora.layers)
        with torch.inference_mode():
            logits = self._model(sequence, [len(ids)])[:-1].float() / temperature
            logprobs_n1 = torch.log_softmax(logits, dim=-1).gather(-1, sequence[1:, None])
        return logprobs_n1[:, 0].tolist()

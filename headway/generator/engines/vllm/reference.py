"""Reference of the probes of vLLM: headway's own forward pass on the published weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.layout import hugging_face_entries
from headway.models.loading import build
from headway.models.lora import Lora, use
from headway.records.errors import ConfigurationError


class PublishedModel:
    """The last published model: a decoder whose parameters are the published tensors themselves.

    It takes no memory of its own, returns the tensors by Hugging Face's names, and is the reference of the probes.
    """

    def __init__(self, shape: DecoderConfig) -> None:
        self.shape = shape
        self._decoder: Decoder | None = None  # None before the first version

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Use ``tensors`` from now on. Raises ConfigurationError, with nothing changed, if they aren't this model's."""
        dtypes = {tensor.dtype for tensor in tensors.values()}
        decoder = self._decoder
        if decoder is None or dtypes != {decoder.dtype}:
            decoder = build(self.shape, next(iter(dtypes)))  # its memory is never touched
        parameters = dict(decoder.named_parameters())
        expected = {name: parameter.shape for name, parameter in parameters.items()}
        given = {name: tensor.shape for name, tensor in tensors.items()}
        wrong = {name for name, _ in expected.items() ^ given.items()}
        if wrong:
            raise ConfigurationError(f"the published weights are not this model's: {', '.join(sorted(wrong)[:4])}")
        for name, parameter in parameters.items():
            parameter.requires_grad_(False)
            parameter.data = tensors[name]
        self._decoder = decoder

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by Hugging Face's names, layer by layer; a tied head is not repeated."""
        assert self._decoder is not None
        for entry in hugging_face_entries(self._decoder):
            yield entry.name, entry.view.reshape(entry.shape)

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0, lora: Lora | None = None) -> list[float]:
        """log-softmax(z / ``temperature``) of ``ids[1:]``, each given the tokens before it: headway's own forward pass
        on the CPU, with an adapter if one is given."""
        assert self._decoder is not None
        sequence = torch.tensor(ids)
        use(self._decoder, None if lora is None else lora.layers)
        with torch.inference_mode():
            logits = self._decoder(sequence, [len(ids)])[:-1].float() / temperature
            chosen = torch.log_softmax(logits, dim=-1).gather(-1, sequence[1:, None])
        return chosen[:, 0].tolist()

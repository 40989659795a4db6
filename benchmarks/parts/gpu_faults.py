"""Faults that ``gpu_measure.py --plant-fault`` plants in the process of a step: each breaks what that step measures."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.parts import gpu_rates
from headway.generator.engines.torch import model_runner
from headway.models import kernels
from headway.trainer.streams import token_logprobs
from headway.weights.shared_memory import Publisher


def _copies() -> None:
    """Copies on the device copy nothing."""
    torch.Tensor.copy_ = lambda self, *_, **__: self


def _norm() -> None:
    """A norm is a tenth too large."""
    norm = kernels.rms_norm
    kernels.rms_norm = lambda *arguments: norm(*arguments) * 1.1


def _sampler() -> None:
    """Log-probabilities are 20 nats too high."""
    sample = model_runner.sample_tokens

    def wrong(*arguments: Any) -> Any:
        sampled = sample(*arguments)
        sampled.tokens[1] += 20.0
        return sampled

    model_runner.sample_tokens = wrong


def _gradient() -> None:
    """The gradient of the log-probabilities is a tenth too large."""
    right = token_logprobs.target_logprobs

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = right(*arguments)
        return 1.1 * logprobs - 0.1 * logprobs.detach(), entropies

    token_logprobs.target_logprobs = wrong


def _weights() -> None:
    """A published version's last byte isn't that of its checksum."""
    publish = Publisher.publish

    def wrong(publisher: Publisher, *arguments: Any) -> Any:
        published = publish(publisher, *arguments)
        with open(published.path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return published

    Publisher.publish = wrong


def _model_file() -> None:
    """The model's file ends too early."""
    make = gpu_rates.experiment

    def wrong(*arguments: Any, **sections: Any) -> Any:
        chosen = make(*arguments, **sections)
        os.truncate(f"{chosen.model.path}/model.safetensors", 1000)
        return chosen

    gpu_rates.experiment = wrong


def _gather() -> None:
    """A collective writes nothing."""
    torch.distributed.all_gather_into_tensor = lambda *_: None


FAULTS: dict[str, Callable[[], None]] = {
    "facts": _copies,
    "kernels": _norm,
    "step": _sampler,
    "engine": _sampler,
    "trainer": _gradient,
    "publish": _weights,
    "vllm": _weights,
    "loop": _model_file,
    "tests": lambda: None,  # `tests_step` chooses none of the tests
    "nccl": _gather,
}


def plant(step: str) -> None:
    """Break what a step measures, in this process."""
    FAULTS[step]()

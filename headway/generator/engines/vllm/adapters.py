"""Adapters of both vLLM engines: revisions registered in vLLM, their files, the log-probabilities expected.

vLLM binds a request to the LoRA that it came with, so every published version is a LoRA of its own, a *revision*.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.config.engines import VLLM_LORA_RANKS
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.reference import PublishedModel
from headway.models.adapter_files import open_adapter, save_adapter
from headway.models.configuration import DecoderConfig
from headway.models.lora import Lora
from headway.records.errors import ConfigurationError
from headway.records.generation import BASE_MODEL, POLICY_ADAPTER, PublishedWeights
from headway.weights.shared_memory import Subscriber
from headway.weights.slots import SHARED_MEMORY, exchange_folder

LABELS = "headway-"  # start of every LoRA's name in vLLM
_EQUAL_NATS = 1e-2  # largest difference to a forward pass without the target that vLLM leaves out
_OTHER_SEED = 1 << 20  # of the B matrices with which an adapter is proved


class VllmRevision(NamedTuple):
    """An adapter as one update made it: registered in vLLM until it is unloaded."""

    name: str
    version: int
    label: str  # its unique name in vLLM, also the salt of its KV
    handle: Any  # vLLM's LoRARequest, or of a server the LoRA's id


class VllmAdapters:
    """The adapters of an engine by name: of each the newest revision, and older ones that requests hold.

    The model without an adapter is one of them, with B = 0: on a CPU, vLLM 0.32 computes a request without a LoRA,
    beside others with one, by the LoRA in its last slot (``lora/ops/torch_ops/lora_ops.py``: index -1).
    """

    def __init__(self, settings: EngineSettings, model: PublishedModel) -> None:
        """``model``: the base. Raises ConfigurationError for an adapter that isn't this model's, and for parts that
        vLLM can't compute."""
        self._settings, self._model = settings, model
        self._instance_id = uuid.uuid4().hex[:12]  # a server may have labels of a predecessor
        model_config = model.shape
        assert isinstance(model_config, DecoderConfig)
        self._loras = {
            name: open_adapter(settings.model_path, model_config, adapter, seed=settings.seed)
            for name, adapter in settings.adapters.items()
        }
        for name, lora in self._loras.items():
            if expert_names := [adapted.target.name for adapted in lora.targets if adapted.target.experts]:
                raise ConfigurationError(
                    f"adapter {name!r} has {expert_names[0]}: vLLM's LoRA of routed experts hasn't been proved; valid: "
                    "generator.engine = 'torch', or an adapter without target_parameters"
                )
        self._loras[BASE_MODEL] = _with_outputs(next(iter(self._loras.values())), 0.0)
        self.names = list(self._loras)  # the bare model's included
        self._capacity = len(self.names) - 1 + settings.adapter_revisions  # revisions registered at once
        adapted_targets = [adapted for lora in self._loras.values() for adapted in lora.targets]
        valid_ranks = [rank for rank in VLLM_LORA_RANKS if rank >= max(adapted.rank for adapted in adapted_targets)]
        if not valid_ranks:
            raise ConfigurationError(f"an adapter's rank is too large for vLLM; valid: up to {VLLM_LORA_RANKS[-1]}")
        # Of vLLM's EngineArgs: no layer is wrapped but the targets.
        self.arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": self._capacity,
            "max_cpu_loras": self._capacity,
            "max_lora_rank": valid_ranks[0],
            "lora_target_modules": sorted({_end(adapted.target.name) for adapted in adapted_targets}),
        }
        self._subscriber = Subscriber()
        self._labels = 0
        self.updates = 0  # fetched so far
        self.registered: list[VllmRevision] = []  # oldest first
        self.newest: dict[str, VllmRevision] = {}  # by name

    def unknown(self, name: str) -> str:
        """Return why no request can use this adapter; "" if it is registered."""
        return "" if name in ("", *self.names) else f"there is no adapter {name!r}; valid: {', '.join(self.names)}"

    def chosen(self, name: str, version: int | None) -> VllmRevision:
        """Return a request's revision: that of ``version``, with which it began, if still registered, else the newest.
        ``name`` as in `GenerationRequest.adapter`."""
        newest_revision = self.newest.get(name or POLICY_ADAPTER) or self.newest[BASE_MODEL]
        matches = [rev for rev in self.registered if (rev.name, rev.version) == (newest_revision.name, version)]
        return matches[-1] if matches else newest_revision

    def fetch(self, published: PublishedWeights) -> None:
        """Take the published weights of an adapter. Raises WeightsCorrupt, or ConfigurationError for a name that isn't
        registered and for other names or shapes, with nothing changed."""
        if published.adapter in ("", BASE_MODEL) or published.adapter not in self._loras:
            raise ConfigurationError(f"an update of adapter {published.adapter!r}; valid: {', '.join(self.names[:-1])}")
        self._loras[published.adapter].copy_weights(self._subscriber.fetch(published))
        self.updates += 1

    @contextmanager
    def written(self, name: str, *, prove: bool = False) -> Iterator[tuple[str, Path]]:
        """Yield a new label and a folder in PEFT's format with the adapter's weights, removed after the block.
        ``prove``: with B that changes every product of a target about as much as its matrix does."""
        self._labels += 1
        label = f"{LABELS}{self._instance_id}-{name}-{self._labels}"
        with exchange_folder(self._settings.exchange_directory or SHARED_MEMORY) as folder:
            save_adapter(self._lora(name, prove), folder / label, self._settings.model_path)
            yield label, folder / label

    def add(self, revision: VllmRevision) -> None:
        """Note a revision that vLLM has, the newest of its name from now on."""
        self.registered.append(revision)
        self.newest[revision.name] = revision

    def idle(self, held: Collection[VllmRevision | None]) -> list[VllmRevision]:
        """Return the registered revisions that are neither newest nor ``held`` by requests."""
        return [rev for rev in self.registered if rev is not self.newest.get(rev.name) and rev not in held]

    def crowding(self, name: str, held: Collection[VllmRevision | None]) -> VllmRevision | None:
        """Return the revision to unload before another one of ``name`` can be registered, if possible one that isn't
        ``held`` by a request; None if the capacity suffices."""
        if len(self.registered) < self._capacity:
            return None
        replaceable_revisions = [rev for rev in self.registered if rev.name == name or rev is not self.newest[rev.name]]
        return next((rev for rev in replaceable_revisions if rev not in held), replaceable_revisions[0])

    def logprobs(self, name: str, ids: Sequence[int], *, prove: bool = False) -> list[float]:
        """Return the log-probabilities of ``ids[1:]`` expected of vLLM: headway's forward pass with the adapter."""
        return self._model.logprobs(ids, lora=self._lora(name, prove))

    def absent(self, name: str, ids: Sequence[int], got: Sequence[float]) -> str:
        """Name the targets that vLLM left out of ``got``, for an adapter that didn't pass its proof."""
        for target_name in self.arguments["lora_target_modules"]:
            expected = self._model.logprobs(ids, lora=_with_outputs(self._loras[name], 1.0, leave_out=target_name))
            if max(abs(actual - other) for actual, other in zip(got, expected, strict=True)) < _EQUAL_NATS:
                return f"; it leaves out {target_name}"
        return ""

    def _lora(self, name: str, prove: bool) -> Lora:
        return _with_outputs(self._loras[name], 1.0) if prove else self._loras[name]


def _with_outputs(lora: Lora, size: float, leave_out: str = "") -> Lora:
    """Return a copy whose B is random, so that scale * B A x is about ``size`` times as large as x, and 0 at targets
    that end with ``leave_out``."""
    changed_lora = copy.deepcopy(lora)
    generator = torch.Generator().manual_seed(_OTHER_SEED)
    for pair in changed_lora.pairs():
        b = torch.randn(pair.b.shape, generator=generator) * (size / (pair.scale * pair.a.shape[-2] ** 0.5))
        pair.b.data.copy_(b * (_end(pair.target.name) != leave_out))
    return changed_lora


def _end(name: str) -> str:
    return name.rpartition(".")[2]

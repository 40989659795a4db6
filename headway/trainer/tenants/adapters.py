"""The tenants' adapters under training: each with its optimiser, its version, its gradients and its durable states."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.models.adapter_targets import AdaptedTarget, targets_of
from headway.models.configuration import DecoderConfig
from headway.models.lora import Lora
from headway.models.shards.shard import Shard
from headway.records.errors import StorageFailed
from headway.records.tenants.protocols import AdapterNotLoaded, AppliedState, TenantAdapter, TenantRefused
from headway.records.training import OptimiserSettings
from headway.trainer.optimizer import AdamW
from headway.trainer.tenants.state_slots import StateFile, StoredState, flush_state

_ATTENTION, _MLP = ("qkv", "output"), ("gate_up", "down")  # products; a mixture's experts are its MLP, its router isn't
_SKIPPED = "skipped_steps:sum"


def tenant_targets(config: DecoderConfig, adapter: TenantAdapter, alpha: float) -> tuple[AdaptedTarget, ...]:
    """The matrices that a tenant's adapter adapts."""
    products = _ATTENTION * adapter.train_attention + _MLP * adapter.train_mlp
    targets = (target for target in targets_of(config) if target.product in products)
    return tuple(AdaptedTarget(target=target, rank=adapter.rank, alpha=alpha) for target in targets)


class TrainedAdapter:
    """An adapter under training, in memory.

    Invariant: weights, moments and version are those of the newest state in ``file``, since each change is written at
    once; only accumulated gradients are in memory alone.
    """

    def __init__(self, lora: Lora, file: StateFile | None = None) -> None:
        """``file``: of a state that is read; None: `create_file` follows."""
        self.lora = lora
        self.optimiser = AdamW(lora.parameters.values())
        for parameter in lora.parameters.values():
            self.optimiser.state[parameter] = self.optimiser.zero_state(parameter)
        self._file = file
        if file is not None:
            with torch.no_grad():
                file.read(self._tensors())

    @property
    def file(self) -> StateFile:
        """The file of the durable states."""
        assert self._file is not None
        return self._file

    def create_file(self, path: Path, stored: StoredState) -> None:
        """Make the state durable in a new file. Raises StorageFailed."""
        self._file = StateFile.create(path, stored, self._tensors())

    def optim_step(self, sequence: int, settings: OptimiserSettings) -> dict[str, float]:
        """Apply and clear the accumulated gradients, and make the state durable. A gradient that isn't finite changes
        weights and moments not at all. Raises TenantRefused without gradients."""
        parameters, stored = list(self.lora.parameters.values()), self.file.stored
        if all(parameter.grad is None for parameter in parameters):
            raise TenantRefused("optim_step: no gradients: valid: after a forward_backward since the last optim_step")
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm_tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        metrics, version, grad_norm = {_SKIPPED: 1.0}, stored.version, float(norm_tensor)
        if math.isfinite(grad_norm):
            if grad_norm > settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, settings.max_grad_norm, norm_tensor)
            self.optimiser.step(settings)
            metrics, version = {"grad_norm:mean": grad_norm, _SKIPPED: 0.0}, version + 1
        self.set_gradients({})
        applied = AppliedState(sequence=sequence, adapter=stored.applied.adapter, metrics=metrics)
        self.file.write(StoredState(applied=applied, version=version, alpha=stored.alpha), self._tensors())
        return metrics

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, by name."""
        parameters = self.lora.parameters
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the accumulated gradients."""
        for name, parameter in self.lora.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def optimiser_shards(self) -> list[Shard]:
        """The optimiser's tensors in its memory, named KIND/PARAMETER as in a run's checkpoints."""
        return [
            Shard(name=f"{kind}/{name}", shape=tuple(tensor.shape), first=0, tensor=tensor)
            for name, parameter in self.lora.parameters.items()
            for kind, tensor in self.optimiser.state[parameter].items()
        ]

    def _tensors(self) -> list[Tensor]:
        return [*self.lora.parameters.values(), *(shard.tensor for shard in self.optimiser_shards())]


class AdapterTable:
    """The adapters of all tenants in a worker.

    Lifecycle of one: *absent* -> *resident* (`add`, `restore`) <-> *paged out* -> *absent* (`evict`). Above
    ``resident`` adapters the least recently used are paged out: their accumulated gradients move to host memory, all
    else is in the file already. Example: ``resident`` = 2 and models used in the order a, b, c, a: c pages a out, then
    a pages b out.
    """

    def __init__(self, config: DecoderConfig, base: str, folder: Path, device: torch.device, resident: int) -> None:
        """``base``: the digest of its files. ``folder``: of the states."""
        self._config, self._base, self._folder, self._device = config, base, folder, device
        self.resident = resident
        self._adapters: OrderedDict[str, TrainedAdapter] = OrderedDict()  # least recently used first
        self._paged_out: dict[str, dict[str, Tensor]] = {}  # model -> gradients

    def new(self, adapter: TenantAdapter, alpha: float) -> Lora:
        """Make a fresh adapter's weights. Raises TenantRefused for one that adapts nothing."""
        if not (targets := tenant_targets(self._config, adapter, alpha)):
            raise TenantRefused("lora_config: train_mlp or train_attn: valid: at least one of them")
        lora = Lora(targets, self._device, seed=adapter.seed % (1 << 63))
        lora.base = self._base
        return lora

    def add(self, model_id: str, trained: TrainedAdapter, stored: StoredState) -> None:
        """Make an adapter durable and resident, in the place of the model's present one. Raises StorageFailed; nothing
        is changed then."""
        trained.create_file(self._path(model_id), stored)
        self._paged_out.pop(model_id, None)
        self._adapters[model_id] = trained
        self._page_out(model_id)

    def get(self, model_id: str) -> TrainedAdapter:
        """Return an adapter, which is resident until ``resident`` others were used. Raises AdapterNotLoaded, and
        StorageFailed for a paged-out one whose file can't be read."""
        if model_id in self._adapters:
            self._adapters.move_to_end(model_id)
        elif model_id not in self._paged_out:
            raise AdapterNotLoaded(f"{model_id} isn't loaded")
        else:
            if (trained := self._read(model_id)) is None:
                raise StorageFailed(f"{self._path(model_id)} is missing")
            trained.set_gradients(self._paged_out.pop(model_id))
            self._adapters[model_id] = trained
            self._page_out(model_id)
        return self._adapters[model_id]

    def restore(self, model_id: str) -> StoredState | None:
        """Load the newest durable state, without gradients; None: the model has none. Raises StorageFailed."""
        self._drop(model_id)
        if (trained := self._read(model_id)) is None:
            return None
        self._adapters[model_id] = trained
        self._page_out(model_id)
        return trained.file.stored

    def evict(self, model_id: str) -> None:
        """Drop an adapter from memory, its gradients too. Raises StorageFailed if its file can't be flushed."""
        self._drop(model_id)
        flush_state(self._path(model_id))

    def _drop(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)
        self._paged_out.pop(model_id, None)

    def _page_out(self, used: str) -> None:
        self._adapters.move_to_end(used)
        while len(self._adapters) > self.resident:
            model_id, trained = self._adapters.popitem(last=False)
            self._paged_out[model_id] = {name: gradient.cpu() for name, gradient in trained.gradients().items()}

    def _read(self, model_id: str) -> TrainedAdapter | None:
        if (file := StateFile.open(self._path(model_id))) is None:
            return None
        return TrainedAdapter(self.new(file.stored.applied.adapter, file.stored.alpha), file)

    def _path(self, model_id: str) -> Path:
        return self._folder / model_id.replace("/", "_")

"""The process that trains the adapters of all tenants on one frozen base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors import SafetensorError

from headway.config.adapter import Quantization
from headway.models.adapter_files import load_adapter, save_adapter
from headway.models.adapter_targets import base_digest
from headway.models.cpu import native
from headway.models.hf.configuration import implementation_of
from headway.models.loading import load_model, parse_dtype
from headway.models.quantization import load_frozen
from headway.records.errors import ConfigurationError, StorageFailed
from headway.records.tenants.protocols import (
    AdapterNotLoaded,
    AppliedState,
    CheckpointKind,
    PassOutcome,
    TenantAdapter,
    TenantRefused,
    TrainingPass,
)
from headway.records.training import OptimiserSettings
from headway.runtime.devices import native_kernels_enabled
from headway.trainer.checkpoints import CheckpointState, verify, write_folder
from headway.trainer.service import use_device
from headway.trainer.state_files import StateFiles, write_state
from headway.trainer.tenants.adapters import AdapterTable, TrainedAdapter, tenant_targets
from headway.trainer.tenants.passes import PassInProgress, compute
from headway.trainer.tenants.state_slots import StoredState

_RESERVED = (".tmp", ".old")  # ends of the folders that `write_folder` makes beside a checkpoint


class TenantTrainerService:
    """The worker class of the tenants' trainer: `records.tenants.TenantTrainer`, call by call.

    Each tenant's numbers are those that it would have alone, bit for bit, unless ``co_batch`` is set.
    ``context``: the worker's (device, log).
    """

    def __init__(
        self,
        context: Any,
        *,
        model_path: str,
        store: str,
        dtype: str = "float32",
        quantization: Quantization | None = None,
        implementation: str | None = None,
        alpha: float = 32.0,
        resident_adapters: int = 32,
        co_batch: bool = False,
        micro_batch_tokens: int = 16384,
        gradient_checkpointing: Any = "none",
    ) -> None:
        """``store``: the folder of states and checkpoints. ``co_batch``: tenants share passes. Raises
        ConfigurationError for a base that isn't the project's decoder."""
        device = use_device(context.device)
        if implementation_of(model_path, implementation) != "headway":  # pyright: ignore[reportArgumentType]
            raise ConfigurationError(
                f"model.path = {model_path!r} as a model of transformers: tenants need Headway's decoder; "
                "valid: model.implementation = 'headway'"
            )
        if quantization is None:
            self._model = load_model(model_path, dtype, device).requires_grad_(False)
        else:
            self._model = load_frozen(model_path, quantization, device).to(parse_dtype(dtype))
        self._model.checkpointing = gradient_checkpointing
        self._model_path, self._alpha = model_path, alpha
        self._quantization: Quantization | None = quantization
        self._co_batch, self._most_tokens = co_batch, micro_batch_tokens
        uses_native = native_kernels_enabled() and self._model.dtype == torch.float32
        self._kernels = native.kernels_for(self._model.dtype, device) if uses_native else None
        self._checkpoints = Path(store) / "checkpoints"
        config, digest = self._model.config, base_digest(model_path)
        self._adapters = AdapterTable(config, digest, Path(store) / "states", device, resident_adapters)

    def adapter(self, model_id: str) -> TrainedAdapter:
        """Return a loaded adapter. Raises AdapterNotLoaded."""
        return self._adapters.get(model_id)

    def create(self, model_id: str, sequence: int, adapter: TenantAdapter) -> None:
        """See `TenantTrainer.create`."""
        trained = TrainedAdapter(self._adapters.new(adapter, self._alpha))
        applied = AppliedState(sequence=sequence, adapter=adapter)
        self._adapters.add(model_id, trained, StoredState(applied=applied, version=0, alpha=self._alpha))

    def restore(self, model_id: str) -> AppliedState | None:
        """See `TenantTrainer.restore`. After a power cut the state may be an older one."""
        stored = self._adapters.restore(model_id)
        return None if stored is None else stored.applied

    def forward_backward(self, model_id: str, training_pass: TrainingPass) -> PassOutcome:
        """See `TenantTrainer.forward_backward`."""
        job = PassInProgress(self.adapter(model_id).lora, training_pass)
        compute(self._model, [job], self._most_tokens, self._kernels)
        return job.outcome()

    def forward_backward_together(
        self, passes: Sequence[tuple[str, TrainingPass]]
    ) -> list[PassOutcome | TenantRefused | AdapterNotLoaded | StorageFailed]:
        """Compute passes of several models, each of which has one at most, together if ``co_batch`` is set; returns for
        each its outcome, or the error that keeps it alone from being computed."""
        outcomes: list[PassOutcome | TenantRefused | AdapterNotLoaded | StorageFailed] = []
        group_size = self._adapters.resident if self._co_batch else 1
        for first in range(0, len(passes), group_size):
            jobs: list[PassInProgress] = []
            entries: list[PassInProgress | TenantRefused | AdapterNotLoaded | StorageFailed] = []
            for model_id, training_pass in passes[first : first + group_size]:
                try:
                    jobs.append(PassInProgress(self.adapter(model_id).lora, training_pass))
                    entries.append(jobs[-1])
                except (TenantRefused, AdapterNotLoaded, StorageFailed) as error:
                    entries.append(error)
            for forward_only in (False, True):
                chosen = [job for job in jobs if job.training_pass.forward_only == forward_only]
                compute(self._model, chosen, self._most_tokens, self._kernels)
            outcomes += [entry.outcome() if isinstance(entry, PassInProgress) else entry for entry in entries]
        return outcomes

    def optim_step(self, model_id: str, sequence: int, optimiser: OptimiserSettings) -> dict[str, float]:
        """See `TenantTrainer.optim_step`. Metrics: ``grad_norm:mean`` before clipping, and ``skipped_steps:sum``, 1 if
        the gradient wasn't finite, so that nothing was applied."""
        return self.adapter(model_id).optim_step(sequence, optimiser)

    def load(self, model_id: str, sequence: int, path: str, adapter: TenantAdapter, *, optimiser: bool) -> None:
        """See `TenantTrainer.load`. Raises TenantRefused for a folder that is missing, damaged, or of another base or
        another kind of adapter than ``adapter``; nothing is changed then."""
        folder, config = self._folder(path), self._model.config
        try:
            version = verify(folder).version
            lora = load_adapter(folder, self._model_path, config, device=self._model.device)
            if lora.targets != tenant_targets(config, adapter, lora.targets[0].alpha):
                raise TenantRefused(f"{path} holds another adapter than one of rank {adapter.rank} for this model")
            trained = TrainedAdapter(lora)
            if optimiser:
                StateFiles(folder).fill(trained.optimiser_shards())
        except ConfigurationError as error:
            raise TenantRefused(f"{path} can't be loaded: {error}") from None
        applied = AppliedState(sequence=sequence, adapter=adapter)
        stored = StoredState(applied=applied, version=version if optimiser else 0, alpha=lora.targets[0].alpha)
        self._adapters.add(model_id, trained, stored)

    def save(self, model_id: str, path: str, kind: CheckpointKind) -> int:
        """See `TenantTrainer.save`."""
        trained, target = self.adapter(model_id), self._folder(path)
        version = trained.file.stored.version
        trained.lora.quantization = self._quantization

        def fill(folder: Path) -> None:
            save_adapter(trained.lora, folder, self._model_path)
            if kind == "weights":
                write_state(folder, trained.optimiser_shards(), 0, 1, version)

        try:
            write_folder(target, fill, CheckpointState(version=version))
            return sum(file.stat().st_size for file in target.iterdir())
        except (OSError, SafetensorError) as error:
            raise StorageFailed(f"{path} can't be written: {error}") from None

    def evict(self, model_id: str) -> None:
        """See `TenantTrainer.evict`."""
        self._adapters.evict(model_id)

    def delete(self, path: str) -> None:
        """See `TenantTrainer.delete`."""
        rmtree(self._folder(path), ignore_errors=True)

    def _folder(self, path: str) -> Path:
        """The folder of a checkpoint. Raises TenantRefused for one that isn't below the store's."""
        if Path(path).is_absolute() or ".." in Path(path).parts or path.endswith(_RESERVED):
            raise TenantRefused(f"path = {path!r}: valid: MODEL/KIND/NAME, the name without {' or '.join(_RESERVED)}")
        return self._checkpoints / path

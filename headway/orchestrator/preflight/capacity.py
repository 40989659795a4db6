"""Capacities of the places where a run needs memory, what is short there, and choices that depend on them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from headway.config.auto import Gpu, Machine
from headway.config.load import placed_experiment
from headway.config.schema import Experiment, HostMemory
from headway.control.rates.links import changed_share, delta_bytes, update_s
from headway.control.tuning.diagnosis import DeviceSplit
from headway.models.sizes import ModelSizes, sizes_of
from headway.orchestrator.preflight.memory import (
    OF_NODE,
    RankLayout,
    bytes_of,
    exchanged_bytes,
    memory_uses,
    trained_weights,
)
from headway.records.check_report import Findings, MemoryPlace, MemoryUse
from headway.records.errors import ConfigurationError
from headway.runtime.devices import parse_device
from headway.runtime.nodes.conditions import machine_memory
from headway.runtime.nodes.gpus import read_machine
from headway.weights.slots import SHARED_MEMORY

GIB = 2**30
_LINKS_BITS_PER_S = (1e8, 1e9, 1e10)
FULL_SHARE = 0.9  # of the free bytes: beyond it, a warning
NODE_GPU = Gpu(index=0, name="of a node", memory_bytes=24 * GIB, free_bytes=24 * GIB)  # the least that RL is done on


def memory_places(
    uses: list[MemoryUse], on_nodes: Mapping[str, tuple[int, int]] = {}, machine: Machine | None = None
) -> list[MemoryPlace]:
    """Compute each place's needed, total and available bytes; None where the latter two are unknown. ``on_nodes``: the
    (total, available) bytes of places on nodes; ``machine``: this one's facts, or a described machine, of which GPUs
    alone are known."""
    machine = machine or read_machine()
    needed_bytes: Counter[str] = Counter()
    for memory_use in uses:
        needed_bytes[memory_use.location] += memory_use.total_bytes
    for name in needed_bytes:  # of sides that offload each other the smaller one's memory is free
        offloadable_bytes = Counter[bool]()
        for memory_use in uses:
            if memory_use.location == name and memory_use.offloadable_bytes:
                offloadable_bytes[memory_use.name.startswith("trainer")] += memory_use.offloadable_bytes
        needed_bytes[name] -= min(offloadable_bytes.values()) if len(offloadable_bytes) > 1 else 0
    if "memory" in needed_bytes:  # where files in /dev/shm are, too
        needed_bytes["memory"] += needed_bytes[str(SHARED_MEMORY)]
    places: list[MemoryPlace] = []
    for name, nbytes in needed_bytes.items():
        if machine.described and not name.startswith("cuda:"):
            place_sizes = (machine.memory_bytes,) * 2 if name == "memory" and machine.memory_bytes else None
        elif name == "memory":
            place_sizes = machine_memory()
        elif name.startswith("cuda:"):
            place_sizes = next(((gpu.memory_bytes, gpu.free_bytes) for gpu in machine.cuda[int(name[5:]) :]), None)
        elif _is_on_node(name):  # only its agent knows
            place_sizes = on_nodes.get(name)
        elif name == str(SHARED_MEMORY) and not SHARED_MEMORY.is_dir():
            place_sizes = (0, 0)
        else:
            place_sizes = _disk(Path(name))
        capacity, available = place_sizes if place_sizes is not None else (None, None)
        places.append(MemoryPlace(name=name, needed_bytes=nbytes, capacity_bytes=capacity, available_bytes=available))
    return places


def _is_on_node(name: str) -> bool:
    return OF_NODE in name or "/cuda:" in name


def _disk(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(nearest_folder(path))
    except OSError:
        return None
    return usage.total, usage.free


def nearest_folder(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


# --- choices ---


def exports_weights(experiment: Experiment, machine: Machine | None = None) -> bool:
    """Whether versions stay in the memory of rank 0's GPU, two at a time, for replicas on this machine's GPUs. Their
    buffers are then there too, in the memory that loading took, unless the weights are float32."""
    generator, trainer_device = experiment.generator, experiment.trainer.devices[0]
    on_gpus = all(name.startswith("cuda:") for name in (trainer_device, *generator.devices))
    shards = experiment.trainer.shards_of(len(experiment.trainer.devices))  # their rows meet in the host's memory alone
    is_changing = shards > 1 or experiment.run.offload or experiment.control.devices == "move"
    if generator.engine != "torch" or experiment.model.adapter is not None or is_changing or not on_gpus:
        return False
    model, copies = sizes_of(experiment.model.path), Counter({trainer_device: 2})
    copies.update(generator.devices if generator.dtype == "float32" else ())
    copy_bytes = model.parameters * bytes_of(generator.dtype)
    return all(
        location.needed_bytes + copies[location.name] * copy_bytes <= FULL_SHARE * (location.capacity_bytes or 0)
        for location in memory_places(memory_uses(experiment, model), machine=machine)
        if location.name in copies
    )


def lacking(experiment: Experiment, model: ModelSizes, machine: Machine, *, trainer: bool = False) -> str:
    """The first device, or the memory, that needs more than `FULL_SHARE` of its capacity, with both numbers and what
    needs most; "" if none does. ``trainer``: of those of the trainer's ranks."""
    uses = memory_uses(experiment, model)
    checked_names = {use.location for use in uses if use.name.startswith("trainer") or not trainer}
    for place in memory_places(uses, machine=machine):
        is_device = place.name.startswith("cuda:") or place.name == "memory"
        if not is_device or place.name not in checked_names or not place.capacity_bytes:
            continue
        if place.needed_bytes > FULL_SHARE * place.capacity_bytes:
            largest_use = max((use for use in uses if use.location == place.name), key=lambda use: use.total_bytes)
            need_text = f"{largest_use.name} makes {place.name} need {gibibytes(place.needed_bytes)}"
            largest_part = max(largest_use.parts, key=lambda part: largest_use.parts[part])
            capacity_text = f"{FULL_SHARE:.0%} of {gibibytes(place.capacity_bytes)}"
            return f"{need_text} of {capacity_text}, most of it {largest_part}"
    return ""


def with_trainer(experiment: Experiment, **changes: Any) -> Experiment:
    """The experiment with other values of keys of the section ``trainer``, which aren't checked."""
    return experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update=changes)})


def shard_counts(experiment: Experiment) -> list[int]:
    """The valid values of ``trainer.shards``, ascending."""
    ranks = len(experiment.trainer.devices)
    if experiment.model.quantization is not None:
        return [1]
    _, context, experts = experiment.trainer.layout_of(ranks)
    counts = [number for number in range(1, ranks // context + 1) if ranks // context % number == 0]
    return [number for number in counts if number == 1 or number * context % experts == 0]  # 1: as experts need


def fewest_shards(experiment: Experiment, machine: Machine) -> int:
    """The smallest number of ranks that divide a copy of the model so that the trainer's devices have the memory; all
    of them if none do, and 1 if the model's sizes are unknown. A node's GPUs, which are unknown before it joins, count
    as this machine's, or as `NODE_GPU`."""
    counts, devices = shard_counts(experiment), [parse_device(name) for name in experiment.trainer.devices]
    if any(device.node and device.kind == "cuda" for device in devices):
        machine = Machine(
            gpus=(*machine.cuda, NODE_GPU)[:1] * len(devices), memory_bytes=0, described=machine.described
        )
        experiment = with_trainer(experiment, devices=tuple(f"cuda:{rank}" for rank in range(len(devices))))
    try:
        model = sizes_of(experiment.model.path)
        for shards in counts:
            if not lacking(with_trainer(experiment, shards=shards), model, machine, trainer=True):
                return shards
    except ConfigurationError:  # check reports the model
        return 1
    return counts[-1]


def fitting_splits(experiment: Experiment, splits: Sequence[DeviceSplit], machine: Machine) -> tuple[DeviceSplit, ...]:
    """Select of other ``splits`` of the devices those that have the memory; all if this isn't known, or the present one
    lacks it too."""
    try:
        model = sizes_of(experiment.model.path)
        if lacking(experiment, model, machine):
            return tuple(splits)
        placed = [(split, placed_experiment(experiment, split.settings)) for split in splits]
        return tuple(split for split, placement in placed if not lacking(placement, model, machine))
    except ConfigurationError:
        return tuple(splits)


# --- findings --------------------------------------------------------------------------------------------


def memory_findings(uses: list[MemoryUse], places: list[MemoryPlace]) -> Findings:
    """Check the places: an error for needs beyond the capacity, a warning beyond ``FULL_SHARE`` of the free bytes."""
    findings = Findings()
    for location in places:
        if location.capacity_bytes is not None and location.available_bytes is not None:
            local_uses = [use for use in uses if use.location == location.name]
            if location.name.partition(OF_NODE)[0] == str(SHARED_MEMORY):
                _check_shared_memory(location, location.available_bytes, findings)
            elif location.name == "memory" or location.name.startswith("cuda:") or _is_on_node(location.name):
                _check_memory(local_uses, location, location.capacity_bytes, location.available_bytes, findings)
            else:
                _check_disk(local_uses, location, location.available_bytes, findings)
    return findings


def layout_findings(experiment: Experiment, model: ModelSizes, machine: Machine) -> Findings:
    """Say why ranks divide a copy of the model and what they exchange for it; where the trainer lacks memory, which
    layout of its devices has enough."""
    findings, settings, layout = Findings(), experiment.trainer, RankLayout.of(experiment.trainer)
    shards, counts = layout.ranks // layout.context, shard_counts(experiment)
    if shortage := lacking(experiment, model, machine, trainer=True):
        for host_memory, count in product(get_args(HostMemory), counts):
            changes = {"shards": count, "host_memory": host_memory}
            if not lacking(with_trainer(experiment, **changes), model, machine, trainer=True):
                changed = {key: number for key, number in changes.items() if number != getattr(settings, key)}
                keys_text = " with ".join(f"trainer.{key} = {json.dumps(number)}" for key, number in changed.items())
                findings.info("trainer.shards", f"{shortage}; {keys_text} has the memory")
                return findings
        ranks_text = f"these {len(settings.devices)} rank" + "s" * (len(settings.devices) > 1)
        findings.info("trainer.shards", f"{shortage}; no division of a copy among {ranks_text} has the memory")
    if layout.ranks > 1:
        fewer = with_trainer(experiment, shards=max([count for count in counts if count < shards], default=shards))
        reason = lacking(fewer, model, machine, trainer=True)
        reason = f", because with {fewer.trainer.shards} {reason}" if reason and not shortage else ""
        parts = [f"{gibibytes(nbytes)} of {name}" for name, nbytes in exchanged_bytes(experiment, model).items()]
        exchanged_text = f"for a micro-batch of the largest size a rank receives {', '.join(parts)}"
        findings.info("trainer.shards", f"{layout.ranks} ranks divide a copy of the model{reason}; {exchanged_text}")
    return findings


def link_findings(experiment: Experiment, model: ModelSizes) -> Findings:
    """Say what a version takes on its way to nodes that generate: whole, and by what a step changes."""
    findings, generator = Findings(), experiment.generator
    if not any(parse_device(device).node for device in generator.devices):
        return findings
    version_bytes = float(trained_weights(experiment, model) * bytes_of(generator.dtype))
    share = changed_share(experiment.trainer.learning_rate, generator.dtype)
    share = share if experiment.weights.whole_every > 1 else 1.0
    sent_bytes = delta_bytes(version_bytes, share)
    times = [
        f"{update_s(version_bytes, rate / 8, share):.2g} s over {rate / 1e9:g} Gbit/s"
        + (f" ({update_s(version_bytes, rate / 8):.2g} s whole)" if sent_bytes < version_bytes else "")
        for rate in _LINKS_BITS_PER_S
    ]
    what_text = f"{sent_bytes / version_bytes:.1%} of it, if {share:.1%} of its values change in a step"
    sent_text = what_text if sent_bytes < version_bytes else "whole, since most values change"
    text = f"a version has {gibibytes(version_bytes)} and goes to nodes {sent_text}: {', '.join(times)}"
    findings.info("weights", f"{text}; η must be at least one more than the steps that it takes")
    return findings


def _check_shared_memory(location: MemoryPlace, free: int, findings: Findings) -> None:
    if location.needed_bytes > free:
        problem_text = f"{location.name} has no space for {gibibytes(location.needed_bytes)} of published weights"
        findings.warning("weights", f"{problem_text}: the temporary folder will be used, which is slower")


def _check_memory(uses: list[MemoryUse], location: MemoryPlace, capacity: int, free: int, findings: Findings) -> None:
    user = max(uses, key=lambda use: use.total_bytes)
    purpose = max(user.parts, key=lambda part: user.parts[part])
    needs = f"up to {gibibytes(location.needed_bytes)} of {location.name} needed (most by {user.name}: {purpose})"
    if location.needed_bytes > capacity:
        findings.error(_key(user, purpose), f"{needs}, but there are only {gibibytes(capacity)}")
    elif location.needed_bytes > FULL_SHARE * free:
        findings.warning(_key(user, purpose), f"{needs}, and {gibibytes(free)} are free now")


def _check_disk(uses: list[MemoryUse], location: MemoryPlace, free: int, findings: Findings) -> None:
    """Checkpoints are sure to come; the buffer is as large as stated only if every response is as long as allowed."""
    checkpoint_bytes = sum(use.total_bytes for use in uses if use.name == "checkpoints")
    folder, needed_text = nearest_folder(Path(location.name)), gibibytes(checkpoint_bytes)
    if checkpoint_bytes > free:
        findings.error("run.directory", f"{gibibytes(free)} free at {folder}, but checkpoints need {needed_text}")
    elif location.needed_bytes > FULL_SHARE * free:
        rest_text = gibibytes(location.needed_bytes - checkpoint_bytes)
        others = "the buffer and the record of rollouts (ledger.rollouts)"
        reason = f"only {gibibytes(free)} free at {folder}; checkpoints need {needed_text}, {others} up to {rest_text}"
        findings.warning("run.directory", reason)


def _key(use: MemoryUse, purpose: str) -> str:
    if use.name.startswith("generator"):
        return "generator.slots" if purpose in ("KV cache", "activations") else "model.path"
    if use.name.startswith("trainer"):
        return "trainer.micro_batch_tokens" if purpose in ("activations", "logits") else "model.path"
    return {"orchestrator": "queue.budget", "controller": "control.mode"}.get(use.name, "verifier.workers")


def gibibytes(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def peak_resident_bytes(process_id: int) -> int | None:
    """Peak resident memory of a live process, without the memory that it shares through /dev/shm; None when it is gone.
    Published weights are there, and are counted once."""
    try:
        status_lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        words_by_name = {field: words.split() for field, _, words in (line.partition(":") for line in status_lines)}
        return (int(words_by_name["VmHWM"][0]) - int(words_by_name["RssShmem"][0])) << 10
    except (OSError, KeyError, ValueError):
        return None

"""Keys that may be "auto", their default: resolved once, before validation, by facts of the machine. Pure.

Without a GPU that this torch can use they have the schema's defaults, which are a CPU's. On GPUs:

- devices: generator and trainer share a single GPU, with ``run.offload``; of several, the last quarter (one at least)
  trains and the others generate, in replicas of ``tensor_parallel_size`` GPUs. GPUs that others use are left out unless
  all are. Where one side's devices are given, the other takes the GPUs that remain, or shares them if none does; beside
  CPU cores it has the schema's default. GPUs of other machines are never taken
- dtypes: bfloat16 if all of the run's GPUs multiply it (compute capability 8.0) and none of its devices is on a node,
  of which nothing is known here, else float32: no loss is scaled, as float16 would need
- shards: after validation, by the memory that a rank needs (orchestrator/preflight/capacity.py)
- engine: vLLM for models that run in transformers, where it is installed in the supported release and no key of the
  experiment excludes it, or where its ``engine_arguments`` are given; else torch
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headway.config.model import apply_dtype

AUTO = "auto"
_DTYPES = ("float32", "bfloat16")
_SIDES = ("generator", "trainer")
AUTO_KEYS = {
    ("generator", "devices"): "a list of devices",
    ("generator", "engine"): "torch, vllm, vllm-server",
    ("trainer", "devices"): "a list of devices",
    ("trainer", "shards"): "a number that divides the ranks, all",
    **{(section, "dtype"): ", ".join(_DTYPES) for section in ("model", *_SIDES)},
}  # -> its other values
KEPT_KEYS = (("generator", "engine"), ("generator", "dtype"), ("trainer", "dtype"))  # of a run that is resumed
VLLM_RELEASE = "0.32."  # the start of the versions that Headway works with
VLLM_TEMPERATURES = (0.01, 2.0)  # and 0: below, it silently samples at 0.01; above, it refuses
TRAINING_PART = 4  # of this many GPUs one trains: AReaL (arXiv:2505.24298) gives three quarters to generation


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its driver lists it."""

    index: int  # in the driver's list
    name: str
    memory_bytes: int
    free_bytes: int
    bfloat16: bool = True  # whether it multiplies bfloat16
    uuid: str = ""
    users: str = ""  # the processes that use it, or the memory that they hold; "": it is idle


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of a machine by which "auto" is resolved and devices are checked.

    Example: of four GPUs, under CUDA_VISIBLE_DEVICES=3,1 and with GPU 1 in use by others, ``cuda`` is (GPU 3, GPU 1)
    and ``usable`` is (0,): a run takes cuda:0, which is GPU 3.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES; None: not set
    slurm: str | None = None  # GPUs of the Slurm step or job, by the driver's indices; None: not in such a job
    driver: str = ""  # version
    torch_cuda: str = ""  # CUDA's version of the installed torch; "": its build is for CPUs
    vllm: str = ""  # installed version; "": not installed
    memory_bytes: int = 0  # main memory of a described machine; 0: unknown
    described: str = ""  # the file that describes it; "": this process runs on it

    @property
    def cuda(self) -> tuple[Gpu, ...]:
        """The GPUs that a process sees, by the N of cuda:N. CUDA ignores all entries from the first invalid one on."""
        if self.visible is None:
            return self.gpus
        seen_gpus: list[Gpu] = []
        for device in (device.strip() for device in self.visible.split(",")):
            by_uuid = device.startswith("GPU-")
            named = [gpu for gpu in self.gpus if (by_uuid and gpu.uuid.startswith(device)) or str(gpu.index) == device]
            if len(named) != 1 or named[0] in seen_gpus:
                break
            seen_gpus.append(named[0])
        return tuple(seen_gpus)

    @property
    def obstacle(self) -> str:
        """The reason why a run can't take this machine's GPUs; "": it can, they were hidden, or there is none."""
        if self.gpus and not self.torch_cuda:
            return "torch is a build for CPUs here; docs/install.md has the one for GPUs"
        if self.gpus and not self.cuda and "MIG-" in (self.visible or ""):
            return 'CUDA_VISIBLE_DEVICES names slices of a GPU (MIG), which "auto" leaves: name them, as cuda:0'
        return ""

    @property
    def usable(self) -> tuple[int, ...]:
        """Each N of cuda:N that a run may take: of Slurm's share, and idle if any is."""
        if not self.torch_cuda:
            return ()
        cuda = self.cuda
        range_matches = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in (self.slurm or "").split(",")]
        allotted = {i for match in range_matches if match for i in range(int(match[1]), int(match[2] or match[1]) + 1)}
        # CUDA_VISIBLE_DEVICES is set by Slurm too; inside its cgroup only the job's GPUs exist, with other indices.
        is_share = self.visible is None and 0 < len(allotted) < len(cuda) and any(gpu.index in allotted for gpu in cuda)
        candidates = [n for n, gpu in enumerate(cuda) if not is_share or gpu.index in allotted]
        return tuple(n for n in candidates if not cuda[n].users) or tuple(candidates)


def without_auto(raw: Any) -> Any:
    """Return the mapping ``raw`` of an experiment file without values "auto" of `AUTO_KEYS`. Invalid parts stay as they
    are, for validation to report."""
    if not isinstance(raw, dict):
        return raw
    sections = dict(cast("dict[str, Any]", raw))
    for section, key in AUTO_KEYS:
        if isinstance(table := sections.get(section), dict) and cast("dict[str, Any]", table).get(key) == AUTO:
            sections[section] = {name: value for name, value in cast("dict[str, Any]", table).items() if name != key}
    return sections


def resolve(
    raw: dict[str, Any], machine: Machine, *, in_transformers: bool = False, kept: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the mapping ``raw`` of an experiment file with values for the keys of `AUTO_KEYS` that are missing or
    "auto", where they differ from the schema's defaults, and ``run.offload`` if it is missing and a GPU is shared.

    ``in_transformers``: the model runs in that package. ``kept``: the stored configuration of the run that is resumed,
    which keeps engine and dtypes. Invalid parts stay as they are, for validation to report.
    """
    sections = cast("dict[str, Any]", apply_dtype(without_auto(raw)))
    section_names = (*_SIDES, "run", "model", "algorithm", "rollout", "evaluation")
    if not all(isinstance(sections.get(name, {}), dict) for name in section_names):
        return sections
    tables: dict[str, dict[str, Any]] = {name: dict(sections.get(name, {})) for name in section_names}
    for section, key in KEPT_KEYS if kept else ():
        tables[section].setdefault(key, cast("Mapping[str, Any]", kept)[section][key])
    generator, trainer = tables["generator"], tables["trainer"]
    _set_devices(generator, trainer, machine)
    if _local_gpus(generator):
        generator.setdefault("engine", _engine(tables, machine, in_transformers))
    shared_gpus = {*_local_gpus(generator)} & {*_local_gpus(trainer)}
    if shared_gpus and generator.get("engine") != "vllm-server":
        tables["run"].setdefault("offload", True)
    on_nodes = any(not re.match(r"(cuda|cpu):|https?://", name) for name in (*_names(generator), *_names(trainer)))
    used_gpus = [machine.cuda[n] for side in (generator, trainer) for n in _local_gpus(side) if n < len(machine.cuda)]
    for side in (generator, trainer):
        if _local_gpus(side) and used_gpus and not on_nodes and all(gpu.bfloat16 for gpu in used_gpus):
            side.setdefault("dtype", "bfloat16")
    return sections | {name: table for name, table in tables.items() if table or name in sections}


def _names(side: Mapping[str, Any]) -> list[str]:
    devices = side.get("devices")
    return list(map(str, cast("Sequence[object]", devices))) if isinstance(devices, (list, tuple)) else []


def _local_gpus(side: Mapping[str, Any]) -> list[int]:
    """Each N of a side's cuda:N; empty if any of its devices isn't a GPU of this machine, or isn't valid."""
    matches = [re.fullmatch(r"cuda:(\d+)", name) for name in _names(side)]
    return [int(match[1]) for match in matches if match] if all(matches) else []


def _ranks(generator: Mapping[str, Any]) -> int:
    """GPUs of a replica."""
    arguments = generator.get("engine_arguments")
    ranks = cast("dict[str, Any]", arguments).get("tensor_parallel_size") if isinstance(arguments, dict) else None
    return ranks if isinstance(ranks, int) and ranks > 0 else 1


def _set_devices(generator: dict[str, Any], trainer: dict[str, Any], machine: Machine) -> None:
    """Set the devices of the sides that have none."""
    gpus, ranks = machine.usable, _ranks(generator)
    unplaced = [side for side in (generator, trainer) if "devices" not in side]
    if not gpus or not unplaced:
        return
    if len(unplaced) == 2:
        trainer_gpus = gpus if len(gpus) == 1 else gpus[-max(1, len(gpus) // TRAINING_PART) :]
        others = [n for n in gpus if n not in trainer_gpus]
        first_gpus = replicas(others, ranks) or replicas(gpus, ranks)[:1] or [gpus[0]]
        taken_gpus = {n for first in first_gpus for n in range(first, first + ranks)} if len(gpus) > 1 else set[int]()
        gpus_by_side = {"generator": first_gpus, "trainer": [n for n in gpus if n not in taken_gpus] or [*trainer_gpus]}
    else:
        other_side = trainer if unplaced[0] is generator else generator
        is_server = "http://" in str(other_side["devices"])
        if not (used_gpus := _local_gpus(other_side)) and not is_server:
            return  # CPU cores or other machines: the default, as on a machine without GPUs
        width = 1 if other_side is trainer else ranks
        taken_gpus = {n for first in used_gpus for n in range(first, first + width)}
        remaining = [n for n in gpus if n not in taken_gpus]
        first_gpus = replicas(remaining, ranks) if other_side is trainer else remaining
        gpus_by_side = {"generator": first_gpus or used_gpus, "trainer": first_gpus or used_gpus}
    for name, side in zip(_SIDES, (generator, trainer), strict=True):
        if any(side is other for other in unplaced) and gpus_by_side[name]:
            side["devices"] = [f"cuda:{n}" for n in gpus_by_side[name]]


def replicas(gpus: Sequence[int], ranks: int) -> list[int]:
    """The first GPU of each replica of ``ranks`` consecutive ones."""
    first_gpus: list[int] = []
    remaining = sorted(gpus)
    while remaining:
        first = remaining.pop(0)
        if (following := [*range(first + 1, first + ranks)]) == remaining[: ranks - 1]:
            first_gpus.append(first)
            remaining = remaining[len(following) :]
    return first_gpus


def _engine(tables: Mapping[str, Mapping[str, Any]], machine: Machine, in_transformers: bool) -> str:
    if tables["generator"].get("engine_arguments"):
        return "vllm"
    excluded = tables["run"].get("deterministic") or tables["algorithm"].get("allow_truncated_sampling")
    lowest, highest = VLLM_TEMPERATURES
    temperatures = [tables[name].get("temperature") or highest for name in ("rollout", "evaluation")]
    excluded = excluded or not all(isinstance(t, (int, float)) and lowest <= t <= highest for t in temperatures)
    excluded = excluded or tables["model"].get("adapter")
    return "vllm" if in_transformers and machine.vllm.startswith(VLLM_RELEASE) and not excluded else "torch"

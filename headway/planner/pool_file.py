"""The pool file of `headway plan CONFIG --pool FILE`: devices that may be used, and properties of the run's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from headway.config.auto import VLLM_RELEASE, Gpu, Machine
from headway.config.load import read_toml, validate
from headway.config.section import Positive, Section
from headway.control.rates.generation import GenerationRecipe
from headway.control.rates.specs import NUMBER_BYTES, DeviceFigures, RatedDevice
from headway.control.rates.training import TrainingRecipe
from headway.planner.catalogue.read import Catalogue, MachineFigures
from headway.planner.costs import price_of
from headway.planner.quantities import Quantity
from headway.records.errors import ConfigurationError

Rate = Annotated[float, Field(gt=0)]


class PoolEntry(Section):
    """Devices of one class: ``machines`` of a catalogue's machine, or ``count`` of a device."""

    machine: str = ""
    machines: Positive = 1
    device: str = ""
    count: Positive = 1
    nodes: tuple[str, ...] = ()  # names in [cluster] of the machines; (): this one
    price: str = ""  # owned.NAME, rented.NAME, or US dollars for a device and hour; "": not known
    network_bytes_per_s: Rate | None = None  # of a device, out of its machine; default: the machine's

    @model_validator(mode="after")
    def _either(self) -> PoolEntry:
        if bool(self.machine) == bool(self.device):
            raise ValueError("give machine (with machines) or device (with count), one of the two")
        ignored, expected = ("count", "machines") if self.machine else ("machines", "count")
        if ignored in self.model_fields_set:
            raise ValueError(f"{ignored} = {getattr(self, ignored)} has no effect here; valid: {expected}")
        return self


class PlannedWorkload(Section):
    """Lengths and verification times of the run's samples, and the share of its groups that can be trained
    (``acceptance``), where they weren't measured."""

    prompt_tokens: Quantity
    response_tokens: Quantity
    group_correlation: Annotated[float, Field(ge=0, le=1)] = 0.0  # of the lengths inside a group
    verify_s: Annotated[float, Field(ge=0)] = 0.0  # of a response, one worker
    teacher_s: Annotated[float, Field(ge=0)] = 0.0  # of a rollout, a replica or request; 0: replicas by their prefills
    acceptance: Annotated[float, Field(ge=0.05, le=1)] = 1.0  # share of groups that can be trained

    @model_validator(mode="after")
    def _lengths(self) -> PlannedWorkload:
        for name, least_tokens in (("prompt_tokens", 0), ("response_tokens", 2)):
            if (median := getattr(self, name).at_normal(0.0)) < least_tokens:
                raise ValueError(f"{name}: a median of {median:g}; valid: {least_tokens} or more")
        return self


class PoolTables(Section):
    """The file. ``generate`` and ``train``: options of the recipes in control/rates; parallelism is searched for where
    it isn't given."""

    devices: Annotated[tuple[PoolEntry, ...], Field(min_length=1)]
    workload: PlannedWorkload | None = None
    profile: str = ""  # file of headway plan --profile; "": rates from data sheets
    generate: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    transport: Literal["storage", "nccl", "tcp", "shared_memory"] = "nccl"
    transport_bytes_per_s: Rate | None = None  # default: its links on a single machine, else its network
    changed_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of values, by a step: tcp and storage get deltas


class PlanDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one class of the pool."""

    device: RatedDevice
    count: int
    nodes: tuple[str, ...]
    usd_per_hour: float | None  # of each


class PlanPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool file with its devices' figures and prices from the catalogue."""

    classes: tuple[PlanDevices, ...]
    tables: PoolTables


def read_pool(path: str | Path, catalogue: Catalogue) -> PlanPool:
    """Read the TOML file at ``path``. Raises ConfigurationError that names the key and what would be valid."""
    tables = validate(read_toml(path), str(path), PoolTables)
    for section, recipe_class in (("generate", GenerationRecipe), ("train", TrainingRecipe)):
        recipe(tables, section, recipe_class)
    node_names = [node for entry in tables.devices for node in entry.nodes]
    if repeated := {node for node in node_names if node_names.count(node) > 1}:
        raise ConfigurationError(f"{path}: nodes: {min(repeated)} is listed twice; valid: each machine's node once")
    return PlanPool(classes=tuple(_devices(entry, catalogue) for entry in tables.devices), tables=tables)


def machine_of(pool: PlanPool, path: str) -> Machine:
    """The machine that the pool's first entries without nodes describe, as many of their devices as it holds. Raises
    ConfigurationError where there is none, and for a device whose memory the catalogue doesn't know."""
    gpus, main_memory = list[Gpu](), 0
    local_entries = [entry for entry in pool.classes if not entry.nodes]
    if not local_entries:
        raise ConfigurationError(f"{path}: all its devices are of nodes; valid: an entry without, for the machine")
    for entry in local_entries:
        figures, name = entry.device.figures, entry.device.name
        if "bfloat16" not in figures.flops_per_s and "float32" in figures.flops_per_s:  # cores of a CPU
            main_memory = int(figures.memory_bytes or 0)
            continue
        if figures.memory_bytes is None:
            raise ConfigurationError(f"{path}: devices.{name}.memory_bytes isn't known: give it in a --catalogue")
        memory, has_bfloat16 = int(figures.memory_bytes), "bfloat16" in figures.flops_per_s
        for index in range(len(gpus), len(gpus) + min(entry.count, entry.device.per_node)):
            gpus.append(Gpu(index=index, name=name, memory_bytes=memory, free_bytes=memory, bfloat16=has_bfloat16))
    return Machine(
        gpus=tuple(gpus), torch_cuda="any", vllm=f"{VLLM_RELEASE}0", memory_bytes=main_memory, described=path
    )


def recipe(tables: PoolTables, section: str, kind: type[Any], **defaults: Any) -> Any:
    """Make a recipe from the file's options over ``defaults``. Raises ConfigurationError."""
    try:
        parsed_recipe = msgspec.convert(defaults | getattr(tables, section), kind)
    except msgspec.ValidationError as error:
        known_keys = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigurationError(f"pool: [{section}]: {error}; keys: {known_keys}") from None
    for key in ("dtype", "kv_dtype"):
        if (dtype_name := getattr(parsed_recipe, key, "bfloat16")) not in NUMBER_BYTES:
            raise ConfigurationError(f"pool: [{section}]: {key} = {dtype_name!r}; valid: {', '.join(NUMBER_BYTES)}")
    return parsed_recipe


def _devices(entry: PoolEntry, catalogue: Catalogue) -> PlanDevices:
    name, count, per_node, network_bytes_per_s = entry.device, entry.count, entry.count, entry.network_bytes_per_s
    if entry.machine:
        machine = catalogue.entry("machines", entry.machine, MachineFigures)
        name, per_node, count = machine.device, machine.devices, entry.machines * machine.devices
        if network_bytes_per_s is None and machine.network_bytes_per_s is not None:
            network_bytes_per_s = machine.network_bytes_per_s / machine.devices
    if entry.nodes and len(entry.nodes) != entry.machines:
        raise ConfigurationError(f"pool: {entry.machine or name}: {entry.machines} machines, {len(entry.nodes)} nodes")
    device = RatedDevice(
        name=name,
        figures=catalogue.entry("devices", name, DeviceFigures),
        per_node=per_node,
        network_bytes_per_s=network_bytes_per_s,
    )
    usd_per_hour = price_of(catalogue, entry.price) if entry.price else None
    return PlanDevices(device=device, count=count, nodes=entry.nodes, usd_per_hour=usd_per_hour)

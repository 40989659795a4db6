"""Records of a workflow's execution: stages on devices, chunk sizes, turns on shared devices, times of its steps."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from headway.records.ledger import EventRecord
from headway.records.plan import Mode

WORKFLOW_FILE = "workflow.jsonl"  # in a workflow's folder: its steps and events
Count = Annotated[int, msgspec.Meta(ge=1)]


class StagePlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The placement of a stage: one worker on each of its devices."""

    devices: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    chunk: Count | None = None  # items that the stage takes at once, over all its devices; None: all of a step
    expected_s: float | None = None  # of a step, by the planner: busy on its devices


class ExecutionPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow's stages on devices, upstream first.

    Stages that share devices take turns on them. Example: ``ExecutionPlan(stages={"generate":
    StagePlacement(devices=("cpu:0",), chunk=4), "train": StagePlacement(devices=("cpu:1",))})``.
    """

    stages: dict[str, StagePlacement]
    items: Count | None = None  # of a step; needed where several workers take all of a step's items
    expected_s: float | None = None  # seconds of a step, by the planner

    def worker_chunk(self, stage: str) -> int | None:
        """Items that one worker of a stage takes at once; None: all that come."""
        placement = self.stages[stage]
        worker_count = len(placement.devices)
        stage_chunk = placement.chunk or (self.items if worker_count > 1 else None)
        return None if stage_chunk is None else math.ceil(stage_chunk / worker_count)


class StageStep(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's part of a step: seconds summed over its workers, but for ``expected_s``."""

    devices: tuple[str, ...]
    busy_s: float
    data_wait_s: float  # for items, messages, places in a channel
    device_wait_s: float  # for devices that another stage had
    switch_s: float  # on- and offloading
    transfer_s: float  # of what it got and put
    items: int
    turns: int
    expected_s: float | None = None  # busy, by the plan


class FlowStep(msgspec.Struct, frozen=True, kw_only=True, tag="flow_step", tag_field="kind"):
    """A step of a workflow: what the plan expected and what happened."""

    step: int
    seconds: float
    mode: Mode
    stages: dict[str, StageStep]
    expected_s: float | None = None  # by the plan
    lock_idle_s: float = 0.0  # device-seconds in which a device was awaited and not held
    moved_s: float = 0.0  # spent before this step on a change of the plan


FlowLine = FlowStep | EventRecord


class Participant(msgspec.Struct, frozen=True, kw_only=True):
    """A user of devices: a worker, or workers that compute together."""

    name: str
    stage: str  # of the workflow
    devices: frozenset[str]  # names that overlap nowhere: cores and GPUs, not ranges of them
    order: int  # of its stage in the workflow, upstream first


class LockGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A participant holds its devices from now on."""

    participant: str
    offload: tuple[str, ...] = ()  # these must leave the devices before it computes there
    onload: bool = False  # it isn't on its devices: it must load after that


class MemoryMove(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that an offload or onload has moved, and its time."""

    moved_bytes: int
    seconds: float
    freed_bytes: int = 0  # by which the process's resident memory fell, on a GPU its allocated memory
    onload: bool = False


class LockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Grants and recalls that a call on the lock has led to."""

    grants: tuple[LockGrant, ...] = ()
    recalls: tuple[str, ...] = ()  # holders whose devices are awaited since this call: they release at their next wait


class LockStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a lock since its beginning."""

    grants: int
    switches: int  # grants for which another participant had to be offloaded
    idle_wanted_s: float  # device-seconds in which a device was awaited and not held; loading is holding

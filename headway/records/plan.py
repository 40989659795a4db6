"""A workflow and a pool of devices as placement sees them, and the plan that it finds; the placement of a run.

Times are seconds of one step's work, bytes are bytes, money is US dollars. An *item* is the unit that stages hand on: a
sample, an environment, a fragment.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec

Objective = Literal["time", "cost"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Mode = Literal["temporal", "spatial", "hybrid"]
PLAN_FILE = "plan.json"  # in the folder of a run that was planned


class TimePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a stage takes for ``items`` items at once on ``devices`` devices of one class."""

    device: str  # the class
    devices: Count
    items: Count  # between two measured numbers of items the time is interpolated, beyond them not offered
    seconds: Amount
    fixed_bytes: Amount | None = None  # of each device at this count, where it isn't the stage's own (sharded weights)


class WorkflowStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage: its measured times, what it needs of each device's memory, and what it costs to take turns."""

    name: str
    times: Annotated[tuple[TimePoint, ...], msgspec.Meta(min_length=1)]
    switch_s: Amount = 0.0  # load before and offload after a turn, where devices are shared
    fixed_bytes: Amount = 0.0  # memory of each device: fixed + bytes_per_item * ceil(items / devices)
    bytes_per_item: Amount = 0.0


class WorkflowEdge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """Items that go from one stage to another; with ``loop``, back to where that loop's next round begins."""

    source: str
    to: str
    bytes_per_item: Amount = 0.0
    loop: str | None = None


class WorkflowLoop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loop variable: every item goes through the loop's stages ``rounds`` times."""

    name: str
    rounds: Count


class Workflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stages, and what they hand on, of one step of ``items`` items."""

    items: Count
    granularities: tuple[Count, ...]  # chunk sizes to choose from; each divides ``items``
    stages: tuple[WorkflowStage, ...]
    edges: tuple[WorkflowEdge, ...] = ()
    loops: tuple[WorkflowLoop, ...] = ()


class PoolDevices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interchangeable devices of one class. Nodes enter through a stage's times: on more devices than a node has they
    contain the network; a plan's parts get devices next to each other."""

    device: str  # name of the class
    devices: Count
    memory_bytes: Amount  # of each
    usd_per_hour: Amount | None = None  # of each; needed where a plan is chosen by cost


class DevicePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that a plan may use."""

    classes: tuple[PoolDevices, ...]
    link_bytes_per_s: Rate | None = None  # between two parts of a plan; needed where edges have bytes


class PlacedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's, or a loop's, turn on the devices of its part, once for each chunk."""

    name: str
    seconds: float  # of one chunk, without the switch
    switch_s: float  # 0 where it has the devices alone
    device: str | None = None  # a stage's class; None: a loop, whose parts say theirs
    devices: int = 0  # a stage may use fewer devices than its part has
    inside: PlacedPipeline | None = None  # a loop's own pipeline


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A set of devices and the stages that take turns on it."""

    devices: dict[str, tuple[int, int]]  # class -> index of its first device in the pool, number of devices
    turns: tuple[PlacedTurn, ...]
    receive_s: float  # transfer of one chunk from other parts
    seconds: float  # of one chunk: receive, switches and turns


class PlacedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Levels of parts through which ``items`` go in chunks, ``rounds`` times.

    The parts of a level work side by side on the same chunk. A level takes a chunk when the level before has done it
    and it has itself done the chunk before. Example: 4 chunks through levels of 2 s and 3 s take 2 + 3 + 3 * 3 = 14 s.
    """

    name: str
    items: int
    items_per_chunk: int
    rounds: int
    switch_s: float  # before the first chunk, where other phases use the same devices
    seconds: float  # switch included
    levels: tuple[tuple[PlacedPart, ...], ...]


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Phases, one after the other on the same devices; each a pipeline over disjoint parts of them.

    Invariants: seconds is the sum over phases and what a run of the chunks takes, event by event
    (`tests/support/plan_timeline.py`); lower_bound <= value, the chosen objective, and gap = 1 - lower_bound / value: 0
    is proven optimal.
    """

    objective: Objective
    mode: Mode
    seconds: float
    cost_usd: float | None  # of the devices used, for those seconds; None: a class has no price
    phases: tuple[PlacedPipeline, ...]
    lower_bound: float  # of the objective: seconds or US dollars
    gap: float
    expansions: int  # work done: partial allocations that were extended


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan, or another pool, and the value of the objective with it; None: there is no such plan."""

    name: str
    value: float | None


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its reasons."""

    plan: PlacementPlan
    second_best: Alternative | None  # the best plan of another mode; None: there is none
    binds: tuple[str, ...]  # what limits the plan, the most important first
    relaxations: tuple[Alternative, ...]  # without memory limits, without switch costs
    one_more: tuple[Alternative, ...]  # with one more device of each class


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True):
    """Generation or training of a run, or a teacher that scores: its devices, and its rate without the others."""

    name: str  # generate, train, teacher NAME
    device: str  # class
    names: tuple[str, ...]  # of its devices, as the configuration names them
    copies: int  # replicas, or data-parallel ranks
    spread: str  # of one copy over devices: "1 device", "tensor 4", ...
    samples_per_s: float  # alone, at full concurrency; of the trainer if it never waits; 0: not known
    bytes_per_device: float | None  # None: not known
    slots: int = 0  # of a replica


class RunPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of a run's generator and trainer, by name. Two names are equal or share no core and no GPU, so that a
    device belongs to one of them or to both, never in part."""

    generator: tuple[str, ...]  # one replica each
    trainer: tuple[str, ...]  # one rank each, rank 0 first; (): no rank runs, amid a move

    @property
    def mode(self) -> Mode:
        """temporal: generator and trainer take turns on the same devices; spatial: none is shared; hybrid: some are."""
        if set(self.generator) == set(self.trainer):
            return "temporal"
        return "hybrid" if set(self.generator) & set(self.trainer) else "spatial"

    @property
    def settings(self) -> dict[str, str]:
        """The keys of the configuration that give this placement, with their values as TOML."""
        devices_by_section = {"generator": self.generator, "trainer": self.trainer}
        return {f"{section}.devices": json.dumps(devices) for section, devices in devices_by_section.items()}

    def __str__(self) -> str:
        return f"{self.mode}: generate on {', '.join(self.generator)}; train on {', '.join(self.trainer) or 'nothing'}"


class PlannedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a run's placement, decided and not yet made."""

    placement: RunPlacement
    gain: float  # expected: rate after / rate before
    rate: float  # before, samples/s
    cost_s: float  # expected: seconds until generator and trainer work in the new placement
    reverts: bool = False  # it undoes a move that has made the run slower


class ExecutedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A change of placement that a run has made, or had to take back."""

    planned: PlannedMove
    version: int  # completed training steps at that boundary
    cost_s: float  # measured
    previous: RunPlacement
    placement: RunPlacement  # in effect now


class PlacementFile(msgspec.Struct, frozen=True, kw_only=True):
    """``RUN/placement.json``: the placement in effect, where it isn't the configuration's."""

    configured: RunPlacement  # by the configuration under which the run moved: under another this file says nothing
    present: RunPlacement


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run on a pool: what `headway plan CONFIG --pool` writes and `headway train --plan` runs."""

    made_for: str  # digest of the configuration, without the keys that a plan sets
    pool: str  # in words
    objective: Objective
    mode: Mode  # hybrid: the trainer computes on a part of the generator's devices
    stages: tuple[PlannedStage, ...]
    items_per_chunk: int  # samples that the trainer takes at once
    samples_per_s: float
    samples_per_s_range: tuple[float, float]  # by ``error``
    error: float  # relative, of predicted rates, and ...
    error_is: str  # ... where it is from
    trainer_wait: float  # share of the time
    generator_wait: float
    staleness_mean: float  # versions
    usd_per_hour: float | None
    usd_per_mtok: float | None  # of trained tokens, prompts included
    bound_samples_per_s: float  # of the placements that were compared the highest, if only the two rates limited
    others: dict[Mode, Alternative]  # the best of other modes: samples/s or US dollars for a million samples
    changes: tuple[str, ...]  # of other keys that would help, with their predicted gains
    settings: dict[str, str]  # key of the configuration -> value
    refused: tuple[str, ...] = ()  # what today's configuration can't express: such a plan isn't run
    simulated_samples_per_s: float | None = None  # by the real orchestrator in virtual time

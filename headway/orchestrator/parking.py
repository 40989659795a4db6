"""Parks partial rollouts in the buffer when a batch is full or weights arrive, and resumes them from their tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from headway.buffer.store import GroupBuffer
from headway.config.schema import QueueConfig
from headway.control.staleness import resumption
from headway.orchestrator.state import RunState
from headway.records.clients import RolloutMaker
from headway.records.environment import PartialRollout
from headway.rollout.makers.turn_sampler import Resumption
from headway.sandbox.snapshot_store import drop, remove_others


class Parking:
    """Parks members behind a gate, and resumes them.

    The gate is closed from the moment a batch is full (``queue.surplus = "park"``) or weights are being applied until
    they are in place. A member that comes back from the generator meanwhile is committed to the buffer, gives up its
    slot, and resumes when the gate opens: the engines serve the oldest group first.
    """

    def __init__(self, state: RunState, buffer: GroupBuffer, queue: QueueConfig, sandboxes: Path | None = None) -> None:
        """``sandboxes``: folder of the sandbox snapshots of parked rollouts."""
        self._state = state
        self._buffer = buffer
        self._queue = queue
        self._sandboxes = sandboxes
        self._snapshots: dict[int, dict[int, str]] = {}  # group -> member -> snapshot that the buffer names

    async def wait(self, parked: PartialRollout) -> Resumption:
        """Park the member and wait until it may resume; returns how (DESIGN rule 2, environment-state staleness)."""
        running_group = self._state.running.get(parked.group)
        if running_group is None:  # an evaluation's, which isn't in the accounting
            await self._wait_for_gate()
            return "continue"
        self._buffer.park(parked)
        self._name_snapshot(parked)
        self._state.member_parked(running_group, 1)
        self._state.parkings += 1
        self._state.changed.notify()  # its slot is free
        try:
            await self._wait_for_gate()
        finally:
            self._state.member_parked(running_group, -1)
        return self.resumption(parked)

    def resumption(self, parked: PartialRollout) -> Resumption:
        """How a parked member resumes now, in this process or, after this one's end, in the next."""
        return resumption(parked.environment_version, self._state.version, self._queue.max_environment_staleness)

    def reopen(self, parked: Iterable[PartialRollout]) -> None:
        """Register the snapshots of rollouts that a former process left parked; remove all other, unused ones."""
        for rollout in parked:
            self._name_snapshot(rollout)
        snapshot_names = {snapshot for members in self._snapshots.values() for snapshot in members.values()}
        if self._sandboxes is not None:
            remove_others(self._sandboxes, snapshot_names)

    def _name_snapshot(self, parked: PartialRollout) -> None:
        """Record the parked member's snapshot, and remove its earlier one."""
        snapshot_by_member = self._snapshots.setdefault(parked.group, {})
        earlier_name = snapshot_by_member.pop(parked.member, None)
        if parked.snapshot:
            snapshot_by_member[parked.member] = parked.snapshot
        if earlier_name is not None and earlier_name != parked.snapshot:
            self._remove(earlier_name)

    def forget(self, group: int) -> None:
        """Remove the snapshots of a group that has finished or ended: none of its members resumes from one."""
        for snapshot in self._snapshots.pop(group, {}).values():
            self._remove(snapshot)

    def _remove(self, name: str) -> None:
        if self._sandboxes is not None:
            drop(self._sandboxes, name)

    @property
    def engine_is_kept_empty(self) -> bool:
        """Whether all rollouts were parked and none resumes or starts: a step is being trained, or the run ends."""
        return self._state.suspending or (self._queue.surplus == "park" and self._state.training)

    def begin(self, group: int) -> Awaitable[None] | None:
        """Return the gate that a member awaits before it requests a turn while the engine is kept empty. None: it may
        request at once, as evaluations always may. Outside a turn a member has nothing to park."""
        return self._wait_for_gate() if self.engine_is_kept_empty and group in self._state.running else None

    async def _wait_for_gate(self) -> None:
        """Wait until the gate is open when checked: it may close again between its opening and the waiter's turn."""
        while not self._state.resume_gate.is_set():
            await self._state.resume_gate.wait()

    def open_gate(self) -> None:
        """Resume parked members, unless weights are being applied or the engine is kept empty."""
        if not self._state.applying and not self.engine_is_kept_empty:
            self._state.resume_gate.set()

    def park_all(self, rollouts: RolloutMaker, why: Literal["park", "leave"] = "park") -> None:
        """Close the gate and park every generating member, except, with "park", those that were parked often enough."""
        self._state.resume_gate.clear()
        for index, running_group in self._state.running.items():
            for member in range(running_group.group.size):
                rollouts.stop(index, member, why)

    def suspend(self, rollouts: RolloutMaker) -> None:
        """Park every member for a later process: the gate stays closed in this one."""
        self._state.suspending = True
        self.park_all(rollouts, "leave")

    def park_generated(self, stop_ids: Sequence[int]) -> int:
        """Park the responses that are complete but not committed, and return their number. Their group has unfinished
        members, or its verifier doesn't answer. ``stop_ids``: one of them ends a response that came to its own end."""
        parked_count = 0
        for index, running_group in self._state.running.items():
            for member, rollout in running_group.generated.items():
                ids, reached_limit = rollout.response_ids, rollout.finish_reason == "length"
                if rollout.ended or rollout.pruned or not ids or not (reached_limit or ids[-1] in stop_ids):
                    continue
                resumes = max(rollout.resumes - 1, 0)
                parked = PartialRollout(group=index, member=member, response=rollout.response, resumes=resumes)
                self._buffer.park(parked)
                parked_count += 1
        return parked_count

"""The knobs of a run, which the controller sets."""

from __future__ import annotations

import msgspec


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the flow of groups that may change during a run. The experiment gives the first values; the loops
    read the present ones at every decision."""

    open_groups: int | None  # most groups open at once, within what admission allows; None: all it allows
    concurrent_rollouts: int  # most rollouts that hold a slot or wait for one
    steps_per_publish: int  # one version of every this many is published
    idle_replicas: tuple[int, ...] = ()  # take no requests, so that the trainer has their devices to itself
    verifier_workers: int = 1  # processes that score responses

"""Lanes of an EnvPool: a vector in C++, whose seeds belong to its constructor."""

from __future__ import annotations

import difflib
import os
import warnings
from typing import Any

from headway.embodied.records import Seeds
from headway.embodied.simulators.gymnasium_lanes import VectorLanes
from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_extra


def open_envpool(environment: str, arguments: dict[str, Any], lanes: int, seeds: Seeds) -> VectorLanes:
    """Build a pool of ``lanes`` environments, stepped by the cores that this process may use.

    A lane's later episodes follow from its seed too, so pools of other sizes with the same seed have the same lane.
    Raises ConfigurationError for an unknown name, with the nearest."""
    envpool = import_extra("envpool", "envpool", 'simulator.backend = "envpool"')
    if environment not in (names := envpool.list_all_envs()):
        nearest = difflib.get_close_matches(environment, names, n=3, cutoff=0.5)
        raise ConfigurationError(
            f"simulator.environment = {environment!r}: EnvPool has no such environment; "
            f"valid: {', '.join(nearest) or 'a name of envpool.list_all_envs()'}"
        )
    options = {"num_threads": min(lanes, len(os.sched_getaffinity(0))), **arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of bounds that float32 can't hold
        vector = envpool.make(
            environment, env_type="gymnasium", num_envs=lanes, seed=[seeds(lane, 0) for lane in range(lanes)], **options
        )
        return VectorLanes(vector, None)

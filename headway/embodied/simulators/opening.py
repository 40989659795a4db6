"""Opens simulators by name: a gymnasium id, EnvPool's, or a user's ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headway.config.simulation import SimulatorConfig
from headway.embodied.records import LaneSimulator, Seeds
from headway.embodied.simulators.envpool_lanes import open_envpool
from headway.embodied.simulators.gymnasium_lanes import SeparateLanes, VectorLanes
from headway.records.errors import ConfigurationError
from headway.runtime.hooks import error_text
from headway.runtime.imports import import_extra, import_function

KEY = "simulator.environment"


def open_simulator(settings: SimulatorConfig, lanes: int, seeds: Seeds) -> LaneSimulator:
    """Build the simulator of ``lanes`` lanes.

    ``module:Class`` may be, by the arguments that it takes beside ``simulator.arguments``:
    ``lanes`` and ``seeds`` (a list: the first episode's of each lane): a `LaneSimulator`;
    ``num_envs``: a vector environment with gymnasium's interface; neither: an environment for one lane, or a function
    that makes either. Raises ConfigurationError: an unknown name, a constructor that raises, spaces without a policy,
    another number of lanes."""
    name, arguments = settings.environment, settings.arguments
    try:
        if settings.backend == "envpool":
            return open_envpool(name, arguments, lanes, seeds)
        if not _names_object(name):
            gymnasium = import_extra("gymnasium", "simulators", f"{KEY} = {name!r}")
            # The checker of the first steps is left out, since the block checks all of them.
            options = {"disable_env_checker": True, **arguments}
            return SeparateLanes([gymnasium.make(name, **options) for _ in range(lanes)], seeds)
        return _open_object(import_function(name, KEY, ()), arguments, lanes, seeds)
    except ConfigurationError:
        raise
    except Exception as error:  # the boundary to a simulator's code
        raise ConfigurationError(
            f"{KEY} = {name!r} can't be built with simulator.arguments = {arguments}: {error_text(error)}; "
            f"valid: an id of {settings.backend}, or module:Class, with arguments of its constructor"
        ) from error


def _names_object(name: str) -> bool:
    """Whether a name is ``module:Class``; gymnasium's ``module:Name-v0`` isn't."""
    _, colon, attribute = name.partition(":")
    return bool(colon) and attribute.replace(".", "").isidentifier()


def _open_object(make: Callable[..., Any], arguments: dict[str, Any], lanes: int, seeds: Seeds) -> LaneSimulator:
    """Build lanes by a user's class or function."""
    parameters = inspect.signature(make).parameters
    if "lanes" in parameters and "seeds" in parameters:
        simulator: LaneSimulator = make(lanes=lanes, seeds=[seeds(lane, 0) for lane in range(lanes)], **arguments)
    elif "num_envs" in parameters:
        simulator = VectorLanes(make(num_envs=lanes, **arguments), seeds)
    else:
        simulator = SeparateLanes([make(**arguments) for _ in range(lanes)], seeds)
    if simulator.lanes != lanes:
        raise ConfigurationError(f"{KEY}: it has {simulator.lanes} lanes; valid: the {lanes} of simulator.block_lanes")
    return simulator

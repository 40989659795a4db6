"""Finds problems of the user's own functions before a run starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from headway.algorithms.advantages import KEY as ADVANTAGE
from headway.algorithms.advantages import resolve as resolve_advantage
from headway.algorithms.groups.hook_conformance import advantage_violations, hook_violations
from headway.algorithms.groups.hooks import resolve_hooks
from headway.config.hooks import HOOKS, HooksConfig
from headway.config.schema import ADVANTAGES, LOSSES, Experiment
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.hosting.agents.host import KEY as AGENT
from headway.rollout.hosting.mcp.servers import require_tools
from headway.rollout.hosting.service import KEY as ENVIRONMENT
from headway.rollout.hosting.service import load_environment
from headway.rollout.makers.custom import load_rollout_function
from headway.rollout.verifiers_environment import KEY as VERIFIERS
from headway.rollout.verifiers_environment import load as load_verifiers
from headway.runtime.clock import RealClock
from headway.runtime.hooks import load_hook
from headway.runtime.imports import import_function, require_module
from headway.telemetry.exporters.own import load_own_logging


def function_problems(experiment: Experiment, task: Task | None) -> Iterator[tuple[str, str]]:
    """(key, what is wrong). Advantages and hooks are imported as the run will, and called on made-up groups of
    ``task``, where there is one; a loss lives in the trainer's process and needs torch, so only its module is looked
    for (the rest is for ``python -m headway.trainer.loss_conformance``). The verifier is really called, elsewhere."""
    yield from _objective(experiment)
    yield from _agent(experiment)
    for short, names in HOOKS.items():
        name = getattr(experiment.hooks, short)
        if name in names:
            continue
        try:
            if short == "rollout":
                load_rollout_function(name)
            elif short == "logging":
                load_own_logging(name)
            else:
                hooks = resolve_hooks(HooksConfig(**{short: name}))
                for violation in hook_violations(hooks, task) if task is not None else ():
                    yield f"hooks.{short}", violation
        except ConfigurationError as error:
            yield f"hooks.{short}", str(error)


def _agent(experiment: Experiment) -> Iterator[tuple[str, str]]:
    environment = experiment.environment
    if environment.agent:
        try:
            import_function(environment.agent, AGENT, (), asynchronous=True)
        except ConfigurationError as error:
            yield AGENT, str(error)
    elif environment.name == "verifiers":
        try:
            load_verifiers(environment.verifiers)
        except ConfigurationError as error:
            yield VERIFIERS, str(error)
    elif environment.replies:
        try:
            found = load_environment(environment)
            require_tools(environment.mcp, list(found.offered.values()), RealClock())
        except ConfigurationError as error:
            yield ENVIRONMENT, str(error)
    elif environment.command and shutil.which(environment.command[0]) is None:
        yield "environment.command", f"there is no program {environment.command[0]!r} on the path"


def _objective(experiment: Experiment) -> Iterator[tuple[str, str]]:
    algorithm = experiment.algorithm
    try:
        resolve_advantage(algorithm.advantage)
        if algorithm.advantage not in ADVANTAGES:
            for violation in advantage_violations(load_hook(ADVANTAGE, algorithm.advantage, {}, ("rewards_g",))):
                yield ADVANTAGE, violation
    except ConfigurationError as error:
        yield ADVANTAGE, str(error)
    try:
        if algorithm.loss not in LOSSES:
            require_module(algorithm.loss, "algorithm.loss", LOSSES)
    except ConfigurationError as error:
        yield "algorithm.loss", str(error)

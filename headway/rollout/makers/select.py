"""Who makes the rollouts of an experiment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.config.schema import Experiment
from headway.records.clients import TextCodec
from headway.rollout.makers.agent import AgentRollouts, Agents
from headway.rollout.makers.custom import OwnRollouts, load_own
from headway.rollout.makers.environment import EnvironmentRollouts, Environments
from headway.rollout.makers.single_turn import Generate, SingleTurn
from headway.runtime.clock import Clock

Players = Agents | Environments | None  # who talks to the policy, where more than one response is asked of it


def rollout_maker(experiment: Experiment, players: Players = None) -> Callable[..., SingleTurn]:
    """What makes the rollouts of ``experiment``, with the arguments of `SingleTurn`: ``environment.name`` says, or the
    function that ``hooks.rollout`` names. ``players``: what they need, where there are any. Raises ConfigurationError
    for a function that can't be imported, or isn't async."""
    if isinstance(players, Environments):
        return functools.partial(EnvironmentRollouts, players)
    if players is not None:
        return functools.partial(AgentRollouts, players)
    name = experiment.hooks.rollout
    return SingleTurn if name == "single_turn" else functools.partial(OwnRollouts, load_own(name))


def make_rollouts(
    experiment: Experiment,
    generate: Generate,
    tokenizer: TextCodec,
    clock: Clock,
    players: Players = None,
    **options: Any,
) -> SingleTurn:
    """The rollouts of ``experiment``; ``options``: of `SingleTurn`. Raises ConfigurationError as `rollout_maker`."""
    make = rollout_maker(experiment, players)
    return make(generate, tokenizer, experiment.rollout, clock, run_seed=experiment.run.seed, **options)

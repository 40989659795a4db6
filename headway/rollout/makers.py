"""Who makes the rollouts of an experiment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.config.schema import Experiment
from headway.records.clients import TextCodec
from headway.rollout.agent import AgentRollouts, Agents
from headway.rollout.own import OwnRollouts, load_own
from headway.rollout.single_turn import Generate, SingleTurn
from headway.runtime.clock import Clock


def rollout_maker(experiment: Experiment, agents: Agents | None = None) -> Callable[..., SingleTurn]:
    """What makes the rollouts of ``experiment``, with the arguments of `SingleTurn`: ``environment.name`` says, or the
    function that ``hooks.rollout`` names. ``agents``: what they need, where there are any. Raises ConfigurationError
    for a function that can't be imported, or isn't async."""
    if agents is not None:
        return functools.partial(AgentRollouts, agents)
    name = experiment.hooks.rollout
    return SingleTurn if name == "single_turn" else functools.partial(OwnRollouts, load_own(name))


def make_rollouts(
    experiment: Experiment,
    generate: Generate,
    tokenizer: TextCodec,
    clock: Clock,
    agents: Agents | None = None,
    **options: Any,
) -> SingleTurn:
    """The rollouts of ``experiment``; ``options``: of `SingleTurn`. Raises ConfigurationError as `rollout_maker`."""
    make = rollout_maker(experiment, agents)
    return make(generate, tokenizer, experiment.rollout, clock, run_seed=experiment.run.seed, **options)

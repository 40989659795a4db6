"""Selects the maker of an experiment's rollouts."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.records.clients import RolloutMaker
from headway.rollout.makers.agent import AgentRollouts, Agents
from headway.rollout.makers.environment import EnvironmentRollouts, Environments
from headway.rollout.makers.outside_workers import KeepRollout, RemoteHost, RemoteRollouts
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.makers.user_function import CustomRollouts, load_rollout_function

MultiTurnHost = Agents | Environments | RemoteHost  # runs the other side of conversations with the policy


def make_rollouts(
    experiment: Experiment, sampler: TurnSampler, host: MultiTurnHost | None = None, keep: KeepRollout | None = None
) -> RolloutMaker:
    """Return the maker of the rollouts of ``experiment``, whose responses ``sampler`` samples. ``environment.name``
    selects it, or the function that ``hooks.rollout`` names. ``host``: of agents, environments or outside workers, if
    there are any. ``keep``: commits the rollouts that outside workers finish. Raises ConfigurationError for a function
    that can't be imported, or isn't async."""
    if isinstance(host, Environments):
        return EnvironmentRollouts(host, sampler)
    if isinstance(host, RemoteHost):
        return RemoteRollouts(host, sampler, keep)
    if host is not None:
        return AgentRollouts(host, sampler)
    name = experiment.hooks.rollout
    return SingleTurn(sampler) if name == "single_turn" else CustomRollouts(load_rollout_function(name), sampler)

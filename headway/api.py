"""Headway's public names in one place: what users' environments, hooks, verifiers and scripts import.

    from headway.api import Environment, Episode, ToolError, load_experiment, train

Names are imported when they are first used, so importing this module loads neither torch nor a server. Everything else
in the package may move between releases.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headway.config.removed import renamed

if TYPE_CHECKING:
    from headway.cli.recipe import Recipe as Recipe
    from headway.config.cluster import ClusterConfig as ClusterConfig
    from headway.config.schema import Experiment as Experiment
    from headway.flow.channel import Channel as Channel
    from headway.flow.group import WorkerGroup as WorkerGroup
    from headway.flow.run import Flow as Flow
    from headway.flow.run import run as run
    from headway.flow.worker import Worker as Worker
    from headway.orchestrator.jobs.evaluate import evaluate_model as evaluate_model
    from headway.orchestrator.jobs.sft import run_sft as run_sft
    from headway.orchestrator.preflight.experiment_file import load_experiment as load_experiment
    from headway.orchestrator.train import train as train
    from headway.records.errors import ConfigurationError as ConfigurationError
    from headway.records.errors import HeadwayError as HeadwayError
    from headway.records.errors import InfrastructureError as InfrastructureError
    from headway.records.execution import ExecutionPlan as ExecutionPlan
    from headway.records.execution import StagePlacement as StagePlacement
    from headway.records.ledger import RunSummary as RunSummary
    from headway.records.rollout import Group as Group
    from headway.records.rollout import Rollout as Rollout
    from headway.records.rollout import Verdict as Verdict
    from headway.records.task import Task as Task
    from headway.rollout.environment import Answer as Answer
    from headway.rollout.environment import Call as Call
    from headway.rollout.environment import Environment as Environment
    from headway.rollout.environment import Episode as Episode
    from headway.rollout.makers.user_function import RolloutOver as RolloutOver
    from headway.rollout.tools import ToolError as ToolError
    from headway.services.serve import ServeSettings as ServeSettings
    from headway.services.serve import serve as serve
    from headway.telemetry.ledger import read_ledger as read_ledger
    from headway.trainer.losses import LossSettings as LossSettings
    from headway.trainer.losses import TokenLoss as TokenLoss
    from headway.trainer.losses import TokenTerms as TokenTerms

_HOMES = {
    "headway.cli.recipe": ("Recipe",),
    "headway.config.cluster": ("ClusterConfig",),
    "headway.config.schema": ("Experiment",),
    "headway.flow.channel": ("Channel",),
    "headway.flow.group": ("WorkerGroup",),
    "headway.flow.run": ("Flow", "run"),
    "headway.flow.worker": ("Worker",),
    "headway.orchestrator.jobs.evaluate": ("evaluate_model",),
    "headway.orchestrator.jobs.sft": ("run_sft",),
    "headway.orchestrator.preflight.experiment_file": ("load_experiment",),
    "headway.orchestrator.train": ("train",),
    "headway.records.errors": ("ConfigurationError", "HeadwayError", "InfrastructureError"),
    "headway.records.execution": ("ExecutionPlan", "StagePlacement"),
    "headway.records.ledger": ("RunSummary",),
    "headway.records.rollout": ("Group", "Rollout", "Verdict"),
    "headway.records.task": ("Task",),
    "headway.rollout.environment": ("Answer", "Call", "Environment", "Episode"),
    "headway.rollout.makers.user_function": ("RolloutOver",),
    "headway.rollout.tools": ("ToolError",),
    "headway.services.serve": ("ServeSettings", "serve"),
    "headway.telemetry.ledger": ("read_ledger",),
    "headway.trainer.losses": ("LossSettings", "TokenLoss", "TokenTerms"),
}
_MODULES = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name's home on first use. Raises AttributeError for a name that isn't public."""
    if name not in _MODULES:
        sentence = renamed("headway.api", name) or f"headway.api has no {name!r}; valid: {', '.join(sorted(_MODULES))}"
        raise AttributeError(sentence)
    public = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return sorted(_MODULES)

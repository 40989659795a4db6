"""The sections of an experiment that the services of a model read, be it a whole one or a simulators' token policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from headway.config.external_models import TeacherConfig
from headway.config.model import ModelConfig
from headway.config.objective.critic import CriticConfig
from headway.config.objective.rules import Rules
from headway.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    GeneratorConfig,
    LedgerConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    WeightsConfig,
)
from headway.config.sources import DemonstrationsConfig


class Budgeted(Protocol):
    """A section with the budget of staleness."""

    @property
    def budget(self) -> int: ...


class PolicySections(Protocol):
    """The sections of which a trainer and an engine are built, and what follows from them: see `Experiment`."""

    joins_groups: ClassVar[bool]

    @property
    def run(self) -> RunConfig: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def generator(self) -> GeneratorConfig: ...
    @property
    def queue(self) -> Budgeted: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def critic(self) -> CriticConfig: ...
    @property
    def demonstrations(self) -> DemonstrationsConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def ledger(self) -> LedgerConfig: ...
    @property
    def rules(self) -> Rules[AlgorithmConfig]: ...
    @property
    def used_teachers(self) -> Mapping[str, TeacherConfig]: ...
    @property
    def token_budget(self) -> int | None: ...
    @property
    def uses_chat(self) -> bool: ...
    @property
    def kept_sets(self) -> int: ...
    @property
    def constrains(self) -> bool: ...
    @property
    def max_sequence_tokens(self) -> int: ...

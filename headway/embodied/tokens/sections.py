"""The sections of a language model's services, of an experiment whose policy acts in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headway.config.external_models import TeacherConfig
from headway.config.model import ModelConfig
from headway.config.objective.critic import GAE, CriticConfig
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
from headway.config.simulation import FragmentQueueConfig, SimulatorExperiment
from headway.config.sources import DemonstrationsConfig

MAX_PROMPT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class TokenSections:
    """The sections that trainer and engine read (`config.services.policy_sections.PolicySections`)."""

    joins_groups: ClassVar[bool] = True  # the decisions of an episode are a group
    run: RunConfig
    model: ModelConfig
    rollout: RolloutConfig
    generator: GeneratorConfig
    queue: FragmentQueueConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    rules: Rules[AlgorithmConfig]
    critic: CriticConfig
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ledger: LedgerConfig = field(default_factory=lambda: LedgerConfig(rollouts="none"))
    used_teachers: Mapping[str, TeacherConfig] = field(default_factory=dict[str, TeacherConfig])
    token_budget: int | None = None
    constrains: bool = True

    @property
    def uses_chat(self) -> bool:
        return self.model.template == "chat"

    @property
    def kept_sets(self) -> int:
        return self.algorithm.truncation_support_tokens

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens


def token_sections(experiment: SimulatorExperiment, letters: int) -> TokenSections:
    """The sections of an experiment with ``[model]``. ``letters``: of a response."""
    assert experiment.model is not None, "a token policy has a model"
    settings, trainer, algorithm = experiment.simulator, experiment.trainer, experiment.algorithm
    corrects, dtype = algorithm.correction == "recompute", experiment.model.dtype or "float32"
    objective = AlgorithmConfig(
        advantage="group_mean_std" if settings.group_lanes > 1 else GAE,
        loss="decoupled_ppo" if corrects else "ppo_clip",
        proximal="recompute" if corrects else "auto",
        clip_low=algorithm.clip,
        clip_high=algorithm.clip,
        behaviour_weight_cap=algorithm.behaviour_weight_cap,
        entropy_coefficient=algorithm.entropy_coefficient,
        early_stop_kl=algorithm.early_stop_kl,
        early_stop_ratio=algorithm.early_stop_ratio,
        allow_truncated_sampling=True,
    )
    return TokenSections(
        run=experiment.run,
        model=experiment.model,
        rollout=RolloutConfig(max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=2 * letters + 1),
        generator=GeneratorConfig(devices=settings.devices, dtype=dtype, slots=settings.block_lanes),
        queue=experiment.queue,
        algorithm=objective,
        trainer=TrainerConfig(
            devices=trainer.devices,
            dtype=dtype,
            learning_rate=trainer.learning_rate,
            schedule=trainer.schedule,
            warmup_steps=trainer.warmup_steps,
            max_grad_norm=trainer.max_grad_norm,
            passes=trainer.passes,
            optimizer_steps_per_batch=-(-settings.lanes * settings.steps_per_fragment // trainer.minibatch),
        ),
        critic=experiment.critic,
        rules=Rules(algorithms=(objective,), rule_by_source={settings.environment: 0}),
    )

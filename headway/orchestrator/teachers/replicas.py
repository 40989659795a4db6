"""A teacher with devices: replicas of the generator's pool that only score given ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.teacher_scores import score_fault
from headway.config.engines import starts_vllm
from headway.config.external_models import MOST_SERVED, TeacherConfig
from headway.config.model import ModelConfig
from headway.config.schema import Experiment, GeneratorConfig
from headway.generator.client import GeneratorPool
from headway.models.adapter_targets import base_digest
from headway.models.routing import without_replay
from headway.records.errors import HeadwayError
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.records.trace import WorkerState
from headway.rollout.chat_model import ModelFailed
from headway.runtime.clock import Clock
from headway.runtime.workers import EventCallback, Launcher

_VLLM_PREFILL_TOKENS = 1024  # most in a step, of which vLLM on a CPU computes the logits at once


def teacher_experiment(experiment: Experiment, teacher: TeacherConfig) -> Experiment:
    """The experiment as the replicas of ``teacher`` read it: its model, on its devices, with KV memory for one
    sequence, because prompts are scored one after another. They run vLLM where the generator's replicas start it."""
    model, generator, rollout = experiment.model, experiment.generator, experiment.rollout
    keys: dict[str, Any] = {"template": model.template, "trust_remote_code": model.trust_remote_code}
    settings = {"devices": teacher.devices, "dtype": generator.dtype, "slots": 1, "prefetch_groups": 0}
    settings |= {"prefill_tokens_per_step": generator.prefill_tokens_per_step}
    if starts_vllm(generator.engine, generator.devices):
        ranks = {} if any("cpu:" in name for name in teacher.devices) else generator.engine_arguments
        arguments = {name: ranks[name] for name in ("tensor_parallel_size",) if name in ranks}
        arguments["max_logprobs"] = max(MOST_SERVED, teacher.top_k or 0)
        settings |= {"engine": generator.engine, "engine_arguments": arguments}
        settings["prefill_tokens_per_step"] = min(_VLLM_PREFILL_TOKENS, generator.prefill_tokens_per_step)
        # vLLM samples a token after those that it scores.
        rollout = rollout.model_copy(update={"max_response_tokens": rollout.max_response_tokens + 1})
    return without_replay(experiment).model_copy(
        update={
            "run": experiment.run.model_copy(update={"offload": False}),
            "rollout": rollout,
            "model": ModelConfig(path=teacher.path, **keys),
            "generator": GeneratorConfig.model_construct(**{**dict(GeneratorConfig()), **settings}),
        }
    )


class ReplicaTeacher:
    """Scores given ids by replicas: their processes, restarts and health checks are the generator pool's."""

    def __init__(
        self,
        name: str,
        teacher: TeacherConfig,
        experiment: Experiment,
        launcher: Launcher,
        clock: Clock,
        on_event: EventCallback,
        log_directory: Path,
    ) -> None:
        self.called, self._teacher = f"teacher {name}", teacher
        self.read_tokens, self.cost = 0, 0.0
        options: dict[str, Any] = {"on_event": on_event, "log_directory": log_directory, "role": f"teacher-{name}"}
        self._pool = GeneratorPool(launcher, teacher_experiment(experiment, teacher), clock, **options)

    @property
    def worker_states(self) -> list[WorkerState]:
        """Health and restarts of every replica."""
        return self._pool.worker_states

    async def start(self) -> str:
        """Start the replicas; returns a digest of the model's folder. Raises ConfigurationError and WorkerDied."""
        await self._pool.start()
        return f"headway:{base_digest(self._teacher.path)}"

    async def score(self, ids: TokenIds, scored: NDArray[np.bool_], top: int) -> tuple[PromptLogprobs, int]:
        """See `ServedTeacher.score`."""
        self.read_tokens += len(ids)
        try:
            scores = await self._pool.prompts.logprobs(ids, top)
        except HeadwayError as error:
            raise ModelFailed(f"{self.called}: {error}") from None
        if reason := score_fault(scores, ids.array, scored, top):
            raise ModelFailed(f"{self.called} answered {reason}")
        return scores, len(ids)

    async def close(self) -> None:
        """Stop the replicas."""
        await self._pool.stop()

"""Held-out splits are sampled independently of each other, and alike in every evaluation of one; what one decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.generator.fake import FakeGenerator
from headway.models.hf.prompts import PromptMaker
from headway.orchestrator.evaluation import Evaluations
from headway.orchestrator.state import Signal
from headway.records.clients import Watch
from headway.records.generation import GenerationRequest, GenerationResult
from headway.records.ledger import EvaluationRecord
from headway.records.task import Task
from headway.rollout.fake import FakeVerifier
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import Clock, run_virtual
from tests.support.simulated_run import PlainTokenizer, experiment_of


def test_splits_number_their_tasks_alike_and_yet_draw_different_numbers(tmp_path: Path) -> None:
    async def main(clock: Clock) -> list[list[int]]:
        generator = FakeGenerator(clock)
        await generator.start()
        seeds: list[int] = []

        async def noted(request: GenerationRequest, watch: Watch | None = None, /) -> GenerationResult:
            seeds.append(request.sampling.seed)
            return await generator.generate(request, watch)

        experiment, tokenizer = experiment_of(tmp_path), PlainTokenizer()
        tasks = [Task(task_id=str(i), prompt=str(i)) for i in range(8)]
        run: Any = SimpleNamespace(
            clock=clock,
            directory=tmp_path,
            evaluation_tasks={"validation": tasks, "test": tasks},
            experiment=experiment,
            meter=SimpleNamespace(applied_version=0),
            prompts=PromptMaker(tokenizer, "raw"),
            record=lambda line: None,
            rollouts=SingleTurn(TurnSampler(noted, tokenizer, experiment.rollout, clock, run_seed=0)),
            state=SimpleNamespace(version=0),
            time_s=clock.now,
            tokenizer=tokenizer,
            verifier=FakeVerifier(lambda task, response: 1.0, clock),
        )
        evaluations = Evaluations(run)
        drawn = []
        for split in ("validation", "test", "test"):
            seeds.clear()
            await evaluations.evaluate_held(split, "after")
            drawn.append(sorted(seeds))
        return drawn

    validation, test, again = run_virtual(main)
    assert len({*validation, *test}) == 16
    assert test == again


@pytest.mark.parametrize(("failing", "kept"), [(4, []), (3, [1.0])])
def test_an_evaluation_of_which_half_failed_makes_no_version_the_best(
    tmp_path: Path, failing: int, kept: list[float]
) -> None:
    async def main(clock: Clock) -> tuple[list[float], str]:
        generator, tokenizer, experiment = FakeGenerator(clock), PlainTokenizer(), experiment_of(tmp_path)
        await generator.start()
        judged: list[EvaluationRecord] = []
        run: Any = SimpleNamespace(
            clock=clock,
            directory=tmp_path,
            evaluation_tasks={"validation": [Task(task_id=str(i), prompt=str(i)) for i in range(8)]},
            experiment=experiment,
            meter=SimpleNamespace(applied_version=0),
            prompts=PromptMaker(tokenizer, "raw"),
            record=judged.append,
            rollouts=SingleTurn(TurnSampler(generator.generate, tokenizer, experiment.rollout, clock, run_seed=0)),
            state=SimpleNamespace(version=0, changed=Signal()),
            time_s=clock.now,
            tokenizer=tokenizer,
            verifier=FakeVerifier(lambda task, _: float("nan") if int(task.task_id) < failing else 1.0, clock),
        )
        evaluations, rates = Evaluations(run), list[float]()
        evaluations._keep_as_best = lambda version, solve_rate: rates.append(solve_rate or 0.0)
        await evaluations._validate(0)
        return rates, judged[0].failures_text

    found, text = run_virtual(main)
    assert found == kept
    assert f"{failing} of 8 attempts failed: the reward is nan" in text
    assert text.startswith("MOST FAILED") == (not kept)

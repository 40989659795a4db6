"""What a replica may have sampled from damaged weights isn't trained, and the accounting knows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headway.generator.fake import FakeGenerator
from headway.records.generation import GenerationRequest
from tests.support.simulated_run import experiment_of, simulate


def test_groups_of_damaged_weights_are_discarded(monkeypatch: pytest.MonkeyPatch):
    answered, taken = list[str](), list[list[str]]()
    generate = FakeGenerator.generate

    async def noted(self: FakeGenerator, request: GenerationRequest, *rest: Any) -> Any:
        outcome = await generate(self, request, *rest)
        answered.append(request.request_id)
        return outcome

    def voided(self: FakeGenerator) -> list[str]:
        taken.append(answered[-3:] if len(taken) % 3 == 2 else [])
        return [*taken[-1], "evaluation-validation-0-0.0.0", "another name"]

    monkeypatch.setattr(FakeGenerator, "generate", noted)
    monkeypatch.setattr(FakeGenerator, "take_voided", voided)
    outcome = simulate(
        experiment_of(
            Path("unused"),
            run={"steps": 12},
            rollout={"group_size": 4, "max_response_tokens": 200},
            queue={"groups_per_step": 2, "budget": 3, "filter_zero_variance": False},
            generator={"slots": 16},
        )
    )
    assert len(outcome.steps) == 12
    assert outcome.audit == []
    groups = {int(re.match(r"\d+", name)[0]) for names in taken for name in names}  # pyright: ignore
    discarded = groups - set(outcome.trained_groups)
    assert discarded
    assert outcome.endings["discarded"] >= 4 * len(discarded) - 4

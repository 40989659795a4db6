"""References by grammar: each is equal to itself in five spellings, and to nothing that nearly is it."""

from __future__ import annotations

import datetime
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from packages import needs

from headway.config.sources import VerifierSettings
from headway.records.task import Task
from headway.rollout.verification.scorers import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from parts.reference_grammar import KINDS

needs("math_verify")

MOST_REFUSED = 0.1  # of the spellings of a kind


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_references_are_equal_to_themselves_and_to_nothing_else(count: int) -> None:
    score = resolve_verifier(VerifierSettings(name="math"))

    def solved(reference: str, response: str) -> bool:
        return score_guarded(score, Task(task_id="t", prompt="p", answer=reference), f"\\boxed{{{response}}}").solved

    seed = datetime.date.today().isoformat()
    rng = random.Random(seed)
    refused, tried, false = Counter[str](), Counter[str](), list[tuple[str, str, str]]()
    examples: dict[str, tuple[str, str]] = {}
    for n in range(count):
        kind = list(KINDS)[n % len(KINDS)]
        drawn = KINDS[kind](rng)
        assert solved(drawn.text, drawn.text), (seed, drawn.text)
        for spelling in drawn.spellings:
            tried[kind] += 1
            if not solved(drawn.text, spelling):
                refused[kind] += 1
                examples[kind] = drawn.text, spelling
        for what, miss in drawn.misses.items():
            if solved(drawn.text, miss) or solved(miss, drawn.text):
                false.append((what, drawn.text, miss))
    for kind in KINDS:
        print(f"{kind}: {refused[kind]} of {tried[kind]} spellings refused", examples.get(kind, ""))
    assert not false, (seed, false[:10])
    assert all(refused[kind] <= MOST_REFUSED * tried[kind] for kind in KINDS), (seed, examples)

"""The grammar of examples/kernels: a module is of the class that its choices say, by the evaluator's word."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.services.serve_kernels import KernelSettings, make_evaluator

EXAMPLE = Path(__file__).parents[3] / "examples" / "kernels"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import make_tasks

    yield make_tasks
    sys.modules.pop("make_tasks")


def evaluations(submissions: list[KernelSubmission]) -> list[KernelEvaluation]:
    evaluator = make_evaluator(KernelSettings())

    async def evaluate() -> list[KernelEvaluation]:
        async with evaluator:
            return await asyncio.gather(*map(evaluator.evaluate, submissions))

    return asyncio.run(evaluate())


@pytest.mark.slow
@pytest.mark.parametrize("in_each_shape", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_choice_makes_a_module_of_its_class(example, in_each_shape):
    rng, tried = random.Random(0), set[tuple[str, str]]()
    cases: list[tuple[str, dict[str, str], str]] = []
    for shape, function in zip(example.SHAPES, ("bump", "hinge", "gap", "bend"), strict=True):
        slots = example.SHAPES[shape].slots
        plain = {slot: example.SLOTS[slot][0][0] for slot in slots}
        for slot in slots:
            for text, kind, _ in example.SLOTS[slot]:
                if (slot, text) in tried and not in_each_shape:
                    continue
                tried.add((slot, text))
                choices = {**plain, slot: text}
                name = f"{shape} {function}"
                cases.append((name, choices, kind))
                assert example.SEVERITY.index(example.classify(name, choices)) >= example.SEVERITY.index(kind)
    sources = [example.write_module(name, choices, rng) for name, choices, _ in cases]
    found = evaluations(
        [
            KernelSubmission(task=example.make_task(name), source=source, correct_trials=2, timed=False, timeout_s=60.0)
            for (name, _, _), source in zip(cases, sources, strict=True)
        ]
    )
    wrong = []
    for (name, choices, _), evaluation in zip(cases, found, strict=True):
        assert not evaluation.infrastructure
        kind = example.classify(name, choices)
        seen = "right or slow" if evaluation.correct else example.WRONG if evaluation.compiled else example.BROKEN
        if seen != ("right or slow" if kind in (example.RIGHT, example.SLOW) else kind):
            wrong.append((name, choices, kind, evaluation.outcome, evaluation.text))
    assert wrong == []


def test_held_out_problems_are_nowhere_else(example, tmp_path):
    example.write_tasks(tmp_path, 0)
    shown = (tmp_path / "sft.jsonl").read_text() + (tmp_path / "train.jsonl").read_text()
    for name, (rows, columns) in example.HELD_OUT.items():
        assert f'"{name}"' not in shown
        assert f"ROWS = {rows}\\nCOLUMNS = {columns}\\n" not in shown
    assert min(map(example.distinct_sources, example.problems())) >= 1000

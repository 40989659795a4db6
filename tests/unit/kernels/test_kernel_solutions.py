"""Honest solutions of the built-in kernel problems are right, in plain processes; references take milliseconds."""

from __future__ import annotations

import msgspec
import pytest
from kernel_candidates import Outcome, Pair, run_pairs

from benchmarks.parts.kernel_solutions import Solution, solutions
from headway.kernels.operators import called_operator, forbidden_aten
from headway.kernels.tasks import builtin_tasks

TASKS = {task.name: task for task in builtin_tasks()}
SOLUTIONS = solutions()
FIRST = ("softplus", "gru_cell")  # of the first and the last level; all are in the slow tier


def outcomes(chosen: list[Solution]) -> dict[str, Outcome]:
    found = run_pairs([Pair(TASKS[each.problem], each.source) for each in chosen], timeout_s=500)
    return {f"{each.problem} {each.style}": outcome for each, outcome in zip(chosen, found, strict=True)}


def require_right(chosen: list[Solution]) -> dict[str, Outcome]:
    found = outcomes(chosen)
    assert {name: outcome for name, outcome in found.items() if outcome.error is None or outcome.error > 1} == {}
    for each in chosen:
        task = msgspec.structs.replace(TASKS[each.problem], backend=each.backend)
        assert called_operator(task, found[f"{each.problem} {each.style}"].operators) == "", each
    return found


def test_there_are_three_styles_over_all_problems():
    assert {each.problem for each in SOLUTIONS} == set(TASKS)
    styles = [each.style for each in SOLUTIONS]
    assert len(SOLUTIONS) >= 100
    assert (styles.count("torch"), styles.count("cpp")) == (len(TASKS), len(TASKS))
    assert len({each.source for each in SOLUTIONS}) == len(SOLUTIONS)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.long
def test_solutions_of_each_style_are_right():
    require_right([each for each in SOLUTIONS if each.problem in FIRST])


@pytest.mark.slow
@pytest.mark.real
def test_wrong_candidates_are_seen():
    right = next(each for each in SOLUTIONS if (each.problem, each.style) == ("softplus", "torch"))
    wrong = Pair(TASKS["softplus"], right.source.replace("logaddexp(x", "logaddexp(x + 1e-3"))
    raising = Pair(TASKS["softplus"], right.source.replace("logaddexp", "no_such_operator"))
    fused = Pair(TASKS["softplus"], TASKS["softplus"].source.replace("Model(", "ModelNew("))
    found = run_pairs([wrong, raising, fused], timeout_s=100)
    assert found[0].error is not None
    assert 1 < found[0].error < 100
    assert found[1].error is None
    assert "no_such_operator" in found[1].text
    assert found[2].error == 0
    assert set(found[2].operators) & forbidden_aten(TASKS["softplus"])


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", ["cpp", "torch", "openmp"])
def test_all_solutions_are_right_and_references_take_0_05_to_60_ms(style: str):
    found = require_right([each for each in SOLUTIONS if each.style == style])
    times = {name: outcome.reference_ms for name, outcome in found.items()}
    assert {name: ms for name, ms in times.items() if not 0.05 <= ms <= 60} == {}

"""Prompts of kernel tasks, sources in answers, feedback."""

from __future__ import annotations

import ast

import pytest
from scripted_kernels import evaluation, kernel_task

from headway.kernels.operators import check_operators
from headway.kernels.prompts import feedback, kernel_prompt, source_in
from headway.kernels.tasks import builtin_tasks
from headway.records.kernels import KernelEvaluation, KernelTask


@pytest.mark.parametrize("backend", ["cpp", "torch", "triton", "cuda"])
def test_prompt_holds_the_reference_in_a_block_and_the_rules(backend: str):
    for task in builtin_tasks(backend):  # pyright: ignore[reportArgumentType]
        prompt = kernel_prompt(task)
        assert f"```python\n{task.source.strip()}\n```" in prompt
        assert "class ModelNew" in prompt
        assert prompt == prompt.strip()  # a chat template that trims leaves it as it is
        for name in {name for shape in task.shapes for name in shape}:
            assert name in prompt.partition("other values of ")[2]
        if backend == "torch":
            assert all(name in prompt.partition("Not allowed: ")[2] for name in task.forbidden_operators)


def test_example_in_the_prompt_for_cpp_is_a_candidate_that_the_check_of_operators_accepts():
    task = builtin_tasks("cpp")[0]
    prompt = kernel_prompt(task)
    example = source_in(prompt)
    ast.parse(example)
    assert "load_cpp" in example
    assert check_operators(example, "cpp", task) == []


def test_prompt_gives_tolerances_by_dtype():
    task = KernelTask(
        name="t", source="class Model: ...", tolerances={"float32": (1e-4, 1e-3), "float64": (1e-6, 1e-6)}
    )
    assert "Tolerances, absolute and relative: float32 0.0001 and 0.001, float64 1e-06." in kernel_prompt(task)


GOOD = "class ModelNew:\n    pass\n"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (f"So:\n```python\n{GOOD}```\nDone.", GOOD),
        (f"```\n{GOOD}```", GOOD),
        (f"```python\nclass ModelNew: bad\n```\nBetter:\n```py\n{GOOD}```\nRun it:\n```bash\npython x.py\n```", GOOD),
        (f"<think>\n```python\nclass ModelNew: bad\n```\n</think>\n```python\n{GOOD}```", GOOD),
        (f"```python\nclass ModelNew: bad\n```\n</think>\n```python\n{GOOD}```", GOOD),  # opened by the prompt
        (f"```python\n{GOOD}", GOOD),  # cut off
        (GOOD, GOOD),
        (f"<think>hm</think>{GOOD}", GOOD),
        (f"<think>```python\n{GOOD}```", ""),  # thinks without end
        ("```python\nclass Model: ...\n```", ""),
        (f"```python\nx = 1\n```\nor {GOOD}", ""),
        ("I can't.", ""),
        ("", ""),
    ],
)
def test_source_is_the_last_block_with_the_class(text: str, source: str):
    assert source_in(text) == source


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("not compiled", "It doesn't compile: error: expected ';'"),
        ("wrong", "It compiles, but is right in 4 of 5 trials: 1 of 8 values differs"),
        ("segmentation_fault", "ends with segmentation fault: segmentation_fault in line 3"),
        ("cheat", "This isn't allowed: it prints a result."),
        ("correct", "at 1.50 times the reference's speed (1.33 ms; the reference 2 ms). Make it faster."),
    ],
)
def test_feedback_says_what_is_wrong(outcome: str, said: str):
    assert said in feedback(evaluation(outcome))


def test_feedback_quotes_a_limited_part_of_the_log():
    found = feedback(KernelEvaluation(text="first", log="x" * 100_000))
    assert "first" in found
    assert len(found) < 2000


def test_feedback_on_a_failed_evaluation_is_refused():
    with pytest.raises(ValueError, match="the zygote has died"):
        feedback(evaluation("infrastructure"))
    assert kernel_prompt(kernel_task("t"))

"""Several sources by weight: shares that hold at every moment, epochs of each source, resuming, reading."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.load import load_experiment, require_resumable, validate_experiment
from headway.config.schema import Experiment
from headway.orchestrator.task_sets import load_task_sets, named_verifiers, training_weights
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.cursor import TaskCursor
from headway.tasks.mixture import Mixture

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, steps=st.integers(1, 300))
def test_mixture_keeps_every_share_within_a_task(weights: list[int], steps: int) -> None:
    mixture, total = Mixture([weight / 10 for weight in weights]), sum(weights)
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    for n in range(1, steps + 1):
        mixture.next()
        off = [abs(Fraction(n * w, total) - count) for w, count in zip(weights, mixture.counts, strict=True)]
        assert max(off) <= bound


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, position=st.integers(0, 2000))
def test_mixture_seek_equals_repeated_next(weights: list[int], position: int) -> None:
    walked, sought = Mixture(weights), Mixture(weights)
    for _ in range(position):
        walked.next()
    sought.seek(position)
    assert sought.counts == walked.counts
    assert [sought.next() for _ in range(50)] == [walked.next() for _ in range(50)]


def test_mixture_order_is_pinned() -> None:
    mixture = Mixture([3, 1])
    assert [mixture.next() for _ in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
    mixture = Mixture([0.5, 0.3, 0.2])
    assert [mixture.next() for _ in range(10)] == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    far = Mixture([0.123456, 1])
    far.seek(10**15)
    assert far.counts[0] == pytest.approx(10**15 * 0.123456 / 1.123456, abs=1)


def tasks(**sizes: int) -> list[Task]:
    return [Task(task_id=f"{name}{i}", prompt=str(i), source=name) for name, size in sizes.items() for i in range(size)]


def test_sources_have_independent_epochs() -> None:
    cursor = TaskCursor(tasks(small=4, large=30), seed=1, weights={"small": 1, "large": 2})
    drawn = [cursor.next() for _ in range(90)]
    small = [task.task_id for task in drawn if task.source == "small"]
    large = [task.task_id for task in drawn if task.source == "large"]
    assert (len(small), len(large)) == (30, 60)
    epochs = [small[start : start + 4] for start in range(0, 28, 4)]
    assert all(len(set(epoch)) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert len(set(large[:30])) == len(set(large[30:])) == 30


def test_mixture_resumes_at_any_position() -> None:
    def cursor() -> TaskCursor:
        return TaskCursor(tasks(a=5, b=7, c=3), seed=3, weights={"a": 1, "b": 0.7, "c": 0.1})

    walked = cursor()
    drawn = [walked.next().task_id for _ in range(200)]
    for position in (0, 1, 17, 18, 150):
        sought = cursor()
        sought.seek(position)
        assert [sought.next().task_id for _ in range(40)] == drawn[position : position + 40]
    other = TaskCursor(tasks(a=5, b=7, c=3), seed=4, weights={"a": 1, "b": 0.7, "c": 0.1})
    assert [other.next().task_id for _ in range(40)] != drawn[:40]


def test_sources_of_equal_size_are_shuffled_differently() -> None:
    cursor = TaskCursor(tasks(a=20, b=20), seed=0, weights={"a": 1, "b": 1})
    drawn = [cursor.next() for _ in range(40)]
    orders = [[task.prompt for task in drawn if task.source == name] for name in "ab"]
    assert orders[0] != orders[1]
    alone, plain = TaskCursor(tasks(a=9), 5, {"a": 2.0}), TaskCursor(tasks(a=9), 5)
    assert [alone.next() for _ in range(30)] == [plain.next() for _ in range(30)]
    with pytest.raises(ConfigurationError, match="b: there are no tasks to draw from"):
        TaskCursor(tasks(a=3), 0, {"a": 1, "b": 1})


# --- out of an experiment --------------------------------------------------------------------------------


def write(path: Path, prompts: list[str], **row: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1", **row}) + "\n" for prompt in prompts))
    return str(path)


def experiment(train: Any, **sections: Any) -> Experiment:
    raw = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": train, **sections.pop("tasks", {})}}
    return validate_experiment({**raw, **sections}, "test")


def test_task_set_of_several_sources(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", ["a1", "a2", "both"])
    second = write(tmp_path / "b.jsonl", ["both", "b1"])
    mixed = experiment([{"path": first, "weight": 3}, {"path": second, "label": "b"}])
    read = load_task_sets(mixed)["train"]
    assert Counter(task.source for task in read) == {first: 3, "b": 1}  # of equal tasks the first is kept
    assert training_weights(mixed) == {first: 3.0, "b": 1.0}
    held = write(tmp_path / "held.jsonl", ["x", "b1"])
    with pytest.raises(ConfigurationError, match=r"tasks\.train and tasks\.test share 1 prompt, for example 'b1'"):
        load_task_sets(experiment([first, second], tasks={"test": [held]}))
    with pytest.raises(ConfigurationError, match=r"copy\.jsonl has only tasks that are in earlier sources"):
        load_task_sets(experiment([first, write(tmp_path / "copy.jsonl", ["a1"])]))


def test_generated_tasks_exclude_held_out_prompts(tmp_path: Path) -> None:
    generated = {"source": "reasoning-gym", "name": "basic_arithmetic", "parameters": {"size": 30}, "label": "sums"}
    prompts = [task.prompt for task in load_task_sets(experiment(generated))["train"]]
    held = write(tmp_path / "held.jsonl", prompts[:3])
    files = write(tmp_path / "a.jsonl", ["a1"])
    read = load_task_sets(experiment([generated, files], tasks={"test": held}))["train"]
    assert [task.prompt for task in read] == [*prompts[3:], "a1"]


def refusal(train: Any, **sections: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        experiment(train, **sections)
    return str(caught.value)


def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    one = {"path": "a.jsonl"}
    assert "two sources are called 'a.jsonl': give them a 'label' each" in refusal([one, one])
    assert "tasks.train = []: Value should have at least 1 item" in refusal([])
    assert "tasks.train.1.weight = 0: Input should be greater than 0" in refusal([one, {"path": "b", "weight": 0}])
    assert "unknown key 'tasks.train.1.wieght'; did you mean 'weight'?" in refusal([one, {"path": "b", "wieght": 0}])
    assert "unknown key 'tasks.train.wieght'; did you mean 'weight'?" in refusal({"path": "b", "wieght": 0})
    assert "'subset' has no effect with source = 'jsonl': it belongs to source = 'datasets'" in refusal(
        {**one, "subset": "main"}
    )
    sized = {"source": "datasets", "name": "a/b", "parameters": {"size": 3}}
    assert "'parameters' has no effect with source = 'datasets'" in refusal(sized)
    both = {"source": "datasets", "name": "a/b", "path": "c"}
    assert "needs either 'path', on this machine, or 'name', on the Hugging Face hub" in refusal(both)
    assert "'revision' has no effect with 'path'" in refusal({"source": "datasets", "path": "c", "revision": "v1"})
    assert "'a.parquet' isn't a JSONL file; set source = 'datasets'" in refusal("a.parquet")
    assert "'columns' has no effect with 'convert'" in refusal({**one, "convert": "a:b", "columns": {"prompt": "q"}})
    assert "convert = 'ab': expected module:function" in refusal({**one, "convert": "ab"})


def test_overrides_and_resume_checks_reach_into_source_list(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        '[run]\ndirectory = "r"\n[model]\npath = "m"\n[[tasks.train]]\npath = "a"\n[[tasks.train]]\npath = "b"\n'
        '[verifiers.strict]\nname = "numeric"\n'
    )
    stored = load_experiment(file)
    changed = load_experiment(file, ["--tasks.train.1.weight=2", "--verifiers.strict.timeout_s=3"])
    assert [source.weight for source in changed.tasks.train] == [1.0, 2.0]
    with pytest.raises(ConfigurationError, match=r"resumed: tasks\.train\.1\.weight: 1\.0 -> 2\.0$"):
        require_resumable(stored, changed)
    require_resumable(stored, load_experiment(file, ["--verifiers.strict.timeout_s=3"]))
    with pytest.raises(ConfigurationError, match=r"'2' isn't an index of the list; valid: 0 to 1"):
        load_experiment(file, ["--tasks.train.2.weight=2"])
    one = experiment("a.jsonl")
    with pytest.raises(ConfigurationError, match=r"resumed: tasks\.train\.limit: None -> 3$"):
        require_resumable(one, experiment({"path": "a.jsonl", "limit": 3}))


# --- who scores them -------------------------------------------------------------------------------------


def test_verifier_precedence_is_row_source_experiment(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b", "answer": "1", "verifier": "math"},
        {"prompt": "c", "answer": "1", "verifier": "near"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = write(tmp_path / "plain.jsonl", ["d"])
    near = {"name": "numeric", "parameters": {"tolerance": 0.5}}
    named = {"strict": {"name": "exact", "timeout_s": 3}, "near": near}
    chosen = experiment([{"path": str(tmp_path / "rows.jsonl"), "verifier": "strict"}, plain], verifiers=named)
    sets = load_task_sets(chosen)
    found = named_verifiers(chosen, sets)
    by_prompt = {task.prompt: task.verifier for task in sets["train"]}
    assert (by_prompt["a"], by_prompt["b"], by_prompt["d"]) == ("strict", "math", "")
    assert (found["strict"].name, found["strict"].timeout_s) == ("exact", 3)
    assert by_prompt["c"] == "near"
    assert found["math"].name == "math"
    assert found["near"].parameters == {"tolerance": 0.5}
    assert "verifier" not in sets["train"][1].metadata
    wrong = experiment({"path": plain, "verifier": "strct"}, verifiers=named)
    with pytest.raises(
        ConfigurationError, match=r"verifier = 'strct' is unknown; did you mean 'strict'\? valid: a NAME"
    ):
        named_verifiers(wrong, load_task_sets(wrong))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "verifier": {"nam": "exact"}}\n')
    with pytest.raises(
        ConfigurationError, match=r'rows\.jsonl:1: "verifier" = .*valid: the name of a verifier; one with'
    ):
        load_task_sets(experiment(str(tmp_path / "rows.jsonl")))

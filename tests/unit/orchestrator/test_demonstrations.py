"""Demonstrations beside rollouts: which rows a step has, under kills and resumes, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.load import validate_experiment
from headway.orchestrator.task_sets import changed_data, training_data
from headway.records.errors import BufferCorrupt, ConfigurationError
from headway.records.ledger import StepRecord
from headway.tasks.drawn_demonstrations import Demonstrations, demonstrations_of
from headway.tasks.sft_data import SftTokens
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.fake import FakeTrainer
from tests.support.simulated_run import experiment_of, simulate


def rows_of(count: int, first_id: int = 5) -> SftTokens:
    lengths_s = np.arange(count, dtype=np.int64) % 3 + 2
    total = int(lengths_s.sum())
    learned_n = np.ones(total, np.bool_)
    learned_n[np.cumsum(lengths_s) - lengths_s] = False
    ids_n = np.arange(first_id, first_id + total, dtype=np.int32)
    return SftTokens(token_ids_n=ids_n, learned_n=learned_n, lengths_s=lengths_s, counts={})


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 5), st.integers(1, 8))
def test_every_row_is_drawn_once_before_any_is_drawn_again(count: int, per_step: int, seed: int, epochs: int) -> None:
    demonstrations = Demonstrations(rows_of(count), per_step, seed)
    drawn = [row for step in range(-(-count * epochs // per_step)) for row in demonstrations.draw(step).rows]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert all(0 <= row < count for row in drawn)


def test_a_draw_depends_on_seed_and_step_alone() -> None:
    one, other = Demonstrations(rows_of(20), 4, 1), Demonstrations(rows_of(20), 4, 1)
    assert [one.draw(step) for step in (3, 1)] == [other.draw(step) for step in (1, 3)][::-1]
    assert Demonstrations(rows_of(20), 4, 2).draw(3) != one.draw(3)


def test_a_row_has_its_own_tokens() -> None:
    demonstrations = Demonstrations(rows_of(4), 4, 0)
    drawn = {one.row: one for one in demonstrations.take(demonstrations.draw(0))}
    assert {row: list(one.ids) for row, one in drawn.items()} == {
        0: [5, 6],
        1: [7, 8, 9],
        2: [10, 11, 12, 13],
        3: [14, 15],
    }
    assert list(drawn[2].learned) == [False, True, True, True]


def test_other_rows_than_those_of_the_log_are_refused() -> None:
    logged = Demonstrations(rows_of(4), 2, 0).draw(1)
    with pytest.raises(BufferCorrupt, match="isn't what the run's batches were drawn from"):
        demonstrations_of(Demonstrations(rows_of(4, first_id=6), 2, 0), logged)
    with pytest.raises(ConfigurationError, match="batch log has demonstrations"):
        demonstrations_of(None, logged)
    assert demonstrations_of(None, None) == ()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.lists(st.floats(0.05, 3.0), max_size=4))
def test_killed_runs_train_the_rows_that_their_log_names(seed: int, kills_s: list[float]) -> None:
    experiment = experiment_of(Path("none"), rollout={"group_size": 4}, queue={"groups_per_step": 4, "budget": 2})
    demonstrations = Demonstrations(rows_of(10), 3, 7)
    skipped = frozenset[int]() if kills_s else frozenset({3})  # a replay must not skip what was trained
    options = {"kills_s": tuple(kills_s), "demonstrations": demonstrations, "skip_steps": skipped}
    outcome = simulate(experiment, seed=seed, **options)
    assert outcome.audit == []
    for batch in (batch for trainer in outcome.trainers for batch in trainer.batches):
        assert tuple(drawn.row for drawn in batch.demonstrations) == demonstrations.draw(batch.step).rows
    by_step = Counter({step.step: step.demonstrations for step in outcome.steps if not step.skipped})
    assert set(by_step.values()) == {3}
    assert all(step.samples <= 16 for step in outcome.steps), "no sample is a demonstration"


def test_books_rates_and_credit_are_those_of_a_run_without() -> None:
    experiment = experiment_of(Path("none"), rollout={"group_size": 4}, queue={"groups_per_step": 4, "budget": 2})
    plain, shown = simulate(experiment), simulate(experiment, demonstrations=Demonstrations(rows_of(10), 3, 7))
    names = ("samples", "groups", "endings", "admitted_rollouts", "consumption_per_s", "production_per_s")
    for ours, theirs in zip(plain.steps, shown.steps, strict=True):
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert plain.endings == shown.endings
    assert isinstance(shown.trainer, FakeTrainer)
    assert all(isinstance(step, StepRecord) and step.demonstrations == 3 for step in shown.steps)


def test_a_resume_with_other_demonstrations_is_noticed() -> None:
    experiment = experiment_of(Path("none"), rollout={"group_size": 4}, queue={"groups_per_step": 4, "budget": 2})
    lines = simulate(experiment, demonstrations=Demonstrations(rows_of(10), 3, 7)).lines
    assert changed_data(training_data([], Demonstrations(rows_of(10), 2, 1)), lines) == {}
    assert changed_data(training_data([], None), lines) == {}
    other = training_data([], Demonstrations(rows_of(9), 3, 7))
    assert changed_data(other, []) == {}
    changed = changed_data(other, lines)
    assert list(changed) == ["demonstrations.data"]
    expected = "demonstrations.data has changed since this run began (9 demonstrations, were 10): make clean in"
    assert changed["demonstrations.data"].startswith(expected)


def read(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Demonstrations | None:
    real_tokenizers.write("qwen", folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder)},
        "tasks": {"train": {"path": "unused.jsonl"}},
        "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "demonstrations": {"data": str(folder / "rows.jsonl")},
    }
    experiment = validate_experiment(raw | sections, "test")
    return Demonstrations.read(experiment, Tokenizer.of(experiment))


def test_a_row_longer_than_the_context_is_named(tmp_path: Path) -> None:
    short = {"prompt": "1+1=", "solution": "2"}
    with pytest.raises(ConfigurationError, match=r"rows.jsonl:2.*more than the context of 16"):
        read(tmp_path, [short, short | {"solution": "2 " * 40}])
    demonstrations = read(tmp_path, [short, short | {"solution": ""}])
    assert demonstrations is not None
    assert len(demonstrations) == 1, "nothing to learn in the other"


def test_rows_without_anything_to_learn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"demonstrations.data = .*no row is left"):
        read(tmp_path, [{"prompt": "1+1=", "solution": ""}])

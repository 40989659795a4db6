"""Teachers in real processes: `headway serve` by address, replicas that only score, and runs that learn from them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from test_serve import serving

from headway.algorithms.teacher_scores import read_scores
from headway.buffer.readers import read_history, read_member
from headway.config.external_models import TeacherConfig, TeacherServer
from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.orchestrator.teachers.replicas import ReplicaTeacher
from headway.orchestrator.teachers.server import ServedTeacher
from headway.records.errors import InfrastructureError
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TEACHER, TokenIds
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from tests.conformance.reference import forced_logprobs

pytestmark = pytest.mark.real
PROMPTS = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A model, tasks, and in ``teacher/model`` a teacher of other sizes with the same tokenizer."""
    tiny_run.write_inputs(tmp_path)
    sizes: dict[str, Any] = {"layers": 2, "width": 48, "heads": 2, "kv_heads": 1, "intermediate": 48}
    initialise_model(tmp_path / "teacher" / "model", PROMPTS, seed=5, character_level=True, **sizes)
    return tmp_path


def ids_of(folder: Path, count: int = 20) -> TokenIds:
    """Random ids, and the model's last, which no token of the tokenizer has: a policy may sample it."""
    vocabulary = load_model(folder / "model").config.vocabulary_size
    return TokenIds([*np.random.default_rng(0).integers(0, vocabulary, count - 1).tolist(), vocabulary - 1])


@torch.no_grad()
def expected(folder: Path, ids: TokenIds) -> np.ndarray:
    """Log-probabilities [L - 1, V] under the teacher."""
    model = load_model(folder / "teacher" / "model")
    return torch.log_softmax(model.head(model.forward_packed(torch.tensor(list(ids)), [len(ids)])).float(), -1).numpy()[
        :-1
    ]


def require_equal(scores: PromptLogprobs, folder: Path, ids: TokenIds, top: int) -> None:
    expected_lv = expected(folder, ids)
    np.testing.assert_allclose(scores.logprobs[1:], expected_lv[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-expected_lv)[:, :top], atol=1e-4)
    chosen = np.take_along_axis(expected_lv, scores.top_ids[1:].astype(np.int64), 1)
    np.testing.assert_allclose(chosen, scores.top_logprobs[1:], atol=1e-4)


def test_headway_serve_answers_as_the_model_computes_here(inputs: Path) -> None:
    ids = ids_of(inputs)
    is_scored = np.arange(len(ids)) > 0
    with serving(inputs / "teacher") as (process, url):

        async def use() -> None:
            teacher = ServedTeacher("t", TeacherServer(url=url, retries=1, retry_s=0.01))
            assert (await teacher.start()).startswith("headway:")
            for top in (0, 20):
                scores, tokens = await teacher.score(ids, is_scored, top)
                assert tokens == len(ids)
                require_equal(scores, inputs, ids, top)
            process.kill()
            process.wait()
            with pytest.raises(InfrastructureError, match=r"teacher t at .* can't be reached"):
                await teacher.score(ids, is_scored, 0)
            await teacher.close()

        asyncio.run(use())


def test_a_replica_scores_and_is_restarted(inputs: Path) -> None:
    experiment = tiny_run.experiment_of(tiny_run.write_experiment(inputs))
    path = str(inputs / "teacher" / "model")
    teacher, ids, events = TeacherConfig(path=path, devices=("cpu:0",), top_k=7), ids_of(inputs), list[str]()

    async def use() -> None:
        launcher, logs = LocalLauncher(RealClock()), inputs / "logs"
        logs.mkdir()

        def on_event(name: str, detail: str, /, **data: object) -> None:
            events.append(f"{name} {detail}")

        scorer = ReplicaTeacher("t", teacher, experiment, launcher, RealClock(), on_event, logs)
        is_scored = np.arange(len(ids)) > 0
        try:
            name = await scorer.start()
            require_equal((await scorer.score(ids, is_scored, 7))[0], inputs, ids, 7)
            (state,) = scorer.worker_states
            assert state.name == "teacher-t-0"
            (pid,) = scorer._pool.pids
            os.kill(pid, signal.SIGKILL)
            scores = await asyncio.gather(*(scorer.score(ids, is_scored, 7) for _ in range(4)))
            for score, _ in scores:
                require_equal(score, inputs, ids, 7)
            assert any("teacher-t-0" in event for event in events)
            assert name.startswith("headway:")
            with pytest.raises(InfrastructureError, match=r"teacher t: prompt: .* tokens; valid: 1 to"):
                await scorer.score(TokenIds([1] * 40), np.ones(40, np.bool_), 0)
        finally:
            await scorer.close()

    asyncio.run(use())


@contextmanager
def place(inputs: Path, where: str) -> Iterator[dict[str, Any]]:
    if where == "address":
        with serving(inputs / "teacher") as (_, url):
            yield {"address": url}
    else:
        yield {"devices": ["cpu:0"]} if where == "devices" else {}


@pytest.mark.parametrize("where", ["devices", pytest.param("address", marks=pytest.mark.slow), "trainer"])
@pytest.mark.parametrize("divergence", ["forward", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_run_learns_from_its_teacher_through_a_kill(inputs: Path, where: str, divergence: str) -> None:
    with place(inputs, where) as keys:
        top_k = {} if divergence == "sampled" else {"top_k": 6}
        config = tiny_run.write_experiment(
            inputs,
            algorithm={"teacher": "big", "policy_coefficient": 0.0},
            trainer={"learning_rate": 2e-3},
            **{"teachers.big": {"path": str(inputs / "teacher" / "model"), "divergence": divergence, **top_k, **keys}},
        )
        assert tiny_run.train(config, fault="batch-committed:3").process.returncode == -signal.SIGKILL
        command = tiny_run.train(config, "--resume")
    assert command.process.returncode == 0, command.output
    run = inputs / "run"
    tiny_run.require_whole(run, 6)
    steps = [step for step in tiny_run.steps_of(run) if step.metrics]
    if where == "trainer":
        assert all(step.teaching is None for step in steps)
    else:
        scored = [step.teaching for step in steps if step.teaching is not None]
        assert sum(statistics.rollouts for statistics in scored) >= 4 * 4 * 4
        assert all(statistics.failures == 0 for statistics in scored)
        assert sum(statistics.tokens for statistics in scored) > 0
        assert list(json.loads((run / "teachers.json").read_bytes())) == ["big"]
        require_stored(run, inputs)
    if divergence == "forward":
        losses = [step.metrics["stream_teacher_loss"] for step in steps]
        assert all(np.isfinite(losses))
        assert losses[-1] < losses[0]


def require_stored(run: Path, inputs: Path) -> None:
    """The record of every rollout has its teacher's log-probabilities."""
    model, count = load_model(inputs / "teacher" / "model"), 0
    buffer = run / "buffer.db"
    for drawn in read_history(buffer):
        rollouts = [read_member(buffer, drawn.index, member)[1] for member in range(drawn.size)]
        for rollout in [rollout for rollout in rollouts if rollout is not None and rollout.valid]:
            sampled = len(rollout.prompt_ids) + np.flatnonzero(rollout.response_mask)
            stored = read_scores({TEACHER: rollout.token_rows[TEACHER]}, sampled)
            forced = forced_logprobs(model, rollout.prompt_ids, rollout.response_ids, 1.0)
            np.testing.assert_allclose(stored.logprobs, forced[list(rollout.response_mask)], atol=1e-3)
            count += 1
    assert count

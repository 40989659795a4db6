"""Teachers that vLLM computes: by address at a real `vllm serve`, and in replicas, which run or start it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from vllm_engines import CONTEXT_TOKENS, make_engine, model_of, needs_vllm
from vllm_servers import KEY, free_port, served

from headway.config.external_models import TeacherConfig, TeacherServer
from headway.config.load import validate_experiment
from headway.generator.engines.vllm.server_client import KEY_VARIABLE, VllmServer
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.orchestrator.teachers.replicas import ReplicaTeacher
from headway.orchestrator.teachers.server import ServedTeacher
from headway.orchestrator.teachers.stage import TeacherStage
from headway.records.errors import ConfigurationError, InfrastructureError, WeightsMismatch
from headway.records.generation import PromptLogprobs, VersionSpan
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.records.tokens import TEACHER, TokenIds
from headway.runtime.clock import RealClock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import LocalLauncher
from headway.tokens.tokenizer import Tokenizer
from tests.conformance import engine as conformance
from tests.conformance.reference import forced_logprobs

pytestmark = needs_vllm
CHUNK = 64  # tokens that the server computes in a step
SERVED = ("--served-model-name", "big", "--enable-chunked-prefill", "--max-num-batched-tokens", str(CHUNK))


def make_model(folder: Path, seed: int) -> None:
    """A model with heads that vLLM computes on a CPU."""
    sizes: dict[str, Any] = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "intermediate": 48}
    initialise_model(folder / "model", ["8+3+5=11+5=16 hello"], vocabulary_size=300, seed=seed, **sizes)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy, tasks, a teacher and another model of its shape."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    tiny_run.write_inputs(tmp_path)
    for seed, name in enumerate(("teacher", "other")):
        make_model(tmp_path / name, seed)
    return tmp_path


def ids_of(count: int, vocabulary: int) -> TokenIds:
    return TokenIds(np.random.default_rng(3).integers(0, vocabulary, count).tolist())


@torch.no_grad()
def require_equal(scores: PromptLogprobs, model: Decoder, ids: TokenIds, top: int) -> None:
    """The scores are the model's own, and the first token has none."""
    logits = model.head(model.forward_packed(torch.tensor(list(ids)), [len(ids)]))
    expected_lv = torch.log_softmax(logits.float(), -1).numpy()[:-1]
    assert np.isnan(scores.logprobs[0])
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(ids), top)
    np.testing.assert_allclose(scores.logprobs[1:], expected_lv[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-expected_lv)[:, :top], atol=1e-4)
    chosen_lk = np.take_along_axis(expected_lv, scores.top_ids[1:].astype(np.int64), 1)
    np.testing.assert_allclose(chosen_lk, scores.top_logprobs[1:], atol=1e-4)


# --- by address -------------------------------------------------------------------------------------------------


def test_a_server_answers_as_the_model_computes_here(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    model = load_model(inputs / "teacher" / "model")
    ids = ids_of(3 * CHUNK + 7, model.config.vocabulary_size)
    with served(inputs / "teacher" / "model", inputs / "server.log", options=SERVED) as server:
        served_config = json.loads(VllmServer(server.address).get("/server_info?config_format=json"))["vllm_config"]
        assert served_config["scheduler_config"]["enable_chunked_prefill"]
        assert served_config["scheduler_config"]["max_num_batched_tokens"] == CHUNK

        async def use() -> None:
            settings = TeacherServer(url=server.address, api_key_env="TEACHER_KEY", retries=1, retry_s=0.01)
            teacher = ServedTeacher("t", settings)
            assert (await teacher.start()).startswith("vllm:big:")
            for top in (0, 20):
                scores, tokens = await teacher.score(ids, np.arange(len(ids)) > 0, top)
                assert tokens == len(ids)
                require_equal(scores, model, ids, top)
            with pytest.raises(
                InfrastructureError, match=r"teacher t answered HTTP 400: .*maximum context length is 320"
            ):
                await teacher.score(ids_of(400, 40), np.ones(400, np.bool_), 0)
            await teacher.close()

        asyncio.run(use())


@pytest.mark.long
def test_another_model_under_the_same_name_is_noticed(inputs: Path) -> None:
    port, teacher_path = free_port(), inputs / "teacher" / "model"
    address = {"url": f"http://127.0.0.1:{port}", "api_key_env": "TEACHER_KEY", "retries": 1, "retry_s": 0.01}
    raw = {
        "run": {"directory": str(inputs)},
        "model": {"path": str(teacher_path)},
        "tasks": {"train": [{"path": "tasks.jsonl"}]},
        "rollout": {"max_prompt_tokens": 20, "max_response_tokens": 20},
        "algorithm": {"teacher": "big"},
        "teachers": {"big": {"path": str(teacher_path), "top_k": 20, "address": address}},
    }
    experiment = validate_experiment(raw, "test")
    group = Group(
        index=0,
        task=Task(task_id="t", prompt="8+3=", source="tasks.jsonl"),
        prompt_ids=(9, 8),
        size=1,
        admitted_version=0,
        admitted_s=0.0,
    )
    rollout = Rollout(
        group=0,
        member=0,
        prompt_ids=(9, 8),
        response_ids=(7, 6, 5),
        response_logprobs=(-1.0,) * 3,
        response_mask=(True,) * 3,
        versions=(VersionSpan(version=0, tokens=3),),
        reward=1.0,
        finished_s=1.0,
    )

    async def use() -> tuple[Rollout, Rollout]:
        clock = RealClock()
        tokenizer = Tokenizer.load(str(teacher_path))
        stage = TeacherStage(experiment, tokenizer, clock, Waits(clock.now), lambda *_: pytest.fail("no devices"))
        try:
            with served(teacher_path, inputs / "first.log", port=port, options=SERVED):
                await stage.start()
                (scored,) = await stage.score(group, (rollout,))
            with served(inputs / "other" / "model", inputs / "second.log", port=port, options=SERVED):
                (failed,) = await stage.score(group, (rollout,))
        finally:
            await stage.stop()
        return scored, failed

    scored, failed = asyncio.run(use())
    assert scored.failure is None
    assert TEACHER in scored.token_rows
    assert failed.failure is not None
    assert failed.failure.infrastructure
    reason = "teacher big is another model than at the run's start: its log-probabilities of a probe differ by"
    assert reason in failed.failure.cause
    assert TEACHER not in failed.token_rows


# --- in replicas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_a_replica_scores_and_is_restarted(inputs: Path, engine: str) -> None:
    """By more likeliest tokens than vLLM returns by default, and up to the longest rollout."""
    config = tiny_run.write_experiment(
        inputs, generator={"engine": engine, "slots": 4}, model={"path": str(inputs / "teacher" / "model")}
    )
    experiment, path = tiny_run.experiment_of(config), str(inputs / "teacher" / "model")
    teacher, top, events = TeacherConfig(path=path, devices=("cpu:0",), top_k=25), 25, list[str]()
    model = load_model(path)
    longest = ids_of(experiment.max_sequence_tokens, model.config.vocabulary_size)

    async def use() -> None:
        launcher, logs = LocalLauncher(RealClock()), inputs / "logs"
        logs.mkdir()

        def on_event(name: str, detail: str, /, **data: object) -> None:
            events.append(f"{name} {detail}")

        scorer = ReplicaTeacher("t", teacher, experiment, launcher, RealClock(), on_event, logs)
        try:
            assert (await scorer.start()).startswith("headway:")
            for ids in (longest, TokenIds(longest[:2])):
                scores, tokens = await scorer.score(ids, np.arange(len(ids)) > 0, top)
                assert tokens == len(ids)
                require_equal(scores, model, ids, top)
            (pid,) = scorer._pool.pids
            os.kill(pid, signal.SIGKILL)
            outcomes = await asyncio.gather(
                *(scorer.score(longest, np.arange(len(longest)) > 0, top) for _ in range(3))
            )
            for scores, _ in outcomes:
                require_equal(scores, model, longest, top)
            assert any("teacher-t-0" in event for event in events)
            with pytest.raises(InfrastructureError, match=r"teacher t: prompt: 29 tokens; valid: 1 to 28"):
                await scorer.score(TokenIds([1] * 29), np.ones(29, np.bool_), 0)
        finally:
            await scorer.close()

    asyncio.run(use())


# --- the engine in the process ----------------------------------------------------------------------------------


def test_prompts_beside_requests_and_across_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV holds little more than one context and a step computes 7 tokens, so that prompts displace requests."""
    monkeypatch.setattr(conformance, "model_of", model_of)
    engine: Any = make_engine(slots=3, kv_capacity_tokens=128)
    ids = ids_of(CONTEXT_TOKENS - 1, conformance.VOCABULARY)
    session = conformance.Session(engine)
    session.submit(*(conformance.request(name, max_tokens=20) for name in "abc"))
    session.step(4)
    require_equal(engine.prompt_pass(ids, 5).advance(), model_of(0), ids, 5)
    for result in session.run().values():
        assert len(result.response.ids) == 20
        forced = forced_logprobs(model_of(0), (5, 6, 7), result.response.ids, 1.0)
        assert (torch.tensor(result.response.logprobs) - forced).abs().max() < 1e-3
    begun = engine.prompt_pass(ids, 20)
    engine.update_weights(weights_of(model_of(1)), 1, "keep")
    scores = begun.advance()
    assert scores.version == 1
    require_equal(scores, model_of(1), ids, 20)
    require_equal(engine.prompt_pass(TokenIds(ids[:1]), 2).advance(), model_of(1), TokenIds(ids[:1]), 2)


def test_what_vllm_cannot_compute_is_refused() -> None:
    engine: Any = make_engine()
    with pytest.raises(ConfigurationError, match=r"prompt: 96 tokens; valid: 1 to 95: .* one more is sampled"):
        engine.prompt_pass(TokenIds([1] * CONTEXT_TOKENS))
    with pytest.raises(ConfigurationError, match=r"prompt: .*prompt logprobs of 30.* max allowed: 20"):
        engine.prompt_pass(TokenIds([1, 2, 3]), 30).advance()
    with pytest.raises(ConfigurationError, match=r"there is no adapter 'other'; registered: none"):
        engine.prompt_pass(TokenIds([1, 2, 3]), 0, "other")
    prompt = engine.prompt_pass(TokenIds([1, 2, 3]))
    engine._broken = True
    with pytest.raises(WeightsMismatch, match="unknown weights"):
        prompt.advance()

"""Teachers that score finished rollouts by address: formats, faults, costs, identity, and what is stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from teacher_server import table, teacher_server

from headway.algorithms.teacher_scores import read_scores
from headway.config.load import validate_experiment
from headway.orchestrator.teachers.stage import TeacherStage, read_identities
from headway.records.errors import ConfigurationError
from headway.records.generation import VersionSpan, probe_ids
from headway.records.ledger import TeacherStatistics
from headway.records.rollout import Branch, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import CONTEXT, TEACHER, TokenIds
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits


class Codec:
    """Ids are the characters' codes."""

    vocabulary_size = 256

    def render(self, prompt: Any, template: str = "raw") -> TokenIds:
        return TokenIds([ord(character) for character in prompt])


def experiment(folder: Path, address: Any = None, **teacher: Any) -> Any:
    teacher = {"path": str(folder / "teacher"), "divergence": "forward", "top_k": 3} | teacher
    if address is not None:
        teacher["address"] = {"retries": 1, "retry_s": 0.01, "timeout_s": 5.0} | address
    raw = {
        "run": {"directory": str(folder)},
        "model": {"path": "model"},
        "tasks": {"train": [{"path": "tasks.jsonl"}]},
        "rollout": {"max_prompt_tokens": 20, "max_response_tokens": 20},
        "algorithm": {"teacher": "big"},
        "teachers": {"big": teacher},
    }
    return validate_experiment(raw, "test")


def rollout(member: int, prompt: str = "ab", response: tuple[int, ...] = (5, 9, 4), **fields: Any) -> Rollout:
    fields = {"response_mask": (True, False, True)} | fields
    return Rollout(
        group=3,
        member=member,
        prompt_ids=tuple(map(ord, prompt)),
        response_ids=response,
        response_logprobs=(-1.0,) * len(response),
        versions=(VersionSpan(version=0, tokens=len(response)),),
        reward=1.0,
        finished_s=1.0,
        **fields,
    )


def group(**task: Any) -> Group:
    fields: dict[str, Any] = {"task_id": "t", "prompt": "ab", "source": "tasks.jsonl"}
    made = Task(**fields | task)
    return Group(index=3, task=made, prompt_ids=(97, 98), size=2, admitted_version=0, admitted_s=0.0)


def in_stage(experiment: Any, use: Callable[[TeacherStage], Coroutine[Any, Any, Any]], start: bool = True) -> Any:
    async def run() -> Any:
        clock = RealClock()
        stage = TeacherStage(experiment, Codec(), clock, Waits(clock.now), lambda *_: pytest.fail("no devices"))  # pyright: ignore[reportArgumentType]
        try:
            if start:
                await stage.start()
            return await use(stage)
        finally:
            await stage.stop()

    return asyncio.run(run())


def score(experiment: Any, *rollouts: Rollout, **task: Any) -> tuple[Rollout, ...]:
    return in_stage(experiment, lambda stage: stage.score(group(**task), rollouts))


def require_scores(scored: Rollout | Branch, logprobs: np.ndarray, prompt: tuple[int, ...] | None = None) -> None:
    """The rows of the sampled tokens are the table's."""
    ids = [*(prompt or scored.prompt_ids), *scored.response_ids]
    shift = len(ids) - len(scored.prompt_ids) - len(scored.response_ids)
    first = len(scored.prompt_ids)
    sampled = first + np.flatnonzero(scored.response_mask)
    stored = read_scores(scored.token_rows, sampled)
    lengths = scored.token_rows[TEACHER].lengths.array
    assert np.flatnonzero(lengths).tolist() == sampled.tolist()
    for position, token in enumerate(sampled + shift):
        row = logprobs[ids[token - 1]]
        assert stored.logprobs[position] == pytest.approx(row[ids[token]], abs=1e-6)
        assert stored.top_ids[position].tolist() == np.argsort(-row)[:3].tolist()


@pytest.mark.parametrize("owner", ["headway", "vllm", "sglang"])
def test_rollouts_are_scored_in_every_format(tmp_path: Path, owner: str) -> None:
    branch = Branch(
        prompt_ids=(97, 98, 5),
        response_ids=(8, 8),
        response_logprobs=(-1.0, -1.0),
        response_mask=(True, True),
        versions=(VersionSpan(version=0, tokens=2),),
    )
    with teacher_server(owner=owner) as server:
        settings = experiment(tmp_path, {"url": f"{server.url}/v1", "price_prompt": 2e6})
        first, second = score(settings, rollout(0, branches=(branch,)), rollout(1, response=(7, 7, 1)))
    for scored in (first, first.branches[0], second):
        require_scores(scored, server.logprobs)
    assert first.teacher is not None
    assert (first.teacher.name, first.teacher.tokens, first.teacher.cost) == ("big", 10, 20.0)
    assert second.teacher is not None
    assert (
        second.teacher.identity == first.teacher.identity == read_identities(tmp_path / "teachers.json")["big"].digest
    )


def test_a_context_is_read_in_the_prompts_place(tmp_path: Path) -> None:
    with teacher_server() as server:
        settings = experiment(tmp_path, {"url": server.url}, context="{prompt}:{answer}{hint}")
        (scored,) = score(settings, rollout(0), answer="12", metadata={"hint": "!"})
    require_scores(scored, server.logprobs, tuple(map(ord, "ab:12!")))


def test_a_teacher_in_the_trainer_gets_its_context(tmp_path: Path) -> None:
    (scored,) = score(experiment(tmp_path, context="{answer}?"), rollout(0), answer="12")
    assert scored.token_rows[CONTEXT].take(np.array([0]))[1].tolist() == [ord(c) for c in "12?"]
    assert scored.teacher is None


@pytest.mark.parametrize(
    ("context", "task", "message"),
    [
        ("{hint}", {}, "context has {hint}, which the task lacks; valid: prompt, answer"),
        ("x" * 21, {}, "21 tokens of task t; valid: 1 to 20, rollout.max_prompt_tokens"),
        ("x", {"messages": ({"role": "system", "content": "s"},) * 2}, "a conversation of 2 messages"),
    ],
)
def test_contexts_that_cannot_be_read_fail_without_retries(
    tmp_path: Path, context: str, task: dict[str, Any], message: str
) -> None:
    (scored,) = score(experiment(tmp_path, context=context), rollout(0), **task)
    assert scored.failure is not None
    assert not scored.failure.infrastructure
    assert message in scored.failure.cause


FAULTS = {
    "hang": "can't be reached",
    "dies": "can't be reached",
    "overloaded": "answered HTTP 503",
    "NaN": "log-probability nan; valid: finite",
    "fewer tokens": "ValueError",
    "fewer others": "2 likeliest tokens where 3 were asked for",
    "another order": "was asked for",
    "huge id": "OverflowError",
}


@pytest.mark.parametrize("owner", ["headway", "vllm", "sglang"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_infrastructure_and_named_and_one_is_retried(tmp_path: Path, owner: str, fault: str) -> None:
    with teacher_server(owner=owner) as server:
        settings = experiment(tmp_path, {"url": server.url, "timeout_s": 1.0, "price_prompt": 2e6})

        async def use(stage: TeacherStage) -> None:
            probe = len(probe_ids(0, Codec.vocabulary_size, 40))
            server.fault, server.faults = fault, 1
            (retried,) = await stage.score(group(), (rollout(0),))
            require_scores(retried, server.logprobs)
            assert retried.teacher is not None
            assert retried.teacher.tokens == 10  # read twice
            server.faults = 10**9
            (failed, left) = await stage.score(group(), (rollout(0), rollout(1, removal="pruned")))
            assert failed.failure is not None
            assert (failed.failure.infrastructure, failed.failure.boundary) == (True, "engine")
            assert failed.failure.cause.startswith("teacher big")
            assert FAULTS[fault] in failed.failure.cause
            assert TEACHER not in failed.token_rows
            assert left == rollout(1, removal="pruned")
            statistics = stage.take_statistics()
            assert statistics is not None
            assert (statistics.rollouts, statistics.failures) == (1, 1)
            # each rollout of 5 twice, the start's probe and one a group, the last twice if the fault is in probes too
            tokens = 20 + (3 if fault in ("fewer others", "huge id") else 4) * probe
            assert (statistics.tokens, statistics.cost) == (tokens, 2.0 * tokens)
            assert statistics.busy_s > 0
            assert stage.take_statistics() == TeacherStatistics()

        in_stage(settings, use)


def test_a_request_that_hangs_holds_up_no_process(tmp_path: Path) -> None:
    """Threads that are no daemons are joined when the interpreter ends."""
    with teacher_server() as server:

        async def use(stage: TeacherStage) -> None:
            server.fault = "hang"
            scoring = asyncio.create_task(stage.score(group(), (rollout(0),)))
            for _ in range(1000):
                await asyncio.sleep(0 if server.requests > 1 else 0.01)  # the first is the start's probe
            scoring.cancel()

        in_stage(experiment(tmp_path, {"url": server.url, "timeout_s": 1.0}), use)
        teachers = [thread for thread in threading.enumerate() if thread.name.startswith("teacher")]
        assert teachers
        assert all(thread.daemon for thread in teachers)


def test_another_model_after_a_restart_is_noticed(tmp_path: Path) -> None:
    with teacher_server() as server:
        settings = experiment(tmp_path, {"url": server.url})

        async def use(stage: TeacherStage) -> None:
            (scored,) = await stage.score(group(), (rollout(0),))
            assert scored.valid
            server.logprobs = table(1)
            (failed,) = await stage.score(group(), (rollout(0),))
            assert failed.failure is not None
            reason = "teacher big is another model than at the run's start: its log-probabilities of a probe differ"
            assert reason in failed.failure.cause
            assert failed.failure.infrastructure

        in_stage(settings, use)
        with pytest.raises(ConfigurationError, match=r"teacher big is another model than .*; a run keeps its teachers"):
            score(settings, rollout(0))  # also when the run is resumed
        server.logprobs, server.model = table(0), "renamed"
        with pytest.raises(
            ConfigurationError, match="the model 'headway:renamed:' where the run began with 'headway:te"
        ):
            score(settings, rollout(0))


def test_cost_above_its_limit_is_an_error(tmp_path: Path) -> None:
    with teacher_server() as server:
        settings = experiment(tmp_path, {"url": server.url, "price_prompt": 1e6, "max_cost": 38.0})

        async def use(stage: TeacherStage) -> None:
            outcomes = [(await stage.score(group(), (rollout(0),)))[0] for _ in range(2)]
            assert outcomes[0].failure is not None or outcomes[1].failure is not None
            failure = outcomes[1].failure
            assert failure is not None
            assert "has reached address.max_cost = 38" in failure.cause

        in_stage(settings, use)


@pytest.mark.parametrize(
    ("owner", "address", "message"),
    [
        ("openai", {}, "a server of 'openai', whose format isn't known; valid: headway, vllm, sglang"),
        ("vllm", {"model": "other"}, "model = 'other'; served: teacher"),
    ],
)
def test_servers_that_cannot_teach_end_the_start(tmp_path: Path, owner: str, address: Any, message: str) -> None:
    with teacher_server(owner=owner) as server, pytest.raises(ConfigurationError, match=message):
        score(experiment(tmp_path, {"url": server.url, **address}), rollout(0))


def test_a_server_that_does_not_answer_ends_the_start(tmp_path: Path) -> None:
    with teacher_server() as server:
        url = server.url
    with pytest.raises(ConfigurationError, match=r"teacher big at http://.* can't be reached"):
        score(experiment(tmp_path, {"url": url}), rollout(0))


def test_rollouts_with_scores_or_another_rule_are_left_as_they_are(tmp_path: Path) -> None:
    with teacher_server() as server:
        settings = experiment(tmp_path, {"url": server.url})

        async def use(stage: TeacherStage) -> None:
            (scored,) = await stage.score(group(), (rollout(0),))
            requests = server.requests
            assert await stage.score(group(), (scored,)) == (scored,)
            assert server.requests == requests

        in_stage(settings, use)


def test_the_file_of_identities_is_checked(tmp_path: Path) -> None:
    file = RunDirectory(tmp_path).teachers
    file.write_bytes(msgspec.json.encode({"big": {"model": 3}}))
    with pytest.raises(ConfigurationError, match=r"teachers.json is damaged"):
        read_identities(file)

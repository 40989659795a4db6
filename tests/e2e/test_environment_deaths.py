"""Workers of environments that die: what was parked goes on in another one; where none can be started, the run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from diary import digest, turns_of
from endpoint_server import chat
from environment_player import TASK, spelled, workers

from headway.config import schema
from headway.config.endpoint import EndpointConfig
from headway.generator.recording.sessions import Sessions
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import Group, Rollout
from headway.rollout.hosting.client import EnvironmentPool
from headway.rollout.makers.environment import EnvironmentRollouts, Environments
from headway.rollout.makers.turn_sampler import Resumption, TurnSampler
from headway.runtime.clock import RealClock

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

GROUP = Group(index=7, task=TASK, prompt_ids=(5,), size=1, admitted_version=0, admitted_s=0.0)
SANDBOX = {"allow_unbounded": True, "limits": {"memory_bytes": 96 << 20, "disk_bytes": 16 << 20}}


async def played(pool: EnvironmentPool, killed: list[str]) -> Rollout:
    """Of two turns and more. It is parked in the middle of its second, and its worker killed meanwhile."""
    requests: list[GenerationRequest] = []

    async def generate(request: GenerationRequest, watch: Any = None, /) -> GenerationResult:
        requests.append(request)
        ids, parked = spelled(f"answer {len(requests)}"), len(requests) == 2
        ids = [*request.partial.ids, *(ids[:-1] if parked else ids)]
        response = PartialResponse(
            ids=tuple(ids), logprobs=(-1.0,) * len(ids), versions=(VersionSpan(version=0, tokens=len(ids)),)
        )
        reason: Any = "abort" if parked else "stop"
        return GenerationResult(request_id=request.request_id, response=response, finish_reason=reason)

    async def gate(parked: PartialRollout) -> Resumption:
        assert parked.episode is not None
        assert parked.snapshot
        [client] = [client for client in pool._clients if client.episodes]
        worker = client.slot.worker
        assert worker is not None
        worker.kill("by its test")
        killed.append((await worker.died).worker)
        return "continue"

    section = schema.RolloutConfig(max_prompt_tokens=2000, max_response_tokens=4000)
    environments = Environments(conversations=Sessions(chat(), EndpointConfig(), 6000), pool=pool)
    sampler = TurnSampler(generate, chat().tokenizer, section, RealClock(), run_seed=3, resume_gate=gate)
    return await EnvironmentRollouts(environments, sampler).generate_member(GROUP, 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_parked_rollout_goes_on_in_another_worker(count: int, tmp_path: Path) -> None:
    killed: list[str] = []

    async def main() -> Rollout:
        async with workers(SANDBOX, tmp_path, name="diary:Diary", max_turns=10, workers=count) as pool:
            return await played(pool, killed)

    rollout = asyncio.run(main())
    assert len(killed) == 1
    assert (rollout.failure, rollout.attempts, rollout.resumes) == (None, 2, 1)
    verdict, turns = rollout.verdict, turns_of("7-0")
    assert (verdict["resumed"], verdict["parked"], rollout.turns) == (1, [1], turns)
    said = ["answer 1", "answer 2answer 3", *(f"answer {number}" for number in range(4, turns + 2))]
    assert [line.split()[1] for line in verdict["lines"]] == [digest(text) for text in said], "and its files had them"
    assert len(set(verdict["drawn"])) == turns


@pytest.mark.slow
def test_a_run_ends_when_no_worker_can_be_started(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    name, parameters = "only_once:OnlyOnce", {"mark": str(tmp_path / "mark")}
    config = tiny_run.write_experiment(
        tmp_path,
        model={"path": str(tmp_path / "model"), "template": "chat"},
        environment={"name": name, "parameters": parameters},
        rollout={"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 200},
    )
    command = tiny_run.train(config, limit_s=200)
    assert command.process.returncode == 3, command.output
    assert "gave up after 5 starts" in command.output
    assert "there was one already" in command.output
    assert tiny_run.events_of(command.run, "environment_restart_failed")
    tiny_run.audited(command.run)
    tiny_run.require_nothing_left(command)

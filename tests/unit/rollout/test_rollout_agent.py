"""Agents' rollouts on the virtual clock: keys, calls side by side, parkings, rewards, bad ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import chat

from headway.config import schema
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.generator.fake import FakeGenerator
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.sessions import Session, Sessions
from headway.records.conversations import RequestRefused
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Rollout, Verdict
from headway.records.task import Task
from headway.rollout.hosting.agents.processes import Exit
from headway.rollout.makers.agent import AgentRollouts, Agents, agent_task, fill_command, variables
from headway.rollout.makers.turn_sampler import BeginGate, TurnSampler
from headway.rollout.verification.verdicts import apply_verdict
from headway.runtime.clock import Clock, run_virtual
from headway.tokens.messages import normal_messages

SETTINGS = schema.RolloutConfig(max_prompt_tokens=100, max_response_tokens=100, retries=2, timeout_s=50.0)
GROUP = Group(
    index=7,
    task=Task(task_id="t", prompt="1+2?", answer="3", verifier="exact", metadata={"level": 1}),
    prompt_ids=(5,) * 500,  # no agent sees it
    size=2,
    admitted_version=0,
    admitted_s=0.0,
)
Agent = Callable[[Session, Clock], Awaitable[Exit]]


@dataclass
class FakeProcesses:
    """Runs agents as coroutines that make calls."""

    agent: Agent
    sessions: Sessions
    clock: Clock
    folder: Path
    keys: list[str] = field(default_factory=list)
    told: list[tuple[Mapping[str, str], tuple[str, str]]] = field(default_factory=list)  # environment, where to reward
    running: int = 0

    def scratch(self, name: str) -> Path:
        return self.folder

    async def run(
        self,
        name: str,
        argv: Sequence[str],
        task: Mapping[str, Any],
        env: Mapping[str, str],
        scratch: Path,
        reward: tuple[str, str] = ("", ""),
    ) -> Exit:
        self.keys.append(env["OPENAI_API_KEY"])
        self.told.append((env, reward))
        self.running += 1
        try:
            return await self.agent(self.sessions.session(env["OPENAI_API_KEY"]), self.clock)
        finally:
            self.running -= 1


@dataclass
class Played:
    rollout: Rollout
    processes: FakeProcesses
    requests: list[GenerationRequest]
    duration_s: float


def ask(session: Session, text: str, **options: Any) -> Any:
    return session.call(CallRequest(messages=normal_messages([{"role": "user", "content": text}]), **options))


async def answered(session: Session, text: str, **options: Any) -> list[Any]:
    answering = ask(session, text, **options)
    leave = answering.join(lambda: None)
    try:
        await asyncio.wait((answering.task,))
    finally:
        leave()
    if answering.error is not None:
        raise answering.error
    answering.note_received()
    return list(answering.call.turns)


def play(
    agent: Agent,
    folder: Path,
    *,
    meanwhile: Callable[[AgentRollouts, Clock], Awaitable[Any]] | None = None,
    error_of: Callable[[GenerationRequest], str] | None = None,
    refusal_of: Callable[[GenerationRequest], str] | None = None,
    member: int = 1,
    environment: Mapping[str, Any] = {},
    gate: Callable[[PartialRollout], Awaitable[Any]] | None = None,
    max_resumes: int | None = None,
    begin: Callable[[Clock], BeginGate] | None = None,
    **settings: Any,
) -> Played:
    async def main(clock: Clock) -> Played:
        generator = FakeGenerator(clock, token_s=1.0, length_of=lambda request: 4, error_of=error_of)
        requests: list[GenerationRequest] = []

        def generate(request: GenerationRequest, watch: Any = None, /) -> Any:
            requests.append(request)
            return refused(request) if refusal_of is not None else generator.generate(request, watch)

        async def refused(request: GenerationRequest) -> GenerationResult:
            assert refusal_of is not None
            nothing, why = PartialResponse(), refusal_of(request)
            return GenerationResult(
                request_id=request.request_id, response=nothing, finish_reason="error", error=why, refused=True
            )

        sessions = Sessions(chat(), EndpointConfig(call_timeout_s=1000), 200)
        processes = FakeProcesses(agent, sessions, clock, folder)
        agents = Agents(
            environment=EnvironmentConfig(name="agent", agent="mine:agent", **environment),
            endpoint=EndpointConfig(),
            conversations=sessions,
            processes=processes,
        )
        sampler = TurnSampler(
            generate, chat().tokenizer, SETTINGS.model_copy(update=settings), clock, run_seed=3,
            requests=generator, resume_gate=gate, max_resumes=max_resumes,
            begin_gate=None if begin is None else begin(clock),
        )  # fmt: skip
        rollouts = AgentRollouts(agents, sampler)
        other = None if meanwhile is None else asyncio.create_task(meanwhile(rollouts, clock))  # type: ignore[arg-type]
        rollout = await rollouts.generate_member(GROUP, member)
        if other is not None:
            await other
        assert len(sessions) == processes.running == 0
        return Played(rollout, processes, requests, clock.now())

    return run_virtual(main)


async def twice(session: Session, clock: Clock) -> Exit:
    await answered(session, "a")
    await clock.sleep(10)  # a tool
    await answered(session, "b")
    return Exit(code=0)


def test_an_agents_calls_are_its_rollout(tmp_path: Path) -> None:
    played = play(twice, tmp_path)
    rollout = played.rollout
    assert (rollout.failure, rollout.calls, rollout.turns, len(rollout.branches)) == (None, 2, 2, 1)
    assert (rollout.rollout_id, rollout.opened_s, rollout.finished_s) == ("7-1", 0.0, 0.0)
    assert rollout.environment_s == pytest.approx(10)
    assert rollout.generated_s == played.duration_s == pytest.approx(18)
    assert [request.priority for request in played.requests] == [7, 7]
    assert len({request.sampling.seed for request in played.requests}) == 2
    assert {request.prompt_ids for request in played.requests} == {rollout.prompt_ids, rollout.branches[0].prompt_ids}
    assert rollout.judged_ids == rollout.response_ids
    again = play(twice, tmp_path)
    assert [r.sampling.seed for r in again.requests] == [r.sampling.seed for r in played.requests]
    assert again.processes.keys != played.processes.keys


def test_the_experiments_sampling_holds_and_the_clients_stop_strings(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await answered(session, "a", stop=("x",), max_tokens=9)
        return Exit(code=0)

    [request] = play(agent, tmp_path, temperature=0.7).requests
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.max_tokens) == (0.7, ("x",), 9)


def test_calls_run_side_by_side(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await asyncio.gather(*(answered(session, text, choices=2) for text in "abc"))
        return Exit(code=0)

    played = play(agent, tmp_path)
    assert (played.rollout.turns, played.duration_s) == (6, pytest.approx(4))
    assert len({request.request_id for request in played.requests}) == 6
    assert played.rollout.environment_s == 0


def test_all_calls_of_a_member_are_parked_as_one(tmp_path: Path) -> None:
    parked: list[PartialRollout] = []
    opened = asyncio.Event()

    async def gate(one: PartialRollout) -> str:
        parked.append(one)
        await opened.wait()
        return "continue"

    async def agent(session: Session, clock: Clock) -> Exit:
        await asyncio.gather(*(answered(session, text) for text in "ab"))
        return Exit(code=0)

    async def meanwhile(rollouts: AgentRollouts, clock: Clock) -> None:
        await clock.sleep(2.5)
        assert rollouts.reached(7, 1) == 4
        rollouts.stop(7, 1, "park")
        await clock.sleep(5)
        opened.set()

    played = play(agent, tmp_path, meanwhile=meanwhile, gate=gate)
    assert (len(parked), played.rollout.resumes, played.rollout.turns) == (1, 2, 2)
    assert [len(request.partial.ids) for request in played.requests] == [0, 0, 2, 2]
    assert played.duration_s == pytest.approx(7.5 + 2)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_call_waits_until_the_engine_takes_requests(stopped: bool, tmp_path: Path) -> None:
    def begin(clock: Clock) -> BeginGate:
        return lambda group: clock.sleep(30 - clock.now()) if group == 7 and 10 < clock.now() < 30 else None

    why = Failure(boundary="engine", cause="group timeout", infrastructure=True)

    async def meanwhile(rollouts: AgentRollouts, clock: Clock) -> None:
        await clock.sleep(20)
        rollouts.stop(7, 1, why if stopped else "park")  # it has nothing to park

    played = play(twice, tmp_path, begin=begin, meanwhile=meanwhile)
    assert played.duration_s == pytest.approx(20 if stopped else 30 + 4)
    assert (played.rollout.failure, played.rollout.calls) == ((why, 1) if stopped else (None, 2))
    assert played.rollout.resumes == 0
    assert len(played.requests) == (1 if stopped else 2)


def test_a_rollout_is_parked_no_more_often_than_it_may_be(tmp_path: Path) -> None:
    parked: list[PartialRollout] = []

    async def gate(one: PartialRollout) -> str:
        parked.append(one)
        return "continue"

    async def meanwhile(rollouts: AgentRollouts, clock: Clock) -> None:
        for _ in range(2):  # in the first call, in the second
            await clock.sleep(13)
            rollouts.stop(7, 1, "park")

    async def agent(session: Session, clock: Clock) -> Exit:
        await clock.sleep(10)
        return await twice(session, clock)

    assert play(agent, tmp_path, meanwhile=meanwhile, gate=gate, max_resumes=1).rollout.resumes == len(parked) == 1


def test_a_member_whose_clients_left_is_parked_no_longer(tmp_path: Path) -> None:
    at_the_gate: list[str] = []

    async def gate(one: PartialRollout) -> str:
        at_the_gate.append("came")
        try:
            await asyncio.Event().wait()
        finally:
            at_the_gate.append("left")
        return "continue"

    async def agent(session: Session, clock: Clock) -> Exit:
        leave = ask(session, "a").join(lambda: None)
        await clock.sleep(3)
        leave()
        await clock.sleep(1)
        assert at_the_gate == ["came", "left"]
        await answered(session, "b")
        return Exit(code=0)

    async def meanwhile(rollouts: AgentRollouts, clock: Clock) -> None:
        await clock.sleep(2)
        rollouts.stop(7, 1, "park")

    assert play(agent, tmp_path, meanwhile=meanwhile, gate=gate).rollout.failure is None


def test_an_environment_that_is_too_old_when_it_is_resumed_begins_anew(tmp_path: Path) -> None:
    async def gate(one: PartialRollout) -> str:
        return "restart"

    async def meanwhile(rollouts: AgentRollouts, clock: Clock) -> None:
        await clock.sleep(16)  # in its second call
        rollouts.stop(7, 1, "park")

    played = play(twice, tmp_path, meanwhile=meanwhile, gate=gate)
    assert (len(played.processes.keys), played.rollout.failure, played.rollout.calls) == (2, None, 2)


def test_a_posted_reward_is_the_rollouts_and_no_verifier_is_asked(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await answered(session, "a")
        session.post_reward(0.5, solved=True)
        return Exit(code=0)

    rollout = play(agent, tmp_path).rollout
    assert (rollout.reward, rollout.solved, rollout.finished_s) == (0.5, True, rollout.generated_s)


@pytest.mark.parametrize("posts", [False, True])
def test_what_a_model_runs_has_no_key_to_the_reward(posts: bool, tmp_path: Path) -> None:
    """Unless the environment asks for it: commands inherit its environment."""
    [(env, (url, key))] = play(twice, tmp_path, environment={"posts_reward": posts}).processes.told
    assert url.endswith("/v1/rollouts/7-1/reward")
    assert (key in env.values(), env.get("HEADWAY_REWARD_KEY") == key, "HEADWAY_REWARD_URL" in env) == (posts,) * 3
    assert key != env["OPENAI_API_KEY"]


def test_turn_rewards_are_refused_where_turns_have_no_order(tmp_path: Path) -> None:
    rollout = play(twice, tmp_path).rollout
    judged = apply_verdict(rollout, Verdict(reward=1.0, solved=True, turn_rewards=(1.0, 0.0)), 20.0)
    assert judged.failure is not None
    assert "branches" in judged.failure.cause


def test_an_agent_that_calls_nothing_fails(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        return Exit(code=0)

    failure = play(agent, tmp_path).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("environment", False)
    assert "no call that was answered" in failure.cause


@pytest.mark.parametrize(
    ("exit", "says", "attempts"),
    [
        (Exit(code=1, tail="Traceback\nValueError: no\n"), "exit code 1 (ValueError: no)", 1),
        (Exit(code=75), "exit code 75", 3),
        (Exit(code=0, signal=9), "killed by signal 9", 3),
        (Exit(code=1, error="fork: no memory"), "fork: no memory", 3),
    ],
)
def test_bad_ends(exit: Exit, says: str, attempts: int, tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await answered(session, "a")
        return exit

    played = play(agent, tmp_path)
    assert played.rollout.failure is not None
    assert says in played.rollout.failure.cause
    assert played.rollout.failure.infrastructure == (attempts > 1)
    assert len(set(played.processes.keys)) == attempts
    assert (played.rollout.response_tokens, played.rollout.finish_reason) == (4, "error")
    if attempts == 1:
        kept = play(agent, tmp_path, environment={"failed_exit": "verify"}).rollout
        assert (kept.failure, kept.finish_reason) == (None, "stop")


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("answered_before", [False, True])
def test_an_engine_that_fails_is_infrastructure_whatever_the_agent_makes_of_it(
    code: int, answered_before: bool, tmp_path: Path
) -> None:
    calls = itertools.count(0 if answered_before else 1)

    async def agent(session: Session, clock: Clock) -> Exit:
        try:
            await answered(session, "a")
            await answered(session, "b")
        except Exception:
            return Exit(code=code)
        return Exit(code=0)

    played = play(agent, tmp_path, error_of=lambda request: "no device" if next(calls) else "", retries=1)
    failure = played.rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure, failure.cause) == ("engine", True, "no device")


def test_what_the_engine_refuses_is_the_agents_own_fault(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        with pytest.raises(RequestRefused, match="too long") as refused:
            await answered(session, "a")
        assert refused.value.param == "messages"
        return Exit(code=1)

    played = play(agent, tmp_path, refusal_of=lambda request: "too long")
    assert played.rollout.failure is not None
    assert (played.rollout.failure.boundary, played.rollout.failure.infrastructure) == ("environment", False)
    assert "exit code 1" in played.rollout.failure.cause
    assert len(played.requests) == 1


def test_a_rollouts_calls_are_a_session_of_its_own(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await asyncio.gather(answered(session, "a", choices=2), answered(session, "b"))
        return Exit(code=0)

    mine, other = (play(agent, tmp_path, member=member).requests for member in (0, 1))
    assert (len(mine), {request.session for request in mine}) == (3, {"7-0"})
    assert {request.session for request in other} == {"7-1"}


def test_time_limits_and_stops_end_its_processes(tmp_path: Path) -> None:
    async def agent(session: Session, clock: Clock) -> Exit:
        await answered(session, "a")
        ask(session, "b").join(lambda: None)
        await clock.sleep(1000)
        return Exit(code=0)

    played = play(agent, tmp_path)
    assert played.rollout.failure is not None
    assert (played.rollout.failure.boundary, played.duration_s) == ("engine", pytest.approx(50))
    why = Failure(boundary="engine", cause="group timeout", infrastructure=True)

    async def stop(rollouts: AgentRollouts, clock: Clock) -> None:
        await clock.sleep(6)
        rollouts.stop(7, 1, why)

    played = play(agent, tmp_path, meanwhile=stop)
    assert played.rollout.failure is why
    assert (played.duration_s, played.rollout.calls) == (pytest.approx(6), 1)
    assert played.rollout.abandoned_tokens == 2


def test_what_an_agent_is_told(tmp_path: Path) -> None:
    task = GROUP.task
    told = {"task_id": "t", "prompt": "1+2?", "messages": [], "metadata": {}}
    assert agent_task(task, ()) == told
    assert agent_task(task, ("level", "other")) == {**told, "metadata": {"level": 1}}
    assert agent_task(task, ("answer",)) == {**told, "answer": "3"}
    argv = fill_command(
        ["python", "-m", "x", "{prompt}", "cd {scratch}", "{other}", "{rollout}"], task, "7-1", tmp_path
    )
    assert argv[1:] == ["-m", "x", "1+2?", f"cd {tmp_path}", "{other}", "7-1"]
    sessions = Sessions(chat(), EndpointConfig(), 200)
    sessions.address = "http://127.0.0.1:8000"
    environment = EnvironmentConfig(name="agent", agent=("x",), variables={"MINE": "1", "OPENAI_API_BASE": "none"})
    agents = Agents(environment=environment, endpoint=EndpointConfig(), conversations=sessions, processes=None)  # type: ignore[arg-type]
    found = variables(agents, "7-1", "hw-key", tmp_path)
    assert (found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]) == ("http://127.0.0.1:8000/v1", "hw-key")
    assert (found["MINE"], found["OPENAI_API_BASE"]) == ("1", "none")

"""Outside workers' rollouts on the virtual clock: leases, expiry, kept finishes, members that nobody leases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from endpoint_server import chat

from headway.config import schema
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.generator.fake import FakeGenerator
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.sessions import Sessions
from headway.records.conversations import RequestRefused
from headway.records.environment import PartialRollout
from headway.records.errors import StorageFailed
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Rollout, Verdict
from headway.records.task import Task
from headway.records.tokens import decoder, encoder
from headway.rollout.leases import LeaseRefused
from headway.rollout.makers.outside_workers import Finish, LeaseManager, RemoteAttempt, RemoteHost, RemoteRollouts
from headway.rollout.makers.turn_sampler import Resumption, TurnSampler
from headway.rollout.verification.verdicts import apply_verdict
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.stalls.waits import Waits
from headway.tokens.messages import normal_messages

SETTINGS = schema.RolloutConfig(max_prompt_tokens=100, max_response_tokens=100, retries=2, timeout_s=50.0)
GROUP = Group(
    index=7,
    task=Task(task_id="t", prompt="1+2?", answer="3"),
    prompt_ids=(5,) * 20,
    size=2,
    admitted_version=0,
    admitted_s=0.0,
)
LEASE_S = 10.0


@dataclass
class Service:
    """A run's side of outside workers, its books a list."""

    clock: Clock
    sessions: Sessions
    lease_manager: LeaseManager
    rollouts: RemoteRollouts
    waits: Waits
    kept: list[PartialRollout] = field(default_factory=list)

    async def lease(self, wait_s: float = 0.0) -> RemoteAttempt | None:
        return await self.lease_manager.lease(wait_s, asyncio.get_running_loop().create_future())

    async def leased(self, wait_s: float = 5.0) -> RemoteAttempt:
        attempt = await self.lease(wait_s)
        assert attempt is not None
        return attempt

    async def ask(self, attempt: RemoteAttempt, text: str = "1+2?") -> None:
        session = self.sessions.session(attempt.conversation.key)
        call = session.call(CallRequest(messages=normal_messages([{"role": "user", "content": text}])))
        await call.wait()
        if call.error is not None:
            raise call.error
        call.note_received()


Worker = Callable[[Service], Awaitable[Any]]


def play(
    worker: Worker,
    *,
    parked: PartialRollout | None = None,
    token_s: float = 0.1,
    cancel_s: float = 0.0,
    error: str = "",
    **settings: Any,
) -> tuple[Rollout, Service]:
    """The rollout of member 1, with ``worker`` beside it; a cancelled request takes ``cancel_s`` to end."""

    async def main(clock: Clock) -> tuple[Rollout, Service]:
        generator = FakeGenerator(clock, token_s=token_s, length_of=lambda request: 4, error_of=lambda request: error)
        sessions = Sessions(chat(), EndpointConfig(call_timeout_s=1000), 200)
        waits = Waits(clock.now)
        lease_manager = LeaseManager(LEASE_S, clock, waits)
        kept: list[PartialRollout] = []

        async def generate(request: GenerationRequest, watch: Any = None, /) -> GenerationResult:
            try:
                return await generator.generate(request, watch)
            except asyncio.CancelledError:
                await clock.sleep(cancel_s)
                raise

        async def gate(parked: PartialRollout) -> Resumption:
            kept.append(parked)
            return "continue"

        sampler = TurnSampler(
            generate, chat().tokenizer, SETTINGS.model_copy(update=settings), clock, run_seed=3,
            requests=generator, resume_gate=gate,
        )  # fmt: skip
        host = RemoteHost(
            environment=EnvironmentConfig(name="remote"),
            endpoint=EndpointConfig(),
            conversations=sessions,
            lease_manager=lease_manager,
        )
        rollouts = RemoteRollouts(host, sampler, kept.append)
        service = Service(clock, sessions, lease_manager, rollouts, waits, kept)
        working = asyncio.create_task(worker(service), name="worker")  # type: ignore[arg-type]
        rollout = await rollouts.generate_member(GROUP, 1, parked)
        await working
        assert len(sessions) == lease_manager.book.offered == lease_manager.book.leased == 0
        assert not waits.open()
        return rollout, service

    return run_virtual(main, limit_s=1000.0)


async def finishes(service: Service) -> None:
    attempt = await service.leased()
    await service.ask(attempt)
    said = Finish(reward=0.5, metadata={"worker": "a"}, extra={"notes": [1]})
    assert service.lease_manager.finish(attempt.key, attempt.number, said)
    assert not service.lease_manager.finish(attempt.key, attempt.number, said)  # a repetition
    with pytest.raises(LeaseRefused, match="finished before"):
        service.lease_manager.finish(attempt.key, attempt.number, Finish(reward=1.0))


def test_finished_member_is_its_recorded_conversation_with_the_workers_reward() -> None:
    rollout, service = play(finishes)
    assert (rollout.reward, rollout.solved, rollout.calls, rollout.attempts) == (0.5, False, 1, 1)
    assert len(rollout.response_ids) == 4
    assert rollout.finished_s > 0
    assert rollout.verdict["finish"] == {
        "reward": 0.5, "solved": None, "metadata": {"worker": "a"}, "extra": {"notes": [1]}
    }  # fmt: skip
    leased, finished = service.kept
    assert (leased.attempts, leased.finished) == (1, None)
    assert finished.finished == rollout
    assert finished.first_version == rollout.first_version


def test_finished_member_is_taken_from_the_books_after_a_restart() -> None:
    rollout, service = play(finishes)
    stored = decoder(PartialRollout).decode(encoder().encode(service.kept[-1]))

    async def finds_nothing(again: Service) -> None:
        assert await again.lease() is None

    again, resumed = play(finds_nothing, parked=stored)
    assert again == rollout
    assert resumed.kept == []


def test_unfinished_member_is_offered_again_after_a_restart() -> None:
    parked = PartialRollout(group=7, member=1, response=PartialResponse(), resumes=0, attempts=4)

    async def worker(service: Service) -> None:
        attempt = await service.leased()
        assert attempt.number == 5
        with pytest.raises(LeaseRefused, match="attempt 4 has ended: withdrawn, the process of the run"):
            service.lease_manager.finish(attempt.key, 4, Finish(reward=1.0))
        await service.ask(attempt)
        service.lease_manager.finish(attempt.key, 5, Finish(reward=1.0))

    rollout, _ = play(worker, parked=parked)
    assert (rollout.attempts, rollout.reward, rollout.solved) == (5, 1.0, True)


def test_expired_lease_is_offered_again_and_its_late_finish_refused() -> None:
    async def worker(service: Service) -> None:
        first = await service.leased()
        await service.ask(first)
        asked_s = service.clock.now()
        second = await service.leased(wait_s=50.0)
        assert second.number == 2
        assert LEASE_S <= service.clock.now() - asked_s < LEASE_S + 2
        with pytest.raises(LeaseRefused, match=r"attempt 1 has ended: expired.*attempt 2 is leased"):
            service.lease_manager.finish(first.key, 1, Finish(reward=1.0))
        with pytest.raises(RequestRefused, match="has ended"):
            service.sessions.session(first.conversation.key)
        await service.ask(second)
        service.lease_manager.finish(second.key, 2, Finish(reward=0.0))

    rollout, service = play(worker)
    assert (rollout.attempts, rollout.reward, rollout.calls) == (2, 0.0, 1)
    assert service.lease_manager.book.counts["expired"] == 1


def test_renewals_and_open_model_calls_hold_a_lease() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)  # 4 tokens of 8 s: three leases long
        for _ in range(3):
            await service.clock.sleep(LEASE_S - 1)
            service.lease_manager.renew(attempt.key, attempt.number)
        service.lease_manager.finish(attempt.key, attempt.number, Finish(reward=1.0))

    rollout, _ = play(worker, token_s=8.0, timeout_s=1000.0)
    assert (rollout.attempts, rollout.failure) == (1, None)


def test_attempts_end_failed_after_the_retries() -> None:
    async def worker(service: Service) -> None:
        for number in (1, 2, 3):
            attempt = await service.leased(wait_s=20.0)
            assert attempt.number == number
            service.lease_manager.fail(attempt.key, number, "no disk", infrastructure=True)

    rollout, _ = play(worker)
    assert rollout.attempts == 3
    assert rollout.failure == Failure(
        boundary="environment", cause="its worker abandoned it: no disk", infrastructure=True
    )


def test_failure_that_is_the_policys_is_not_retried() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        service.lease_manager.fail(attempt.key, 1, "it deleted everything", infrastructure=False)

    rollout, _ = play(worker)
    assert (rollout.attempts, rollout.failure is not None) == (1, True)


def test_text_without_a_recorded_call_is_refused_and_the_lease_goes_on() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        with pytest.raises(LeaseRefused, match="no answered model call") as refusal:
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        assert refusal.value.code == "session_not_recorded"
        await service.ask(attempt)
        service.lease_manager.finish(attempt.key, 1, Finish())

    rollout, _ = play(worker)
    assert (rollout.failure, rollout.finished_s) == (None, 0.0)  # without a reward the run's verifier scores it


def test_member_whose_last_call_the_generator_failed_is_not_finished() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        with pytest.raises(Exception, match="broken"):
            await service.ask(attempt)
        with pytest.raises(LeaseRefused, match="the generator failed") as refusal:
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        assert refusal.value.code == "attempt_failed"

    rollout, _ = play(worker, error="broken")
    assert rollout.failure is not None
    assert rollout.failure.boundary == "engine"


def test_time_limit_counts_from_the_lease() -> None:
    async def worker(service: Service) -> None:
        await service.clock.sleep(300.0)
        attempt = await service.leased()
        for _ in range(9):
            await service.clock.sleep(LEASE_S / 2)
            service.lease_manager.renew(attempt.key, 1)
        await service.clock.sleep(LEASE_S / 2 + 1)
        with pytest.raises(LeaseRefused, match=r"not finished after rollout.timeout_s"):
            service.lease_manager.renew(attempt.key, 1)

    rollout, _ = play(worker)
    assert rollout.failure is not None
    assert rollout.generated_s == pytest.approx(350.0)


def test_stopped_member_is_not_finished_any_more() -> None:
    why = Failure(boundary="engine", cause="its group has ended", infrastructure=True)

    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)
        service.rollouts.stop(7, 1, why)
        with pytest.raises(LeaseRefused, match="has stopped"):
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        await service.clock.sleep(1.0)
        with pytest.raises(LeaseRefused, match="attempt 1 has ended: withdrawn, its group has ended"):
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))

    rollout, service = play(worker)
    assert rollout.failure == why
    assert [partial.finished for partial in service.kept] == [None]


def test_finish_that_was_answered_outlives_a_stop() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)
        service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        service.rollouts.stop(7, 1, Failure(boundary="engine", cause="late", infrastructure=True))

    rollout, service = play(worker)
    assert rollout == service.kept[-1].finished
    assert rollout.failure is None


def test_unleased_member_can_be_stopped() -> None:
    why = Failure(boundary="engine", cause="its group has ended", infrastructure=True)

    async def worker(service: Service) -> None:
        await service.clock.sleep(1.0)
        service.rollouts.stop(7, 1, why)

    rollout, _ = play(worker)
    assert rollout.failure == why


def test_wait_is_open_while_members_are_offered_and_no_worker_has_one() -> None:
    async def worker(service: Service) -> None:
        await service.clock.sleep(100.0)
        (wait,) = service.waits.open()
        assert (wait.owner, wait.kind, wait.since_s) == ("outside workers", "a lease", 0.0)
        attempt = await service.leased()
        assert service.waits.open() == []
        await service.ask(attempt)
        service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))

    play(worker)


def test_worker_that_has_left_gets_no_lease() -> None:
    async def worker(service: Service) -> None:
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        assert await service.lease_manager.lease(5.0, gone) is None
        await finishes(service)

    rollout, _ = play(worker)
    assert rollout.attempts == 1


def test_evaluations_are_leased_under_names_of_their_own_and_not_kept() -> None:
    async def worker(service: Service) -> None:
        evaluating = service.rollouts.for_evaluation("evaluation-test-")
        for number in (1, 2):  # the same task again, at a later step: a later attempt
            member = asyncio.create_task(evaluating.generate_member(GROUP, 0))
            await asyncio.sleep(0)
            attempts = [await service.leased() for _ in range(2)] if number == 1 else [await service.leased()]
            for attempt in attempts:
                if attempt.key == (f"evaluation-test-7-{service.lease_manager.process}", 0):
                    assert attempt.number == number
                    await service.ask(attempt)
                    service.lease_manager.finish(attempt.key, number, Finish(reward=1.0))
                else:
                    trained = attempt
            assert (await member).reward == 1.0
        await service.ask(trained)
        service.lease_manager.finish(trained.key, trained.number, Finish(reward=0.0))

    rollout, service = play(worker)
    assert rollout.reward == 0.0
    assert {(partial.group, partial.member) for partial in service.kept} == {(7, 1)}


def test_parked_model_call_keeps_the_number_of_its_attempt() -> None:
    """A resumed run goes on from what was parked: no number is given to a second worker."""

    async def worker(service: Service) -> None:
        attempt = await service.leased()
        asking = asyncio.create_task(service.ask(attempt))
        await service.clock.sleep(0.15)
        service.rollouts.stop(7, 1, "park")
        await asking
        assert [one.attempts for one in service.kept] == [1, 1]
        service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))

    rollout, _ = play(worker)
    assert (rollout.resumes, rollout.reward) == (1, 1.0)


@pytest.mark.parametrize("turns", range(12))
def test_call_that_is_parked_as_its_member_finishes_takes_no_finish_out_of_the_books(turns: int) -> None:
    """``turns``: of the event loop, between the two."""

    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)
        asking = asyncio.create_task(service.ask(attempt, "2+1?"))
        await service.clock.sleep(0.15)
        service.rollouts.stop(7, 1, "park")
        for _ in range(turns):
            await asyncio.sleep(0)
        service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        with pytest.raises(RequestRefused):
            await asking

    rollout, service = play(worker)
    assert service.kept[-1].finished == rollout


def test_evaluations_of_two_processes_have_different_names() -> None:
    keys: list[Any] = []

    async def worker(service: Service) -> None:
        evaluating = asyncio.create_task(service.rollouts.for_evaluation("evaluation-test-").generate_member(GROUP, 0))
        await asyncio.sleep(0)
        for _ in range(2):
            attempt = await service.leased()
            await service.ask(attempt)
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
            keys.append(attempt.key)
        await evaluating

    play(worker)
    play(worker)
    assert len(set(keys)) == 3  # a trained group has the same name in all


def test_late_end_of_a_former_attempts_call_takes_nothing_from_the_next_lease() -> None:
    async def worker(service: Service) -> None:
        first = await service.leased()
        asking = asyncio.create_task(service.ask(first))
        await service.clock.sleep(1.0)
        service.lease_manager.fail(first.key, 1, "no disk", infrastructure=True)
        second = await service.leased()
        asks = [asyncio.create_task(service.ask(second))]  # 4 tokens of 8 s: three leases long
        await service.clock.sleep(20.0)  # the first attempt's call has ended
        asks.append(asyncio.create_task(service.ask(second, "2+1?")))
        await asyncio.gather(*asks)
        service.lease_manager.finish(second.key, 2, Finish(reward=1.0))
        with pytest.raises(RequestRefused):
            await asking

    rollout, service = play(worker, token_s=8.0, cancel_s=5.0, timeout_s=1000.0)
    assert (rollout.attempts, rollout.failure) == (2, None)
    assert service.lease_manager.book.counts["expired"] == 0


def test_finish_that_could_not_be_committed_may_be_repeated() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)
        keep = service.rollouts.keep

        def full(parked: PartialRollout) -> None:
            raise StorageFailed("no space left")

        service.rollouts.keep = full
        with pytest.raises(StorageFailed):
            service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))
        service.rollouts.keep = keep
        assert service.lease_manager.finish(attempt.key, 1, Finish(reward=1.0))

    rollout, service = play(worker)
    assert rollout == service.kept[-1].finished


def test_what_a_worker_says_stands_beside_the_verdict_of_the_runs_verifier() -> None:
    async def worker(service: Service) -> None:
        attempt = await service.leased()
        await service.ask(attempt)
        service.lease_manager.finish(attempt.key, 1, Finish(metadata={"worker": "a"}))

    rollout, _ = play(worker)
    judged = apply_verdict(rollout, Verdict(reward=1.0, solved=True, detail={"grade": 2}), 9.0)
    assert judged.verdict == {**rollout.verdict, "grade": 2}
    assert judged.verdict["finish"]["metadata"] == {"worker": "a"}

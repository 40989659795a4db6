"""The life of a single-turn rollout under a virtual clock: parked, failed, retried, timed out, verified."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from single_turn_play import END_OF_TURN, EOS, Engine, Letters, answer, finish, group, play, response

from headway.config import schema
from headway.generator.fake import FakeGenerator
from headway.records.clients import Watch
from headway.records.environment import PartialRollout
from headway.records.errors import WorkerDied
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import CallTimes, Failure, Pruned, Rollout, Verdict
from headway.records.tokens import EXPERTS, KEPT, ExpertRouting, TokenRows
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import ModelCall, TurnSampler
from headway.rollout.seeds import rollout_seed
from headway.rollout.verification.verdicts import apply_verdict
from headway.runtime.clock import Clock, run_virtual

GOLDEN_SEED = 9044811311333822937


def test_a_finished_response_becomes_a_rollout():
    done = response("hi", (7, 2), (8, 1), eos=True)
    rollout, engine = play(finish(done, reprefills=2), a_group=group(admitted_s=-3.0))
    assert rollout == Rollout(
        group=5,
        member=1,
        prompt_ids=(65, 66, 67),
        response_ids=done.ids,
        response_logprobs=done.logprobs,
        response_mask=(True, True, True),
        versions=done.versions,
        finish_reason="stop",
        opened_s=-3.0,
        first_token_s=1.0,
        generated_s=1.0,
        reprefills=2,
        call_times=(CallTimes(start_s=0.0, first_token_s=1.0, end_s=1.0, tokens=3),),
    )
    [request] = engine.requests
    assert request.prompt_ids == (65, 66, 67)
    assert request.priority == 5
    assert request.interruptible
    sampling = request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids, sampling.stop) == (
        0.7,
        6,
        (EOS, END_OF_TURN),
        ("#",),
    )
    assert sampling.seed == rollout_seed(11, 5, 1)


def test_the_engines_time_of_the_first_token_is_kept():
    rollout, _ = play(finish(response("hi"), first_token_s=0.25))
    assert rollout.first_token_s == 0.25


def test_an_evaluation_has_its_own_temperature_and_request_names():
    _, engine = play(finish(response("hi")), temperature=0.0, request_prefix="evaluation-")
    assert engine.requests[0].sampling.temperature == 0.0
    assert engine.requests[0].request_id.startswith("evaluation-5-1")


def test_a_parked_member_waits_at_the_gate_and_goes_on_from_its_tokens():
    first, second = response("a", (7, 1)), response("ab", (7, 1), (8, 1))
    whole = response("abc", (7, 1), (8, 1), (9, 1))
    seen: list[object] = []

    async def gate(parked: PartialRollout) -> str:
        seen.append((parked.group, parked.member, parked.response))
        await asyncio.sleep(10)
        return "continue"

    rollout, engine = play(
        finish(first, "abort"),
        finish(second, "abort"),
        finish(whole, "length"),
        resume_gate=gate,
        max_resumes=2,
    )
    assert seen == [(5, 1, first), (5, 1, second)]
    assert [request.partial for request in engine.requests] == [PartialResponse(), first, second]
    assert [request.interruptible for request in engine.requests] == [True, True, False]
    assert len({request.request_id for request in engine.requests}) == 3
    assert len({request.sampling.seed for request in engine.requests}) == 1
    assert (rollout.finish_reason, rollout.resumes, rollout.failure) == ("length", 2, None)
    assert (rollout.first_token_s, rollout.generated_s) == (1.0, 23.0)
    assert rollout.versions == whole.versions


def test_a_member_parked_before_its_first_token_begins_again():
    rollout, engine = play(finish(PartialResponse(), "abort"), finish(response("x")))
    assert [request.partial for request in engine.requests] == [PartialResponse(), PartialResponse()]
    assert (rollout.resumes, rollout.response_ids) == (1, response("x").ids)


def test_a_member_begun_before_a_restart_goes_on():
    begun = response("ab", (3, 2))
    parked = PartialRollout(group=5, member=1, response=begun, resumes=0)
    rollout, engine = play(finish(response("abc", (3, 2), (7, 1))), parked=parked)
    assert engine.requests[0].partial == begun
    assert rollout.resumes == 1
    assert rollout.first_version == 3


@pytest.mark.parametrize(("begun", "reason"), [(response("ab", eos=True), "stop"), (response("abcdef"), "length")])
def test_a_response_that_is_already_complete_needs_no_engine(begun: PartialResponse, reason: str):
    rollout, engine = play(parked=PartialRollout(group=5, member=1, response=begun, resumes=0))
    assert engine.requests == []
    assert (rollout.finish_reason, rollout.response_ids, rollout.failure) == (reason, begun.ids, None)


def test_an_engine_error_is_retried_from_its_tokens():
    part = response("ab")
    rollout, engine = play(
        finish(part, "error", error="out of memory"), WorkerDied("generator-0", "killed"), finish(response("abc"))
    )
    assert rollout.failure is None
    assert rollout.response_ids == response("abc").ids
    assert [request.partial for request in engine.requests] == [PartialResponse(), part, part]
    assert len({request.request_id for request in engine.requests}) == 3


def test_a_failed_submission_that_comes_back_with_less_costs_no_token():
    part = response("ab")
    rollout, engine = play(
        finish(part, "abort", reprefills=1),
        finish(PartialResponse(), "error", error="lost", reprefills=1),
        finish(response("abc"), reprefills=1),
    )
    assert [request.partial for request in engine.requests] == [PartialResponse(), part, part]
    assert rollout.reprefills == 3


def test_engine_errors_end_as_an_infrastructure_failure():
    replies = [finish(PartialResponse(), "error", error=f"broken {i}") for i in range(9)]
    rollout, engine = play(*replies, settings={"retries": 2})
    assert len(engine.requests) == 3
    assert rollout.failure == Failure(boundary="engine", cause="broken 2", infrastructure=True)
    assert (rollout.finish_reason, rollout.reward) == ("error", 0.0)
    assert rollout.finished_s == rollout.generated_s > 3.0


def test_a_raise_of_the_generator_is_caught_with_its_traceback():
    rollout, _ = play(ValueError("bad slot"), settings={"retries": 0})
    assert rollout.failure is not None
    assert rollout.failure.cause == "the generator raised ValueError: bad slot"
    assert rollout.failure.boundary == "engine"
    assert rollout.failure.infrastructure
    assert "Traceback" in rollout.failure.detail


@pytest.mark.parametrize(
    "broken",
    [
        PartialResponse(ids=(65,), logprobs=(math.nan,), versions=(VersionSpan(version=1, tokens=1),)),
        PartialResponse(ids=(65,), logprobs=(), versions=(VersionSpan(version=1, tokens=1),)),
        PartialResponse(ids=(65,), logprobs=(-1.0,), versions=()),
    ],
)
def test_tokens_that_could_not_be_trained_on_are_an_engine_error(broken: PartialResponse):
    rollout, engine = play(finish(broken), finish(response("ok")))
    assert rollout.failure is None
    assert rollout.response_ids == response("ok").ids
    assert engine.requests[1].partial == PartialResponse()
    rollout, _ = play(finish(broken), settings={"retries": 0})
    assert rollout.failure is not None
    assert rollout.failure.infrastructure
    assert rollout.response_ids == ()


def test_experts_that_the_model_has_not_end_the_rollout_as_an_engine_error():
    routing = ExpertRouting(layers=2, per_token=2, experts=8)
    good = TokenRows.of([[0, 1, 2, 7]] * 4)
    for rows, why in (
        ([[0, 1]] * 4, "2 layers with 2 experts of a token"),
        ([[0, 1, 2, 8]] * 4, "expert 8 of a layer"),
    ):
        broken = msgspec.structs.replace(response("no"), token_rows={EXPERTS: TokenRows.of(rows)})
        rollout, engine = play(*[finish(broken)] * 2, routing=routing, settings={"retries": 1})
        assert len(engine.requests) == 2
        assert rollout.failure is not None
        assert (rollout.failure.boundary, rollout.failure.infrastructure) == ("engine", True)
        assert why in rollout.failure.cause
    whole = msgspec.structs.replace(response("ok", eos=True), token_rows={EXPERTS: good})
    rollout, _ = play(finish(whole), routing=routing)
    assert (rollout.failure, rollout.token_rows) == (None, {EXPERTS: good})


def kept(text: str, rows: list[list[int]]) -> PartialResponse:
    return msgspec.structs.replace(response(text, eos=True), token_rows={KEPT: TokenRows.of(rows, 2)})


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 3}])
def test_kept_sets_of_truncated_samples_are_asked_for_in_training_alone(settings: dict[str, Any]):
    rows = [[]] * 3 + [[105], [1, 104, 105], [EOS]]
    rollout, engine = play(finish(kept("ih", rows)), settings=settings, kept_sets=64)
    assert engine.requests[0].sampling.kept_sets == 64
    assert (rollout.failure, rollout.token_rows) == (None, {KEPT: TokenRows.of(rows, 2)})
    for more in ({"settings": settings}, {"kept_sets": 64}):
        _, engine = play(finish(response("hi", eos=True)), **more)
        assert engine.requests[0].sampling.kept_sets == 0
    sampler = TurnSampler(engine.generate, Letters(), schema.RolloutConfig(**settings), engine.clock, run_seed=1,
                          kept_sets=64)  # fmt: skip
    assert sampler.for_evaluation("test-").kept_sets is None


def test_a_kept_set_without_its_token_ends_the_rollout_as_an_engine_error():
    broken = finish(kept("ih", [[]] * 3 + [[105], [1, 105], [EOS]]))
    rollout, engine = play(broken, broken, settings={"retries": 1, "top_p": 0.9}, kept_sets=64)
    assert len(engine.requests) == 2
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.infrastructure) == ("engine", True)
    assert "token 104, and a kept set without it" in rollout.failure.cause


def test_a_grammar_goes_to_the_engine_and_into_the_record():
    async def main(clock: Clock) -> None:
        engine = Engine(clock, finish(response("hi", eos=True)))
        sampler = TurnSampler(engine.generate, Letters(), schema.RolloutConfig(), clock, run_seed=1, kept_sets=9)
        rollout = await sampler.sample(msgspec.structs.replace(ModelCall.first(group(), 0), grammar="g"))
        assert rollout.grammars == {"g": ((0, 3),)}
        [asked] = engine.requests
        assert (asked.sampling.grammar, asked.sampling.kept_sets) == ("g", 9)
        assert sampler.constraints
        assert dataclasses.replace(sampler, kept_sets=None).constraints  # evaluation
        assert not dataclasses.replace(sampler, kept_sets=0).constraints

    run_virtual(main)


@pytest.mark.parametrize("length", [0, 5])
def test_a_prompt_that_does_not_fit_fails_at_the_environment(length: int):
    rollout, engine = play(a_group=group(prompt=length))
    assert engine.requests == []
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.infrastructure) == ("environment", False)
    assert f"the prompt has {length} tokens" in rollout.failure.cause
    assert "max_prompt_tokens = 4" in rollout.failure.cause


def test_a_hung_engine_ends_at_the_timeout_and_keeps_its_tokens():
    async def forever(parked: PartialRollout) -> str:
        await asyncio.Event().wait()
        return "continue"

    part = response("ab")
    rollout, _ = play(finish(part, "abort"), resume_gate=forever, settings={"timeout_s": 30.0})
    assert rollout.failure is not None
    assert rollout.failure.cause == "not finished after rollout.timeout_s = 30 s"
    assert rollout.failure.infrastructure
    assert rollout.response_ids == part.ids
    assert rollout.finished_s == 30.0


def test_a_gate_that_fails_is_an_error_of_the_orchestrator():
    async def gate(parked: PartialRollout) -> str:
        raise TimeoutError("the gate")

    with pytest.raises(TimeoutError, match="the gate"):
        play(finish(response("a"), "abort"), resume_gate=gate)


def test_a_timeout_inside_the_generator_is_an_engine_error_not_ours():
    rollout, engine = play(TimeoutError("no answer"), finish(response("ok")))
    assert rollout.failure is None
    assert len(engine.requests) == 2


def test_cancellation_passes_through():
    async def main(clock: Clock) -> None:
        engine = Engine(clock, finish(response("x")))
        single = SingleTurn(TurnSampler(engine.generate, Letters(), schema.RolloutConfig(), clock, run_seed=0))
        member = asyncio.create_task(single.generate_member(group(), 0))
        await clock.sleep(0.5)
        member.cancel()
        with pytest.raises(asyncio.CancelledError):
            await member

    run_virtual(main)


def test_siblings_do_not_share_a_fate():
    async def main(clock: Clock) -> list[Rollout]:
        async def generate(request: GenerationRequest, watch: Watch | None = None, /) -> GenerationResult:
            await clock.sleep(1.0)
            if request.request_id.startswith("5-1"):
                raise RuntimeError("only this one")
            return answer(request, "stop", response("ok"))

        single = SingleTurn(TurnSampler(generate, Letters(), schema.RolloutConfig(), clock, run_seed=0))
        members: list[Awaitable[Rollout]] = [single.generate_member(group(), m) for m in range(4)]
        return list(await asyncio.gather(*members))

    assert [rollout.failure is None for rollout in run_virtual(main)] == [True, False, True, True]


def test_text_leaves_special_tokens_out():
    async def main(clock: Clock) -> str:
        engine = Engine(clock, finish(response("hi", eos=True)))
        sampler = TurnSampler(engine.generate, Letters(), schema.RolloutConfig(), clock, run_seed=0)
        return sampler.text(await SingleTurn(sampler).generate_member(group(), 0))

    assert run_virtual(main) == "hi"


class TestApplyVerdict:
    def test_a_reward(self):
        rollout, _ = play(finish(response("hi")))
        scored = apply_verdict(rollout, Verdict(reward=0.5, solved=True, verify_s=0.1), now=9.0)
        assert (scored.reward, scored.solved, scored.verify_s, scored.finished_s) == (0.5, True, 0.1, 9.0)
        assert scored.failure is None
        assert scored.response_ids == rollout.response_ids

    def test_a_failed_verification_gives_no_reward(self):
        rollout, _ = play(finish(response("hi")))
        failure = Failure(boundary="reward", cause="timed out", infrastructure=False)
        scored = apply_verdict(rollout, Verdict(reward=1.0, solved=True, failure=failure), now=9.0)
        assert (scored.reward, scored.solved, scored.failure) == (0.0, False, failure)

    def test_the_first_failure_stays(self):
        rollout, _ = play(RuntimeError("x"), settings={"retries": 0})
        scored = apply_verdict(rollout, Verdict(reward=1.0, solved=True), now=9.0)
        assert scored.failure == rollout.failure
        assert (scored.reward, scored.solved, scored.finished_s) == (0.0, False, 9.0)


class TestSeeds:
    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.tuples(st.integers(), st.integers(), st.integers()), unique=True, min_size=2, max_size=20))
    def test_63_bits_and_different_for_different_rollouts(self, keys: list[tuple[int, int, int]]):
        seeds = [rollout_seed(*key) for key in keys]
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert len(set(seeds)) == len(seeds)
        assert seeds == [rollout_seed(*key) for key in keys]

    def test_splits_of_an_evaluation_draw_different_numbers(self):
        """Validation and test number their groups alike."""
        seeds = []
        for prefix in ("", "evaluation-validation-", "evaluation-test-"):
            _, engine = play(finish(response("hi")), request_prefix=prefix)
            seeds.append(engine.requests[0].sampling.seed)
        assert seeds[0] == rollout_seed(11, 5, 1)
        assert len(set(seeds)) == 3

    def test_pinned(self):
        # golden: a change would make a resumed rollout sample on from another stream
        assert rollout_seed(0, 0, 0) == GOLDEN_SEED


# --- stopped from outside ----------------------------------------------------------------------------------

PRUNED = Pruned(pruner="cap", reason="too long", at_tokens=6)


def stopped(
    *stops: tuple[float, Any], opens_s: float = 100.0, how: str = "continue", **options: Any
) -> tuple[Rollout, float]:
    """A member of 20 tokens, 1 s each, stopped at given times; the gate opens at ``opens_s``."""

    async def main(clock: Clock) -> tuple[Rollout, float]:
        generator = FakeGenerator(clock, token_s=1.0, length_of=lambda one: 20)
        opened = asyncio.Event()

        async def gate(parked: PartialRollout) -> str:
            await opened.wait()
            return how

        sampler = TurnSampler(
            generator.generate,
            Letters(),
            schema.RolloutConfig(),
            clock,
            run_seed=0,
            requests=generator,
            **{"resume_gate": gate, **options},
        )
        single = SingleTurn(sampler)
        job = asyncio.create_task(single.generate_member(group(), 0))
        for at_s, why in sorted([*stops, (opens_s, None)], key=lambda one: one[0]):
            await clock.sleep(at_s - clock.now())
            if why is None:
                opened.set()
            else:
                single.stop(group().index, 0, why)
        return await job, clock.now()

    return run_virtual(main)


def test_a_pruned_member_ends_with_what_it_has() -> None:
    rollout, _ = stopped((6.0, PRUNED))
    assert (len(rollout.response_ids), rollout.finish_reason) == (6, "abort")
    assert rollout.pruned == PRUNED
    assert rollout.failure is None


def test_a_member_stopped_with_a_failure_fails_with_its_tokens() -> None:
    why = Failure(boundary="environment", cause="its group timed out", infrastructure=True)
    rollout, _ = stopped((6.0, why))
    assert (len(rollout.response_ids), rollout.failure, rollout.pruned) == (6, why, None)


def test_a_member_parked_from_outside_goes_on_from_its_tokens() -> None:
    rollout, end_s = stopped((6.0, "park"), (7.0, "park"), opens_s=10.0)
    assert (len(rollout.response_ids), rollout.finish_reason, rollout.resumes) == (20, "stop", 1)
    assert rollout.generated_s == end_s == 24.0  # 6 tokens by 6 s, 14 more from 10 s on


def test_a_parked_member_can_be_stopped_for_good() -> None:
    rollout, _ = stopped((6.0, "park"), (8.0, PRUNED))
    assert (len(rollout.response_ids), rollout.generated_s, rollout.pruned) == (6, 8.0, PRUNED)


def test_a_member_parked_often_enough_is_left_alone() -> None:
    rollout, _ = stopped((6.0, "park"), (12.0, "park"), opens_s=8.0, max_resumes=1)
    assert (len(rollout.response_ids), rollout.resumes, rollout.generated_s) == (20, 1, 22.0)


def test_a_stop_after_the_end_changes_nothing() -> None:
    rollout, _ = stopped((50.0, PRUNED))
    assert (len(rollout.response_ids), rollout.finish_reason, rollout.pruned) == (20, "stop", None)


def test_an_error_at_the_gate_reaches_the_caller() -> None:
    async def broken(parked: PartialRollout) -> str:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        stopped((6.0, "park"), resume_gate=broken)


def test_a_member_whose_environment_is_too_stale_begins_anew() -> None:
    again, end_s = stopped((6.0, "park"), opens_s=10.0, how="restart")
    assert (len(again.response_ids), end_s, again.failure) == (20, 30.0, None)


def test_a_final_stop_that_meets_a_parking_on_its_way_wins() -> None:
    rollout, end_s = stopped((6.0, "park"), (6.0, PRUNED))
    assert (len(rollout.response_ids), rollout.pruned, end_s) == (6, PRUNED, 100.0)


def test_what_every_engine_refuses_is_not_asked_again():
    rollout, engine = play(finish(PartialResponse(), "error", error="too long", refused=True), settings={"retries": 2})
    assert len(engine.requests) == 1
    assert rollout.failure == Failure(boundary="engine", cause="too long", infrastructure=False)

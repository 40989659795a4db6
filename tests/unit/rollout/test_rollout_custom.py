"""A user's own rollouts: turns through the generator, token-exact; limits, stops, failures; a whole run of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from single_turn_play import EOS, Engine, Letters, Reply, answer, group, response

from headway.config import schema
from headway.generator.fake import FakeGenerator
from headway.records.errors import ConfigurationError, WorkerDied
from headway.records.generation import GenerationRequest, GenerationResult, VersionSpan
from headway.records.rollout import Failure, Pruned, Rollout
from headway.records.tokens import EXPERTS, KEPT, TokenRows
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.makers.user_function import KEY, Attempt, CustomRollouts, RolloutOver, load_rollout_function
from headway.runtime.clock import Clock, RealClock, run_virtual
from headway.runtime.hooks import Hook
from tests.support.simulated_run import experiment_of, simulate


class Codec(Letters):
    def encode_after(self, before: int | None, text: str) -> list[int]:
        return [ord(letter) for letter in text]


Function = Callable[[Attempt], Any]
SETTINGS = schema.RolloutConfig(max_prompt_tokens=4, max_response_tokens=12)


def own(function: Function, clock: Clock, generate: Any, requests: Any = None, **settings: Any) -> CustomRollouts:
    hook = Hook(key=KEY, name="mine:rollout", function=function)
    limits = SETTINGS.model_copy(update=settings)
    return CustomRollouts(hook, TurnSampler(generate, Codec(), limits, clock, run_seed=3, requests=requests))


def play(function: Function, *replies: Reply, **settings: Any) -> tuple[Rollout, Engine]:
    async def main(clock: Clock) -> tuple[Rollout, Engine]:
        engine = Engine(clock, *replies)
        return await own(function, clock, engine.generate, **settings).generate_member(group(), 1), engine

    return run_virtual(main)


def says(text: str, *versions: tuple[int, int], reason: str = "stop") -> Reply:
    return lambda request: answer(request, reason, response(text, *versions, eos=reason == "stop"))


async def hinted(attempt: Attempt) -> None:
    if "7" not in await attempt.generate():
        attempt.reward(-0.25)
        attempt.observe("no!")
        await attempt.generate()


def test_turns_and_what_is_observed_between_them_token_by_token() -> None:
    rollout, engine = play(hinted, says("six", (3, 2), (4, 2)), says("7", (4, 1), (5, 1)))
    assert rollout.failure is None
    assert rollout.response_ids == (*map(ord, "six"), EOS, *map(ord, "no!"), ord("7"), EOS)
    assert rollout.response_mask == (True,) * 4 + (False,) * 3 + (True,) * 2
    assert rollout.response_logprobs == (-0.5,) * 4 + (0.0,) * 3 + (-0.5,) * 2
    assert rollout.versions == (
        VersionSpan(version=3, tokens=2),
        VersionSpan(version=4, tokens=2 + 3 + 1),  # what was observed is of the token before
        VersionSpan(version=5, tokens=1),
    )
    assert (rollout.turn_ends, rollout.turn_rewards, rollout.turns) == ((7, 9), (-0.25, 0.0), 2)
    assert (rollout.prompt_ids, rollout.finish_reason, rollout.generated_s) == ((65, 66, 67), "stop", 2.0)
    first, second = engine.requests
    assert second.prompt_ids == (*first.prompt_ids, *rollout.response_ids[:7])
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (12, 12 - 7)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id
    assert first.session == second.session != ""  # the second goes where the first was
    assert [(call.start_s, call.end_s, call.tokens) for call in rollout.call_times] == [(0.0, 1.0, 4), (1.0, 2.0, 2)]


def test_rows_of_a_turn_go_on_where_those_of_the_turns_before_end() -> None:
    """The second call is asked for those behind: from the first answer's last token on."""

    def rows(text: str, first: int) -> Reply:
        def reply(request: GenerationRequest) -> GenerationResult:
            whole = response(text, eos=True)
            end = len(request.prompt_ids) + len(whole.ids) - 1
            read = TokenRows.of([[first + i] for i in range(request.rows_known, end)])
            among = [[] if i < len(request.prompt_ids) else [first + i] for i in range(request.rows_known, end + 1)]
            rows = {EXPERTS: read, KEPT: TokenRows.of(among)}
            return answer(request, "stop", msgspec.structs.replace(whole, token_rows=rows))

        return reply

    rollout, _ = play(hinted, rows("six", 0), rows("7", 100))
    read = rollout.token_rows[EXPERTS].values.tolist()
    assert read == [*range(3 + 4 - 1), *range(106, 100 + 3 + 4 + 3 + 2 - 1)]
    assert len(read) == len(rollout.prompt_ids) + len(rollout.response_ids) - 1
    kept, sampled = rollout.token_rows[KEPT], [*range(3, 3 + 4), *range(3 + 4 + 3, 3 + 4 + 3 + 2)]
    assert np.flatnonzero(kept.lengths.array).tolist() == sampled
    assert kept.values.tolist() == [i + 100 * (i > 7) for i in sampled]


def test_a_single_turn_is_the_one_that_single_turn_makes() -> None:
    async def once(attempt: Attempt) -> None:
        await attempt.generate()

    async def main(clock: Clock) -> tuple[GenerationRequest, GenerationRequest, Rollout, Rollout]:
        engine = Engine(clock, says("7"), says("7"))
        mine = await own(once, clock, engine.generate).generate_member(group(), 1)
        sampler = TurnSampler(engine.generate, Codec(), SETTINGS, clock, run_seed=3)
        plain = await SingleTurn(sampler).generate_member(group(), 1)
        return *engine.requests, mine, plain

    first, second, mine, plain = run_virtual(main)
    assert first == msgspec.structs.replace(second, session="5-1")
    assert (mine.response_ids, mine.versions, mine.turn_rewards) == (plain.response_ids, plain.versions, ())


def test_limits_of_tokens() -> None:
    async def greedy(attempt: Attempt) -> None:
        while True:
            await attempt.generate(max_tokens=4)
            attempt.observe("?")

    def long(request: GenerationRequest) -> Any:
        return answer(request, "length", response("abcd"[: request.sampling.max_tokens]))

    rollout, engine = play(greedy, long, long, long)
    # 4 + 1, 4 + 1, then 2 are left, after which no reply fits.
    assert [request.sampling.max_tokens for request in engine.requests] == [4, 4, 2]
    assert (len(rollout.response_ids), rollout.finish_reason, rollout.failure) == (12, "length", None)
    assert rollout.turn_ends == (5, 10, 12)

    async def stops(attempt: Attempt) -> None:
        await attempt.generate(max_tokens=4)

    rollout, _ = play(stops, long)
    assert rollout.finish_reason == "stop"  # its own limit cut the turn, not the response's


def test_a_reply_that_does_not_fit_ends_it_as_cut() -> None:
    async def talks(attempt: Attempt) -> None:
        await attempt.generate()
        attempt.observe("x" * 20)

    rollout, _ = play(talks, says("six"))
    assert (len(rollout.response_ids), rollout.finish_reason, rollout.failure) == (4, "length", None)


async def divides(attempt: Attempt) -> None:
    await attempt.generate()
    _ = 1 / 0


async def returns(attempt: Attempt) -> float:
    await attempt.generate()
    return 1.0


async def nothing(attempt: Attempt) -> None:
    return None


async def early(attempt: Attempt) -> None:
    attempt.observe("hello")


@pytest.mark.parametrize(
    ("function", "cause", "tokens"),
    [
        (divides, "hooks.rollout = 'mine:rollout' raised ZeroDivisionError: division by zero (test_rollout_custom", 4),
        (returns, "hooks.rollout = 'mine:rollout' returned 1.0: the attempt keeps what was sampled", 4),
        (nothing, "hooks.rollout = 'mine:rollout' sampled nothing", 0),
        (early, "raised ValueError: nothing was generated yet: what comes before the first turn belongs in", 0),
    ],
)
def test_what_breaks_fails_the_rollout_at_its_environment(function: Function, cause: str, tokens: int) -> None:
    rollout, engine = play(function, says("six"))
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.infrastructure) == ("environment", False)
    assert cause in rollout.failure.cause
    assert (rollout.finish_reason, len(rollout.response_ids)) == ("error", tokens)
    assert len(engine.requests) <= 1


def test_an_environment_that_is_down_is_tried_anew() -> None:
    tries: list[int] = []

    async def flaky(attempt: Attempt) -> None:
        await attempt.generate()
        tries.append(0)
        if len(tries) < 3:
            raise ConnectionError("refused")
        attempt.observe("ok")

    rollout, engine = play(flaky, says("a"), says("a"), says("a"))
    assert (rollout.failure, rollout.response_ids[-2:], len(engine.requests)) == (None, (ord("o"), ord("k")), 3)
    tries.clear()
    rollout, _ = play(flaky, says("a"), says("a"), retries=1)
    assert rollout.failure is not None
    assert rollout.failure.infrastructure


def test_an_engine_that_fails_for_good_fails_it_there() -> None:
    rollout, _ = play(hinted, says("six"), *[WorkerDied("generator-0", "gone")] * 3)
    assert rollout.failure is not None
    assert rollout.failure.boundary == "engine"
    assert rollout.response_ids == (*map(ord, "six"), EOS, *map(ord, "no!"))


def test_a_hung_environment_times_out() -> None:
    async def hangs(attempt: Attempt) -> None:
        await attempt.generate()
        await asyncio.Event().wait()

    rollout, _ = play(hangs, says("six"), timeout_s=30.0)
    assert rollout.failure is not None
    assert rollout.failure.cause == "not finished after rollout.timeout_s = 30 s"
    assert rollout.generated_s == 30.0


WHY = Failure(boundary="engine", cause="enough", infrastructure=True)
PRUNED = Pruned(pruner="length", reason="too long", at_tokens=3)


@pytest.mark.parametrize("at_s", [0.25, 2.0])  # while it is sampled; while its environment works
@pytest.mark.parametrize("why", [WHY, PRUNED])
def test_it_is_stopped_wherever_it_is(at_s: float, why: Failure | Pruned) -> None:
    cleaned: list[str] = []

    async def slow(attempt: Attempt) -> None:
        try:
            await attempt.generate()
            await asyncio.sleep(60.0)
        except RolloutOver as over:
            cleaned.append(str(over))
            raise

    async def main(clock: Clock) -> Rollout:
        generator = FakeGenerator(clock, slots=2, token_s=0.1, length_of=lambda request: 10)
        rollouts = own(slow, clock, generator.generate, generator)
        task = asyncio.create_task(rollouts.generate_member(group(), 1))
        await clock.sleep(at_s)
        rollouts.stop(5, 1, "park" if at_s > 1 else why)  # between turns there is nothing to park
        rollouts.stop(5, 1, why)
        return await task

    rollout = run_virtual(main)
    assert rollout.failure is (why if isinstance(why, Failure) else None)
    assert rollout.pruned == (why if isinstance(why, Pruned) else None)
    assert rollout.finish_reason == ("error" if isinstance(why, Failure) else "abort")
    assert len(rollout.response_ids) == (2 if at_s < 1 else 10)
    assert rollout.generated_s == pytest.approx(at_s)
    assert len(cleaned) == (at_s < 1)


@pytest.mark.parametrize("why", [WHY, PRUNED])
def test_it_is_stopped_before_it_is_tried_anew(why: Failure | Pruned) -> None:
    tries: list[float] = []

    async def main(clock: Clock) -> Rollout:
        async def down(attempt: Attempt) -> None:
            await attempt.generate()
            tries.append(clock.now())
            raise ConnectionError("refused")

        rollouts = own(down, clock, Engine(clock, says("a"), says("a"), says("a")).generate)
        task = asyncio.create_task(rollouts.generate_member(group(), 1))
        await clock.sleep(1.1)
        rollouts.stop(5, 1, "park")  # there is nothing to park
        rollouts.stop(5, 1, why)
        return await task

    rollout = run_virtual(main)
    assert tries == [1.0]
    assert rollout.generated_s == rollout.finished_s == pytest.approx(1.1)
    assert rollout.failure is not None
    assert rollout.finish_reason == "error"
    if isinstance(why, Failure):
        assert rollout.failure is why
    else:
        assert "refused" in rollout.failure.cause  # what it has can't be scored


@pytest.mark.parametrize("custom", [False, True])
def test_evaluation_beside_training_has_its_own_requests_temperature_and_stops(custom: bool) -> None:
    async def once(attempt: Attempt) -> None:
        await attempt.generate()

    async def main(clock: Clock) -> tuple[list[GenerationRequest], list[Rollout]]:
        generator = FakeGenerator(clock, slots=2, token_s=0.1, length_of=lambda request: 10)
        requests: list[GenerationRequest] = []

        def generate(request: GenerationRequest, watch: Any = None, /) -> Any:
            requests.append(request)
            return generator.generate(request, watch)

        sampler = TurnSampler(generate, Codec(), SETTINGS, clock, run_seed=3, requests=generator)
        hook = Hook(key=KEY, name="mine:rollout", function=once)
        training = CustomRollouts(hook, sampler) if custom else SingleTurn(sampler)
        evaluation = training.for_evaluation("evaluation-test-", 0.25)
        both = [asyncio.create_task(maker.generate_member(group(), 1)) for maker in (training, evaluation)]
        await clock.sleep(0.55)
        assert (training.reached(5, 1), evaluation.reached(5, 1)) == (5, 5)
        training.stop(5, 1, WHY)
        return requests, await asyncio.gather(*both)

    requests, (trained, evaluated) = run_virtual(main)
    assert (trained.failure, len(trained.response_ids)) == (WHY, 5)
    assert (evaluated.failure, len(evaluated.response_ids)) == (None, 10)
    assert [request.request_id for request in requests] == ["5-1.0.0", "evaluation-test-5-1.0.0"]
    assert [request.sampling.temperature for request in requests] == [SETTINGS.temperature, 0.25]
    assert requests[0].sampling.seed != requests[1].sampling.seed


@pytest.fixture
def module() -> Any:
    own_module = ModuleType("own_rollouts")

    async def two_turns(attempt: Attempt) -> None:
        text = await attempt.generate(max_tokens=30)
        await asyncio.sleep(0.05)  # an environment at work, on the virtual clock
        attempt.reward(int(text) % 3)
        attempt.observe_ids([9, 9])
        await attempt.generate()

    own_module.__dict__.update(two_turns=two_turns, plain=lambda attempt: None)
    sys.modules["own_rollouts"] = own_module
    yield own_module
    del sys.modules["own_rollouts"]


@pytest.mark.parametrize("options", [{}, {"kills_s": (1.0, 1.0)}, {"queue": {"overdue": "mask", "budget": 1}}])
def test_a_run_of_them_learns_from_rewards_by_turn(module: Any, options: dict[str, Any]) -> None:
    queue = {"groups_per_step": 2, "budget": 2, **options.pop("queue", {})}
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 6},
        rollout={"group_size": 4, "max_response_tokens": 80},
        hooks={"rollout": "own_rollouts:two_turns"},
        algorithm={"turn_discount": 0.5},
        queue=queue,
        generator={"slots": 12, "update_mode": "abort"},
    )
    outcome = simulate(experiment, **options)
    assert [step.version for step in outcome.steps] == [1, 2, 3, 4, 5, 6]
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []
    samples = [sample for batch in outcome.trainer.batches for sample in batch.samples]
    assert all(s.rollout.turns == 2 and len(s.turn_advantages) == 2 for s in samples)
    assert any(s.turn_advantages[0] != s.turn_advantages[1] for s in samples)
    assert all(s.rollout.environment_s == pytest.approx(0.05) for s in samples)
    assert sum(step.flow.environment_s for step in outcome.steps) > 0
    for sample in samples:
        rollout = sample.rollout
        end = rollout.turn_ends[0]
        assert rollout.response_mask[end - 2 : end] == (False, False)
        assert sum(span.tokens for span in rollout.versions) == len(rollout.response_ids) == rollout.turn_ends[1]


def test_what_the_key_takes(module: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be an async function: it waits for what is sampled"):
        load_rollout_function("own_rollouts:plain")
    with pytest.raises(ConfigurationError, match="own_rollouts has no 'two_turn'; did you mean 'two_turns'"):
        load_rollout_function("own_rollouts:two_turn")
    clock = RealClock()
    sampler = TurnSampler(FakeGenerator(clock).generate, Codec(), SETTINGS, clock, run_seed=3)
    assert type(make_rollouts(experiment_of(Path("unused")), sampler)) is SingleTurn

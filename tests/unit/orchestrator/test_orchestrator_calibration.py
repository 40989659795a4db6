"""The calibration's parts without its processes: rollouts cut off, steps timed, costs fitted."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated_run import PlainTokenizer, experiment_of

from headway.control.lengths import length_distribution
from headway.generator.fake import FakeGenerator
from headway.orchestrator.preflight import calibration, step_timing
from headway.orchestrator.preflight.calibration import CalibrationInterval, decode_cost, shared_replicas
from headway.orchestrator.preflight.calibration_load import CalibrationLoad
from headway.orchestrator.preflight.step_timing import StepTimes, time_steps
from headway.records.check_report import Calibration
from headway.records.errors import Interrupted
from headway.records.generation import EngineStatistics
from headway.records.rollout import Rollout
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer


def test_the_cost_of_a_decode_step_from_two_levels() -> None:
    """5 ms + 1 ms a request, on two replicas."""
    few = CalibrationInterval(elapsed_s=1.0, tokens=2 * 111 * 4, steps=2 * 111, busy_s=2 * 111 * 0.009, replicas=2)
    many = CalibrationInterval(elapsed_s=1.0, tokens=2 * 40 * 20, steps=2 * 40, busy_s=2 * 40 * 0.025, replicas=2)
    assert many.running == pytest.approx(40)
    assert many.tokens_per_s == 1600
    assert decode_cost(few, many) == (pytest.approx(0.005), pytest.approx(0.001))
    nothing = CalibrationInterval(elapsed_s=1.0, tokens=0, steps=0, busy_s=0.0, replicas=2)
    fixed, request = decode_cost(nothing, many)  # the low level has nothing to say: all of it counts as fixed
    assert fixed + 20 * request == pytest.approx(0.025)
    slower = CalibrationInterval(elapsed_s=1.0, tokens=2 * 111 * 4, steps=2 * 111, busy_s=2 * 111 * 0.030, replicas=2)
    assert decode_cost(slower, many) == (pytest.approx(0.025), 0.0)


def timed(seconds: float, sections: dict[str, Any], token_s: float = 1e-4, fixed_s: float = 0.05) -> StepTimes:
    experiment = experiment_of(Path("unused"), **sections)

    def latency(batch: TrainBatch) -> float:
        tokens = sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)
        return fixed_s + tokens * token_s

    async def main(clock: Clock) -> StepTimes:
        lengths = length_distribution([(n, True) for n in range(1, 100)], 200)
        trainer = FakeTrainer(clock, latency)
        found = await time_steps(trainer, experiment, [], lengths, clock, seconds)
        assert clock.now() < 2 * seconds or len(trainer.batches) == 1
        assert {sum(sample.advantage for sample in batch.samples) for batch in trainer.batches} <= {-1.0, 0.0, 1.0}
        return found

    return run_virtual(main)


def test_steps_are_timed_up_to_a_whole_one() -> None:
    found = timed(5.0, {"queue": {"groups_per_step": 16}, "rollout": {"group_size": 8}})
    assert found.samples == 128
    assert found.fixed_s == pytest.approx(0.05, rel=0.02)
    assert found.token_s == pytest.approx(1e-4, rel=0.02)
    tokens = 128 * 51
    assert found.tokens_per_s == pytest.approx(tokens / (0.05 + tokens * 1e-4), rel=0.02)


def test_a_slow_trainer_gets_no_whole_step() -> None:
    found = timed(5.0, {"queue": {"groups_per_step": 64}, "rollout": {"group_size": 8}}, token_s=2e-2)
    assert 2 <= found.samples < 64
    assert found.token_s == pytest.approx(2e-2, rel=0.05)
    alone = timed(1.0, {}, token_s=1.0)  # not even a second batch
    assert alone.samples == 2
    assert alone.fixed_s == 0.0


@given(groups=st.integers(1, 12), size=st.integers(1, 9), count=st.integers(1, 100), affordable=st.integers(0, 800))
def test_timed_batches_grow_by_whole_groups(groups: int, size: int, count: int, affordable: int) -> None:
    full = groups * size
    count = min(count, full - 1)
    assume(count > 0)
    larger = step_timing._larger(count, affordable, full, size)
    assert count < larger <= full
    assert larger % size == 0 or larger < size


@pytest.mark.slow
def test_members_of_a_timed_group_share_their_prompt() -> None:
    """As in the run, where what a group shares is computed once; batches are of whole groups."""
    experiment = experiment_of(Path("unused"), queue={"groups_per_step": 4}, rollout={"group_size": 4})
    seen = [Rollout(group=i, member=0, prompt_ids=(i,), response_ids=(1,), response_mask=(True,)) for i in range(7)]

    async def main(clock: Clock) -> list[TrainBatch]:
        trainer = FakeTrainer(clock, 0.001)
        lengths = length_distribution([(3, True)] * 9, 200)
        assert (await time_steps(trainer, experiment, seen, lengths, clock, 5.0)).samples == 16
        return trainer.batches

    for batch in run_virtual(main):
        prompts: dict[int, set[tuple[int, ...]]] = {}
        for sample in batch.samples:
            prompts.setdefault(sample.rollout.group, set()).add(sample.rollout.prompt_ids)
        assert {len(of_group) for of_group in prompts.values()} == {1}
        assert len(set.union(*prompts.values())) == len(prompts)
        assert len(batch.samples) in (2, 4, 8, 12, 16)


def test_a_load_draws_and_renders_as_the_run_does() -> None:
    """By the sources' weights; of a conversation all of it, not what its users say."""
    sources = [{"path": "a", "label": "large"}, {"path": "b", "label": "small", "weight": 3.0}]
    experiment = experiment_of(Path("unused"), tasks={"train": sources})
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    tasks = [Task(task_id=str(i), prompt="p", source="large") for i in range(90)]
    tasks += [Task(task_id=str(i), prompt="hi", messages=said, source="small") for i in range(90, 100)]
    rendered: list[Any] = []

    class Renders(PlainTokenizer):
        def render(self, prompt: Any, template: str = "raw") -> tuple[int, ...]:
            rendered.append(prompt)
            return (1,)

    async def main(clock: Clock) -> None:
        generator = FakeGenerator(clock, slots=1, token_s=1.0)
        verifier = FakeVerifier(lambda task, response: 0.0, clock, latency_s=0.0)
        tokenizer: Any = Renders()
        load = CalibrationLoad(experiment, generator, verifier, tokenizer, tasks, clock)
        for index in range(100):
            load.prompt(index)

    run_virtual(main)
    assert rendered.count("p") == 25
    assert rendered.count(said) == 75


def test_a_load_keeps_its_limit_and_counts_what_it_cuts() -> None:
    """Responses of 1, 2, 3 ... tokens at 1 s a token, cut off after 20 s."""
    experiment = experiment_of(
        Path("unused"),
        rollout={"group_size": 2, "max_response_tokens": 50},
        queue={"filter_zero_variance": True},
        generator={"slots": 8},
    )

    async def main(clock: Clock) -> CalibrationLoad:
        served = 0

        def length_of(request: object) -> int:
            nonlocal served
            served += 1
            return served

        generator = FakeGenerator(clock, slots=8, token_s=1.0, length_of=length_of)
        verifier = FakeVerifier(lambda task, response: int(response) % 2, clock, latency_s=0.0)
        tasks = [Task(task_id=str(i), prompt=str(i)) for i in range(3)]
        tokenizer: Any = PlainTokenizer()
        load = CalibrationLoad(experiment, generator, verifier, tokenizer, tasks, clock)
        running = asyncio.create_task(load.run())
        load.set_limit(4)
        for _ in range(20):
            await clock.sleep(1.0)
            [engine] = await generator.statistics()
            assert engine.running + engine.waiting <= 4
        await load.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return load

    load = run_virtual(main)
    assert sorted(load.ended) == list(range(1, len(load.ended) + 1))
    assert len(load.cut) == 4
    assert all(0 < tokens < 20 for tokens in load.cut)
    assert sum(load.ended) + sum(load.cut) <= 4 * 20
    assert load.accepted == len(load.groups) > 2  # an odd and an even length in each
    assert next(len(texts) for _, texts in load.texts()) == 2


def test_replicas_are_lent_where_the_trainer_computes() -> None:
    def yielded(generator: list[str], trainer: list[str]) -> int:
        sections = {"generator": {"devices": generator}, "trainer": {"devices": trainer}}
        return shared_replicas(experiment_of(Path("unused"), **sections))

    assert yielded(["cpu:0"], ["cpu:1"]) == 0
    assert yielded(["cpu:0-1"], ["cpu:1"]) == 1
    assert yielded(["cuda:0"], ["cpu:0"]) == 0
    assert yielded(["cuda:0", "cuda:1"], ["cuda:1"]) == 1
    assert yielded(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]) == 2


# --- a whole calibration, of fakes on the virtual clock --------------------------------------------------


class CountingGenerator(FakeGenerator):
    """Counts its decode steps, and can be asked for the tokens of open requests, like the real pool."""

    pids: tuple[int, ...] = ()

    async def statistics(self) -> list[EngineStatistics]:
        [found] = await super().statistics()
        return [msgspec.structs.replace(found, decode_steps=round(found.busy_s / TOKEN_S))]

    def open_tokens(self) -> list[int]:
        return [self.tokens_so_far(request_id) for request_id in self._open]


class TimedTrainer(FakeTrainer):
    workers: tuple[object, ...] = ()


TOKEN_S = 0.002


def calibrated(
    monkeypatch: pytest.MonkeyPatch, struck_when: str = "", **sections: dict[str, Any]
) -> tuple[Calibration, list[str]]:
    """0.002 s a decode step whatever runs; lengths 1 to 40; steps of 0.1 s + 0.1 ms a token; 4 ms a response verified,
    slower than they come."""
    experiment = experiment_of(
        Path("unused"),
        rollout={"group_size": 4, "max_response_tokens": 40},
        queue={"groups_per_step": 4},
        **({"generator": {"slots": 16, "devices": ["cpu:0"]}} | sections),
    )
    said: list[str] = []
    made: dict[str, Any] = {}  # keywords the actors were made with

    def say(doing: str) -> None:
        said.append(doing)
        if doing == struck_when:
            loop: Any = asyncio.get_running_loop()  # on the virtual clock it never looks for real signals
            loop._signal_handlers[signal.SIGINT]._run()

    def latency(batch: TrainBatch) -> float:
        return 0.1 + 1e-4 * sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)

    async def main(clock: Clock) -> Calibration:
        generator = CountingGenerator(clock, slots=16, token_s=TOKEN_S, length_of=lambda r: 1 + r.sampling.seed % 40)
        trainer = TimedTrainer(clock, latency, publish_s=0.02)
        verifier = FakeVerifier(lambda task, response: int(response) % 2, clock, latency_s=0.004)
        for name, actor in (("GeneratorPool", generator), ("TrainerClient", trainer), ("VerifierPool", verifier)):
            monkeypatch.setattr(calibration, name, lambda *a, actor=actor, **k: made.update(k) or actor)
        monkeypatch.setattr(calibration, "RealClock", lambda: clock)
        tasks = [Task(task_id=str(i), prompt=str(i), verifier="numeric") for i in range(9)]
        monkeypatch.setattr(calibration, "Tokenizer", type("Folder", (), {"of": lambda experiment: PlainTokenizer()}))
        try:
            measured, lengths = await calibration._calibrate(experiment, tasks, 10.0, say, "test")
        finally:
            assert generator._stopped
            assert not trainer.started
        assert lengths.finished == measured.lengths.finished
        assert set(made["named"]) == {"numeric"}  # a verifier that is not told refuses every response
        return measured

    return run_virtual(main), said


def test_a_whole_calibration_finds_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, said = calibrated(monkeypatch)
    assert measured.at_once
    assert measured.measured_s == pytest.approx(10.0, abs=1.5)
    assert measured.lengths.mean_tokens == pytest.approx(20.5, rel=0.05)
    assert measured.lengths.longest_tokens == 40
    assert measured.decode_fixed_s == pytest.approx(TOKEN_S, rel=0.05)
    assert measured.decode_request_s == pytest.approx(0.0, abs=TOKEN_S / 50)
    assert measured.decode_tokens_per_s == pytest.approx(16 / TOKEN_S, rel=0.1)
    assert measured.decode_beside_tokens_per_s == pytest.approx(measured.decode_tokens_per_s, rel=0.05)
    assert measured.train_samples == 16
    assert measured.train_fixed_s == pytest.approx(0.1, rel=0.05)
    assert measured.train_token_s == pytest.approx(1e-4, rel=0.05)
    assert measured.publish_s == pytest.approx(0.02)
    assert measured.verify_response_s == pytest.approx(0.004)
    assert measured.groups > 200
    assert said[:3] == ["starts the workers", "compares trainer and engine", "computes prompts"]
    assert "trains beside it" in said


def test_on_shared_devices_the_generator_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, said = calibrated(monkeypatch, trainer={"devices": ["cpu:0"]})
    assert not measured.at_once
    assert measured.decode_beside_tokens_per_s is None
    assert measured.train_samples == 16
    assert measured.lengths.censored > 0
    assert "trains, with the generator idle" in said


@pytest.mark.parametrize("when", ["decodes at full concurrency", "trains beside it"])
def test_ctrl_c_stops_the_workers(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with pytest.raises(Interrupted, match="nothing is left"):
        calibrated(monkeypatch, struck_when=when)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

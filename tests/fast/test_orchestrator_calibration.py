"""The calibration's parts without its processes: rollouts cut off, steps timed, costs fitted."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_run import PlainTokenizer, experiment_of

from headway.control.lengths import length_distribution
from headway.generator.fake import FakeGenerator
from headway.orchestrator import calibration
from headway.orchestrator.calibration import Interval, decode_cost, shared_devices
from headway.orchestrator.load import Load
from headway.orchestrator.step_timing import StepTimes, time_steps
from headway.records.errors import Interrupted
from headway.records.generation import EngineStatistics
from headway.records.planning import Calibration
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer


def test_the_cost_of_a_decode_step_from_two_levels() -> None:
    """5 ms + 1 ms a request, on two replicas."""
    few = Interval(elapsed_s=1.0, tokens=2 * 111 * 4, steps=2 * 111, busy_s=2 * 111 * 0.009, replicas=2)
    many = Interval(elapsed_s=1.0, tokens=2 * 40 * 20, steps=2 * 40, busy_s=2 * 40 * 0.025, replicas=2)
    assert many.running == pytest.approx(40)
    assert many.tokens_per_s == 1600
    assert decode_cost(few, many) == (pytest.approx(0.005), pytest.approx(0.001))
    nothing = Interval(elapsed_s=1.0, tokens=0, steps=0, busy_s=0.0, replicas=2)
    fixed, request = decode_cost(nothing, many)  # the low level has nothing to say: all of it counts as fixed
    assert fixed + 20 * request == pytest.approx(0.025)
    slower = Interval(elapsed_s=1.0, tokens=2 * 111 * 4, steps=2 * 111, busy_s=2 * 111 * 0.030, replicas=2)
    assert decode_cost(slower, many) == (pytest.approx(0.025), 0.0)


def timed(seconds: float, sections: dict[str, Any], token_s: float = 1e-4, fixed_s: float = 0.05) -> StepTimes:
    experiment = experiment_of(Path("unused"), **sections)

    def latency(batch: TrainBatch) -> float:
        tokens = sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)
        return fixed_s + tokens * token_s

    async def main(clock: Clock) -> StepTimes:
        lengths = length_distribution([(n, True) for n in range(1, 100)], 200)
        trainer = FakeTrainer(clock, latency)  # type: ignore[arg-type]  (takes a function of the batch too)
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


def test_a_load_keeps_its_limit_and_counts_what_it_cuts() -> None:
    """Responses of 1, 2, 3 ... tokens at 1 s a token, cut off after 20 s."""
    experiment = experiment_of(
        Path("unused"),
        rollout={"group_size": 2, "max_response_tokens": 50},
        queue={"filter_zero_variance": True},
        generator={"slots": 8},
    )

    async def main(clock: Clock) -> Load:
        served = 0

        def length_of(request: object) -> int:
            nonlocal served
            served += 1
            return served

        generator = FakeGenerator(clock, slots=8, token_s=1.0, length_of=length_of)
        verifier = FakeVerifier(lambda task, response: int(response) % 2, clock, latency_s=0.0)
        tasks = [Task(task_id=str(i), prompt=str(i)) for i in range(3)]
        tokenizer: Any = PlainTokenizer()
        load = Load(experiment, generator, verifier, tokenizer, tasks, clock, generator.cancel)
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


def test_devices_are_shared_when_they_overlap() -> None:
    def shared(generator: list[str], trainer: list[str]) -> bool:
        sections = {"generator": {"devices": generator}, "trainer": {"devices": trainer}}
        return shared_devices(experiment_of(Path("unused"), **sections))

    assert not shared(["cpu:0"], ["cpu:1"])
    assert shared(["cpu:0-1"], ["cpu:1"])
    assert not shared(["cuda:0"], ["cpu:0"])
    assert shared(["cuda:0", "cuda:1"], ["cuda:1"])


# --- a whole calibration, of fakes on the virtual clock --------------------------------------------------


class CountingGenerator(FakeGenerator):
    """Counts its decode steps, and can be asked for the tokens of open requests, like the real pool."""

    pids: tuple[int, ...] = ()

    async def statistics(self) -> list[EngineStatistics]:
        [found] = await super().statistics()
        return [msgspec.structs.replace(found, decode_steps=round(found.busy_s / TOKEN_S))]

    def tokens_so_far(self) -> list[int]:
        return [self._produced(entry) for entry in self._open.values()]


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

    def say(doing: str) -> None:
        said.append(doing)
        if doing == struck_when:
            loop: Any = asyncio.get_running_loop()  # on the virtual clock it never looks for real signals
            loop._signal_handlers[signal.SIGINT]._run()

    def latency(batch: TrainBatch) -> float:
        return 0.1 + 1e-4 * sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)

    async def main(clock: Clock) -> Calibration:
        generator = CountingGenerator(clock, slots=16, token_s=TOKEN_S, length_of=lambda r: 1 + r.sampling.seed % 40)
        trainer = TimedTrainer(clock, latency, publish_s=0.02)  # type: ignore[arg-type]  (a function of the batch too)
        verifier = FakeVerifier(lambda task, response: int(response) % 2, clock, latency_s=0.004)
        for name, actor in (("GeneratorPool", generator), ("TrainerClient", trainer), ("VerifierPool", verifier)):
            monkeypatch.setattr(calibration, name, lambda *a, actor=actor, **k: actor)
        monkeypatch.setattr(calibration, "RealClock", lambda: clock)
        tasks = [Task(task_id=str(i), prompt=str(i)) for i in range(9)]
        monkeypatch.setattr(calibration, "load_task_sets", lambda experiment: {"train": tasks})
        monkeypatch.setattr(calibration, "Tokenizer", type("Folder", (), {"load": lambda path: PlainTokenizer()}))
        try:
            measured, lengths = await calibration._calibrate(experiment, 10.0, say, "test")
        finally:
            assert generator._stopped
            assert not trainer.started
        assert lengths.finished == measured.lengths.finished
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
    assert said[:2] == ["starts the workers", "computes prompts"]
    assert "trains beside it" in said


def test_on_shared_devices_the_generator_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, said = calibrated(monkeypatch, trainer={"devices": ["cpu:0"]})
    assert not measured.at_once
    assert measured.decode_beside_tokens_per_s is None
    assert measured.train_samples == 16
    assert measured.lengths.censored > 0
    assert "trains, with the generator at rest" in said


@pytest.mark.parametrize("when", ["decodes at full concurrency", "trains beside it"])
def test_ctrl_c_stops_the_workers(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with pytest.raises(Interrupted, match="nothing is left"):
        calibrated(monkeypatch, struck_when=when)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""Prompts with pictures as a run asks for them: whose turn it is, and what fails a task alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from headway.models.hf.prompts import PictureClient, PromptMaker
from headway.orchestrator.evaluation import attempt_tasks, evaluation_record
from headway.orchestrator.preflight import pictures as preflight
from headway.orchestrator.preflight.logprob_agreement import pictured_prompt
from headway.records.errors import ConfigurationError, RemoteError, StorageFailed, WorkerDied
from headway.records.task import Task
from headway.records.tokens import TokenIds
from headway.rollout.fake import FakeVerifier
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.scored_text import ScoredText
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.process_worker import Death
from tests.support.simulated_run import PlainTokenizer, experiment_of


def raised(error: Exception) -> RemoteError:
    found = RemoteError("pictures", "prompt", str(error), "")
    found.__cause__ = error
    return found


def arrays_of(address: str) -> str:
    return address.encode().hex()


class Process:
    """Stands for the processor's process and its launcher: a second for each prompt, one after another. A picture
    called "deadly" ends it, "broken" can't be read, "last" finds the disk full."""

    name, pid = "pictures", 1

    def __init__(self, clock: Clock, refusal: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._clock, self._refusal = clock, refusal
        self._turn = asyncio.Lock()
        self.died = Death()
        self.died.set(WorkerDied("pictures", "not started"))

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def start(self, spec: object) -> Process:
        if self._refusal is not None:
            raise raised(self._refusal)
        self.died = Death()
        return self

    async def call(self, method: str, messages: object, pictures: tuple[tuple[str, str], ...]) -> Any:
        ((address, _),) = pictures
        async with self._turn:
            self.asked.append(address)
            await self._clock.sleep(1.0)
        if "deadly" in address:
            self.kill("killed by SIGKILL (-9)\nits last words")
            raise self.died.result()
        if "broken" in address:
            raise raised(ConfigurationError(f"{address} can't be read as a picture"))
        if "last" in address:
            raise raised(StorageFailed("the disk is full"))
        return TokenIds([2, 3]), arrays_of(address), 8

    def kill(self, reason: str = "") -> None:
        self.died.set(WorkerDied("pictures", reason))

    async def stop(self, grace_s: float = 5.0) -> None:
        self.kill()


def pictured(name: str) -> Task:
    part = {"type": "image_url", "image_url": {"url": name}, "content_hash": name}
    return Task(task_id=name, prompt="?", messages=({"role": "user", "content": [part]},))


def prompts_of(process: Any, clock: Clock, events: list[str] | None = None) -> PromptMaker:
    told = [] if events is None else events
    experiment = experiment_of(Path("none"))
    pictures = PictureClient(process, clock, experiment, lambda name, detail, /, **_: told.append(name))
    return PromptMaker(PlainTokenizer(), "chat", pictures)


def test_a_groups_prompt_waits_behind_one_of_an_evaluations_which_are_made_once() -> None:
    async def main(clock: Clock) -> tuple[list[str], float]:
        prompts, tasks = prompts_of(process := Process(clock), clock), [pictured(str(i)) for i in range(12)]
        evaluation = [asyncio.create_task(prompts.make(task)) for task in tasks]
        await clock.sleep(0.5)
        await prompts.prepare(pictured("own"))
        ready_s = clock.now()
        first = await asyncio.gather(*evaluation)
        assert await asyncio.gather(*(prompts.make(task) for task in tasks)) == first
        assert prompts.of(pictured("own"))["task"].pixels == arrays_of("own")
        return process.asked, ready_s

    asked, ready_s = run_virtual(main)
    assert asked.index("own") == 1
    assert ready_s == pytest.approx(2.0)
    assert len(asked) == 13


def test_a_prompt_that_cannot_be_made_is_the_tasks_own_fault() -> None:
    async def main(clock: Clock) -> None:
        events: list[str] = []
        prompts = prompts_of(process := Process(clock), clock, events)
        for name, cause in (
            ("broken", "broken can't be read as a picture"),
            ("deadly", "the process that makes prompts died of its pictures: killed by SIGKILL (-9)"),
        ):
            await prompts.prepare(pictured(name))
            made = prompts.of(pictured(name))
            assert made["task"].unshown == cause
            assert not made["task"].pixels
            assert len(made["prompt_ids"]) == 0
            assert (await prompts.make(pictured("whole")))["task"].pixels == arrays_of("whole")
        assert process.asked == ["broken", "whole", "deadly", "deadly"]
        await clock.sleep(0.1)
        assert events == ["pictures_died", "pictures_restarted", "pictures_died"]
        assert (await prompts.make(pictured("another")))["task"].pixels
        assert events[3:] == ["pictures_restarted"]
        assert clock.now() < 5.5  # no pause that grows with the pictures that end it
        with pytest.raises(StorageFailed):
            await prompts.make(pictured("last"))

    run_virtual(main)


def test_trainer_and_engine_are_compared_by_the_first_prompt_that_can_be_shown() -> None:
    async def main(clock: Clock) -> None:
        experiment, tried = experiment_of(Path("none")), [pictured(name) for name in ("broken", "whole", "other")]
        pictures = PictureClient(cast("Any", process := Process(clock)), clock, experiment)
        pictures.compared += tried
        off = experiment_of(Path("none"), generator={"probe_every_updates": 0})
        assert await pictured_prompt(off, pictures) == ((), "")
        assert await pictured_prompt(experiment, pictures) == ((2, 3), arrays_of("whole"))
        assert process.asked == ["broken", "whole"]
        short = experiment_of(Path("none"), rollout={"max_prompt_tokens": 1})
        assert await pictured_prompt(short, pictures) == ((), "")

    run_virtual(main)


def test_a_process_that_does_not_start_ends_the_run() -> None:
    async def main(clock: Clock) -> None:
        prompts = prompts_of(Process(clock, ConfigurationError("images without a processor")), clock)
        with pytest.raises(ConfigurationError, match="images without a processor"):
            await prompts.prepare(pictured("whole"))

    run_virtual(main)


def test_an_evaluation_counts_what_it_cannot_show_as_failed() -> None:
    tasks = [pictured("broken"), *(pictured(str(i)) for i in range(3))]

    async def main(clock: Clock) -> Any:
        asked: list[Any] = []

        async def generate(request: Any, watch: Any = None, /) -> Any:
            asked.append(request)
            raise OSError("no engine here")

        tokenizer, settings = PlainTokenizer(), experiment_of(Path("none"), rollout={"retries": 0}).rollout
        rollouts = await attempt_tasks(
            tasks,
            rollouts=SingleTurn(TurnSampler(generate, tokenizer, settings, clock, run_seed=0)),
            verifier=FakeVerifier(lambda task, response: 1.0, clock),
            scored=ScoredText(tokenizer),
            clock=clock,
            prompts=prompts_of(Process(clock), clock),
            samples_per_task=2,
            version=0,
            concurrent=4,
        )
        return rollouts, len(asked)

    rollouts, asked = run_virtual(main)
    assert asked == 6  # of the others: nothing is sampled for what isn't shown
    causes = [rollout.failure.cause for rollout in rollouts[:2]]
    assert causes == ["broken can't be read as a picture"] * 2
    assert not any(rollout.failure.infrastructure for rollout in rollouts[:2])
    record = evaluation_record(rollouts, split="test", phase="after", step=0, tasks=tasks, duration_s=1.0, time_s=1.0)
    assert (record.samples, record.failed) == (0, 8)


def test_check_ends_and_says_what_would_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the limit it would wait for an hour."""
    experiment, made = experiment_of(tmp_path), {"whole": (4, 1 << 20), "wide": (4, 3 << 20)}

    class Tried:
        def __init__(self, *given: object) -> None: ...

        async def prompt(self, task: Task, *, hold: bool) -> tuple[Task, Any, int]:
            await asyncio.sleep(3600 if task.task_id == "slow" else 0)
            tokens, size = made.get(task.task_id, (0, 0))
            unshown = "" if tokens else f"{task.task_id} can't be read"
            return Task(task_id=task.task_id, prompt="?", unshown=unshown), TokenIds(range(tokens)), size

        async def stop(self) -> None: ...

    def said(**sets: list[Task]) -> list[tuple[str, str]]:
        return [(one.level, one.message) for one in preflight.picture_findings(experiment, sets)]

    monkeypatch.setattr(preflight, "PictureClient", Tried)
    monkeypatch.setattr(preflight, "_LIMIT_S", 0.05)
    assert said(train=[pictured("slow")]) == [("warning", "1 prompts with pictures weren't made within 0.05 s")]
    monkeypatch.setattr(preflight, "_LIMIT_S", 30.0)
    warning, info = said(train=[pictured("whole"), pictured("wide")], test=[pictured("broken")])
    assert warning == ("warning", "1 of 3 prompts tried would fail their groups: broken can't be read")
    assert info[1].endswith("each replica and trainer keeps up to 6.0 MiB in memory")
    assert said(train=[pictured("broken")])[0][0] == "error"

"""What a run's ledger, metrics and report say of its sandboxes."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_sandboxes import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import step_record, synthetic_lines, write_run

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.orchestrator.actors.sandboxes import RunSandboxes, open_sandboxes
from headway.records.errors import WorkerDied
from headway.records.ledger import StepRecord
from headway.records.sandbox_statistics import (
    EDGES_S,
    Latencies,
    PoolStatistics,
    ReaperStatistics,
    SandboxStatistics,
)
from headway.report.sandboxes import latency_rows, sandbox_sentences
from headway.report.watch.run_series import names
from headway.report.watch.view_report import report
from headway.report.watch.watched_runs import WatchedRun
from headway.rollout.environment import Environment
from headway.rollout.hosting.client import EnvironmentPool
from headway.rollout.hosting.service import EnvironmentService
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock, VirtualClock, run_virtual
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import WorkerSpec
from headway.telemetry.metrics import histograms, scalars
from tests.support.simulated_run import small_run


def latencies(*seconds: float) -> Latencies:
    found = Latencies()
    for one in seconds:
        found = found.with_duration(one)
    return found


def seen(execs: int, live: int = 1, **changes: Any) -> SandboxStatistics:
    pool = PoolStatistics(
        execs=execs, started=execs, live=live, capacity=4, peak=live, exec=latencies(*execs * [0.003])
    )
    return SandboxStatistics(pool=msgspec.structs.replace(pool, **changes), injected={"exec lost": execs})


COUNTS = st.integers(min_value=0, max_value=50)


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=4))
def test_what_workers_count_adds_up_and_what_came_before_is_taken_off(workers: list[tuple[int, int]]):
    before = SandboxStatistics.total([seen(first) for first, _ in workers])
    after = SandboxStatistics.total([seen(first + more, exec_failures={"x": more}) for first, more in workers])
    grown = sum(more for _, more in workers)
    since = after.since(before)
    assert (since.pool.execs, since.pool.exec.count, since.injected.get("exec lost", 0)) == (grown, grown, grown)
    assert since.pool.exec_failures.get("x", 0) == grown
    assert since.pool.exec.total_s == pytest.approx(0.003 * grown)
    assert (after.pool.live, after.pool.capacity) == (len(workers), 4 * len(workers))
    assert after.counted().pool.execs == after.pool.execs
    assert after.counted().pool.live == after.counted().pool.capacity == 0


# --- the pool of workers ----------------------------------------------------------------------------------------------


class ScriptedWorker:
    """Answers each look with what its test says; None: never."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.says: SandboxStatistics | None = SandboxStatistics()
        self.events: BoundedQueue[Any] = BoundedQueue(8)
        self.waits = Waits(lambda: 0.0)
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def call(self, method: str, number: int, *arguments: Any) -> None:
        if not self.alive:
            raise self.died.result()
        answer = self.says if method == "submit_sandboxes" else None
        if self.says is not None or method != "submit_sandboxes":
            await self.events.put((number, True, answer, 0.0))

    def die(self) -> None:
        self.died.set_result(WorkerDied(self.name, "killed by signal 9"))
        self.events.close()

    async def stop(self, grace_s: float = 5.0) -> None:
        if self.alive:
            self.die()


class ScriptedLauncher:
    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.specs: list[WorkerSpec] = []

    async def start(self, spec: WorkerSpec) -> Any:
        self.specs.append(spec)
        self.workers.append(ScriptedWorker(spec.name))
        return self.workers[-1]


def pooled(
    main: Callable[[EnvironmentPool, ScriptedLauncher], Any], answer: Callable[[Any], Any] = lambda it: it
) -> Any:
    async def whole(clock: Clock) -> Any:
        launcher = ScriptedLauncher()
        settings = EnvironmentConfig(name="python_tool", workers=2)
        pool = EnvironmentPool(launcher, settings, SandboxConfig(), clock, sandboxes="")
        await pool.start()
        try:
            return await main(pool, launcher)
        finally:
            await pool.stop()

    return run_virtual(whole)


def test_a_worker_that_dies_takes_its_sandboxes_along_and_no_count():
    async def main(pool: EnvironmentPool, launcher: ScriptedLauncher) -> None:
        first, second = launcher.workers
        first.says, second.says = seen(5, live=2), seen(7, live=3)
        found = await pool.sandboxes()
        assert (found.pool.execs, found.pool.live, found.pool.capacity) == (12, 5, 8)
        async with pool.lease("one that has served is replaced at once"):
            pass
        first.die()
        dead = await pool.sandboxes()
        assert (dead.pool.execs, dead.pool.live, dead.pool.capacity) == (12, 3, 4)
        async with pool.lease("rollout"):
            third = launcher.workers[2]
            third.says = seen(1)
            again = await pool.sandboxes()
        assert again.pool.execs == 13
        assert again.since(dead).pool.exec.count == 1
        assert all(count >= 0 for count in again.since(found).pool.exec.counts)

    pooled(main)


@pytest.mark.parametrize(("live", "starts", "workers"), [(64, 8, 1), (64, 8, 3), (7, 4, 4), (4, 2, 4)])
def test_workers_share_as_many_sandboxes_as_there_may_be(live: int, starts: int, workers: int):
    async def whole(clock: Clock) -> list[dict[str, Any]]:
        launcher = ScriptedLauncher()
        settings = EnvironmentConfig(name="python_tool", workers=workers)
        pool = EnvironmentPool(launcher, settings, SandboxConfig(live=live, starts=starts), clock, sandboxes="")
        await pool.start()
        await pool.stop()
        return [spec.arguments["sandbox"] for spec in launcher.specs]

    shares = run_virtual(whole)
    assert sum(share["live"] for share in shares) == live
    assert max(share["live"] for share in shares) - min(share["live"] for share in shares) <= 1
    assert sum(share["starts"] for share in shares) == max(starts, workers)
    assert all(share["live"] >= share["starts"] >= 1 for share in shares)


def test_a_worker_that_is_busy_is_taken_to_be_as_it_was():
    async def main(pool: EnvironmentPool, launcher: ScriptedLauncher) -> None:
        for worker in launcher.workers:
            worker.says = seen(3)
        before = await pool.sandboxes()
        launcher.workers[0].says = None
        assert await pool.sandboxes() == before

    pooled(main)


def test_environments_without_sandboxes_say_nothing_of_them():
    async def main(pool: EnvironmentPool, launcher: ScriptedLauncher) -> None:
        assert not (await pool.sandboxes()).any

    pooled(main)


# --- one worker -------------------------------------------------------------------------------------------------------


class Plain(Environment):
    """Uses no sandbox."""


@asynccontextmanager
async def fake_ones(settings: SandboxConfig, clock: Clock, **named: Any) -> AsyncIterator[RunSandboxes]:
    del clock
    async with open_sandboxes(settings, made := VirtualClock(), backend=FakeBackend(made), **named) as sandboxes:
        yield sandboxes


@pytest.mark.parametrize(("name", "uses"), [("python_tool", True), (f"{__name__}:Plain", False)])
def test_a_worker_tells_of_its_pool_where_its_environment_uses_sandboxes(name: str, uses: bool):
    emitted: queue.Queue[tuple[int, bool, Any, float]] = queue.Queue()
    context = type("Context", (), {"emit": staticmethod(emitted.put)})
    service = EnvironmentService(
        context,
        environment=EnvironmentConfig(name=name).model_dump(),
        sandbox=SandboxConfig(live=3).model_dump(),
        sandboxes=f"{__name__}:fake_ones",
    )
    try:
        service.submit_sandboxes(4)
        number, well, told, _ = emitted.get(timeout=30)
    finally:
        service.close()
    assert (number, well) == (4, True), told
    if uses:
        assert told.pool.capacity == 3
        assert told.injected == {}
    else:
        assert told == SandboxStatistics()


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_each_step_of_a_run_has_what_its_sandboxes_did_in_it(monkeypatch: pytest.MonkeyPatch):
    looks = iter(range(200, 1000, 10))  # an evaluation before the run had 200

    async def look() -> SandboxStatistics:
        return seen(next(looks), live=2)

    monkeypatch.setattr("headway.orchestrator.assembly.no_sandboxes", look)
    steps = small_run(steps=5).steps
    assert [step.sandboxes.pool.execs for step in steps] == [10] * len(steps)
    assert all(step.sandboxes.pool.live == 2 for step in steps)


def test_a_run_without_sandboxes_has_none():
    steps = small_run(steps=3).steps
    assert [step.sandboxes for step in steps] == [None] * 3
    assert "sandboxes" not in msgspec.to_builtins(steps[0])
    assert not [name for name in scalars(steps[0]) if name.startswith("sandboxes/")]
    assert sandbox_sentences(steps) == latency_rows(steps) == []


# --- metrics and report -----------------------------------------------------------------------------------------------

DRILLED = SandboxStatistics(
    pool=PoolStatistics(
        used=3,
        capacity=4,
        peak=4,
        live=3,
        paused=1,
        leaked=2,
        started=90,
        start_failures={"infrastructure": 10},
        execs=200,
        exec_failures={"model_code": 30, "infrastructure": 10},
        exec=latencies(0.003, 0.003, 0.1),
        queue=latencies(10_000.0),
    ),
    reaper=ReaperStatistics(checks=4, owners=1, sandboxes=6),
    injected={"create slow": 3},
)


def test_metrics_have_the_documented_names():
    record = step_record(1, sandboxes=DRILLED)
    found = {name: value for name, value in scalars(record).items() if name.startswith("sandboxes/")}
    assert found["sandboxes/leaked"] == 2
    assert found["sandboxes/exec_failures_model_code"] == 30
    assert found["sandboxes/start_failures_infrastructure"] == 10
    assert found["sandboxes/exec_p50_s"] == pytest.approx(0.004)
    assert 0.1 <= found["sandboxes/exec_p99_s"] < 0.142
    assert "sandboxes/start_p50_s" not in found, "none was made"
    assert found["sandboxes/reaped_sandboxes"] == 6
    assert found["sandboxes/injected_create_slow"] == 3
    table = (Path(__file__).parents[3] / "docs/sandboxes.md").read_text()
    for name in ("used", "oldest_wait_s", "leaked", "breaker_open", "started", "lost", "execs", "reaped_owners"):
        assert f"sandboxes/{name}" in found
        assert f"`sandboxes/{name}`" in table or f"`{name}`" in table


def test_histograms_keep_every_count_between_their_edges():
    found = histograms(step_record(1, sandboxes=DRILLED))
    assert "sandboxes/start_s" not in found
    histogram = found["sandboxes/exec_s"]
    assert sum(histogram.counts) == 3
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert histogram.edges == sorted(histogram.edges)
    assert histogram.edges[0] < 0.003 <= histogram.edges[1]
    assert found["sandboxes/queue_s"].edges == [EDGES_S[-1], 2 * EDGES_S[-1]]


def test_the_page_has_a_section_on_sandboxes_where_there_are_any(tmp_path: Path):
    lines = synthetic_lines(steps=6)
    without = report(WatchedRun("without", write_run(tmp_path / "without", lines)))
    assert "Sandboxes" not in [section["title"] for section in without["sections"]]
    with_some = [
        msgspec.structs.replace(line, sandboxes=DRILLED) if isinstance(line, StepRecord) else line for line in lines
    ]
    run = WatchedRun("with", write_run(tmp_path / "with", with_some))
    section = next(section for section in report(run)["sections"] if section["title"] == "Sandboxes")
    assert section["sentences"] == sandbox_sentences([line for line in with_some if isinstance(line, StepRecord)])
    text = " ".join(sandbox_sentences([line for line in with_some if isinstance(line, StepRecord)]))
    assert "540 were started and 1,200 commands run" in text
    assert "Of 600 starts 10.0% failed: 60 infrastructure." in text
    assert "60 infrastructure, 180 model code" in text
    assert "LEAKED: 2" in text
    assert "6 of 1 owners" in text
    assert "Faults on purpose (HEADWAY_INJECT_SANDBOX_FAULTS): 18 create slow" in text
    assert "a command, asked to answered" in [row[0] for row in section["rows"]]
    assert {"How long they take", "How many there are"} <= {one["title"] for one in names(run)["series"]}

"""Workflows in real processes: calls, channels, messages, deaths, and errors that say where."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import flow_workers
import numpy as np
import pytest
import tiny_run
from flow_workers import Doubles, Hangs, Large, Mortal, PingPong, Publisher, Remembers, Shared, Subscriber, double_all
from node_processes import KEY, namespaces, no_namespaces, start_agent

from headway.flow.run import Flow, run
from headway.flow.worker import Worker
from headway.records.errors import ConfigurationError, NoProgress, RemoteError, WorkerDied
from headway.records.execution import ExecutionPlan, StagePlacement
from headway.runtime.nodes.handshake import KEY_VARIABLE


class Forgetful(Worker):
    """Neither stateless nor with a state to hand on."""


HANGS = Path(flow_workers.__file__).read_text()
ONE = {"double": "cpu:0"}
TWO = {"double": ["cpu:0", "cpu:1"]}
TWICE = {"double": ["cpu:0", "cpu:0"]}


@pytest.mark.parametrize("plan", [ONE, TWO, TWICE])
def test_items_go_through_workers_and_come_back(plan: dict[str, Any]):
    assert sorted(run(double_all, plan, 20)) == [2 * number for number in range(20)]


def test_calls_go_to_all_to_one_or_in_shares():
    async def workflow(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        assert len(group) == 2
        call = group.sleep(0.05)
        assert await call == [0.05, 0.05]
        assert all(0.05 <= seconds < 5 for seconds in call.durations)
        assert await group.on(1).sleep(0.0) == 0.0
        rated = await group.sharded("texts", key="id").rate(texts=[{"id": n} for n in "abc"])
        assert [one["rank"] for one in rated] == [0, 1, 1]
        assert await group.sharded("matrix").rows(matrix=np.zeros((5, 2))) == [2, 3]
        with pytest.raises(
            ConfigurationError, match=r"flow_workers.py:\d+\): rank 1 returned another order of samples"
        ):
            await group.sharded("texts", key="id").reversed_rate(texts=[{"id": n} for n in "abc"])
        with pytest.raises(AttributeError, match=r"Doubles has no method 'rnu'; valid: .*rate"):
            group.rnu()
        with pytest.raises(ConfigurationError, match="there is no rank 2; it has 2"):
            group.on(2)

    run(workflow, TWO)


def test_workers_swap_messages_without_the_workflow():
    async def workflow(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        first, second = group.on(0).swap("double-1", {"x": np.arange(3)}), group.on(1).swap("double-0", "y" * 100_000)
        assert await first == "y" * 100_000
        assert (await second)["x"].tolist() == [0, 1, 2]

    run(workflow, TWO)


def test_an_error_carries_the_workers_traceback():
    async def awaited(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        with pytest.raises(RemoteError, match="ValueError: no such text") as caught:
            await group.fail("no such text")
        assert "flow_workers.py" in caught.value.traceback

    async def unawaited(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        group.fail("seen at once")
        await flow.channel("never").get()

    run(awaited, ONE)
    with pytest.raises(RemoteError, match="seen at once"):
        run(unawaited, ONE)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_dead_worker_is_an_event_and_its_items_are_delivered_again(tmp_path: Path, restarts: int):
    arguments = (6, str(tmp_path / "died"))
    if not restarts:
        with pytest.raises(WorkerDied, match="double-0 died: killed by SIGKILL"):
            run(double_all, ONE, 20, arguments, 0)
        return
    doubled = Counter(run(double_all, ONE, 20, arguments, 1, directory=tmp_path / "run"))
    assert set(doubled) == {2 * number for number in range(20)}  # each at least once
    events = (tmp_path / "run" / "workflow.jsonl").read_text()
    assert "items that double-0 had received are delivered again" in events
    assert "double_restarted" in events


def test_items_in_a_channel_outlive_the_worker_that_put_them(tmp_path: Path):
    """Small ones are in the channel itself, large ones in shared memory, which is the machine's."""

    async def workflow(flow: Flow) -> None:
        group, channel = await flow.workers("double", Doubles, restarts=1), flow.channel("items")
        await group.leave(channel, ["small", np.arange(10**6)], str(tmp_path / "died"))
        assert await channel.get() == "small"
        assert (await channel.get()).sum() == 10**6 * (10**6 - 1) // 2

    run(workflow, ONE)
    assert (tmp_path / "died").exists()


def test_a_restarted_worker_goes_on_from_the_state_of_the_last_step(tmp_path: Path):
    async def workflow(flow: Flow) -> list[int]:
        group = await flow.workers("double", Remembers, restarts=1)
        numbers: list[int] = []
        async for step in flow.steps(3):
            numbers += await group.add(1, str(tmp_path / "died") if step == 2 else "")
        return numbers

    assert run(workflow, ONE) == [1, 2, 3]
    assert (tmp_path / "died").exists()

    async def forgetful(flow: Flow) -> None:
        await flow.workers("double", Forgetful, restarts=1)

    with pytest.raises(ConfigurationError, match=r"restarts = 1: a new worker would lack what the dead one"):
        run(forgetful, ONE)


def test_a_large_state_of_a_dead_worker_was_in_shared_memory_alone(tmp_path: Path):
    states: list[Any] = []

    async def workflow(flow: Flow) -> list[float]:
        group = await flow.workers("double", Large, 1_000_000, restarts=1)
        sums: list[float] = []
        async for step in flow.steps(3):
            sums += await group.add(1.0, str(tmp_path / "died") if step == 2 else "")
            states.append(dict(flow._stages["double"]._states))
        return sums

    assert run(workflow, ONE) == [1e6, 2e6, 3e6]
    assert (tmp_path / "died").exists()
    held = states[-1]["double-0"]
    assert (held.owner, bool(held.segment)) == ("double-0", True)
    assert held.content is None
    assert held.size_bytes > 8_000_000


def test_a_step_that_hangs_is_named_and_its_worker_restarted(tmp_path: Path):
    line = next(number for number, text in enumerate(HANGS.splitlines(), 1) if "time.sleep" in text and "hang" in text)

    async def workflow(flow: Flow, restarts: int) -> int:
        group = await flow.workers("double", Hangs, restarts=restarts)
        return await group.on(0).step(str(tmp_path / f"hung-{restarts}"))

    with pytest.raises(WorkerDied, match=rf'Timeout .*\n  File ".*flow_workers.py", line {line} in wait_for_ever'):
        run(workflow, ONE, 0)
    assert run(workflow, ONE, 1, directory=tmp_path / "run") == 3
    events = (tmp_path / "run" / "workflow.jsonl").read_text()
    assert f'flow_workers.py\\", line {line} in wait_for_ever' in events
    assert "double_restarted" in events
    assert f"line {line} in wait_for_ever" in (tmp_path / "run" / "logs" / "double-0.log").read_text()


def test_a_step_may_take_its_time_between_limited_blocks():
    async def workflow(flow: Flow) -> int:
        group = await flow.workers("double", Hangs)
        return await group.on(0).slow_but_never_hanging()

    assert run(workflow, ONE) == 4


SCRIPT = """
from dataclasses import dataclass
from flow_workers import Keeps
from headway.api import Worker, run

@dataclass
class Settings:
    number: int

class Reads(Worker):
    def __init__(self, settings):
        assert type(settings) is Settings
        self.settings = settings
    def read(self):
        return self.settings

async def workflow(flow):
    reads = await flow.workers("reads", Reads, Settings(3))
    keeps = await flow.workers("keeps", Keeps, [Settings(4)])
    [mine], [[kept]] = await reads.read(), await keeps.read()
    assert type(mine) is type(kept) is Settings
    return mine.number + kept.number

if __name__ == "__main__":
    print(run(workflow, {"reads": "cpu:0", "keeps": "cpu:0"}))
"""


def test_arguments_may_be_of_classes_of_the_started_script(tmp_path: Path):
    """Of a worker that the script defines, and of one that a module defines."""
    script = tmp_path / "script_with_settings.py"
    script.write_text(SCRIPT)
    code, output, errors = tiny_run.run_program(script)
    assert (code, output.strip()) == (0, "7"), errors[-2000:]


def test_a_plan_is_not_changed_under_a_running_call():
    async def workflow(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        calls: list[Any] = []
        async for _ in flow.steps(4):
            calls.append(group.pause(0.5))

    with pytest.raises(ConfigurationError, match=r"can't be changed before step 2: double still has a call"):
        run(workflow, "auto", devices=["cpu:0", "cpu:1"], items=4)


def test_a_stage_that_moves_finds_what_a_stage_downstream_had_published(tmp_path: Path):
    async def workflow(flow: Flow) -> str:
        subscribers = await flow.workers("generate", Subscriber)
        await flow.workers("train", Publisher, str(tmp_path / "weights"))
        async for step in flow.steps(2):
            if step == 0:
                await subscribers.read(str(tmp_path / "weights"))
            else:
                places = {"generate": "cpu:1", "train": "cpu:0"}
                stages = {name: StagePlacement(devices=(device,)) for name, device in places.items()}
                await flow._move(ExecutionPlan(stages=stages))
        return (await subscribers.state())[0][0]

    assert run(workflow, {"generate": "cpu:0", "train": "cpu:1"}) == str(tmp_path / "weights")


@pytest.mark.timeout(60)
def test_stages_are_on_their_devices_when_they_compute_also_after_changes_of_plan():
    async def workflow(flow: Flow) -> tuple[list[int], list[float]]:
        groups = [await flow.workers(name, Shared) for name in ("a", "b")]
        bad: list[int] = []
        async for _ in flow.steps(5):
            bad += await flow.pipeline(range(8), *groups)
        return bad, [stage.busy_s for step in flow.history for stage in step.stages.values()]

    bad, busy_s = run(workflow, "auto", devices=["cpu:0", "cpu:1"], items=8)
    assert set(bad) == {0}
    assert all(0.1 < seconds < 2.0 for seconds in busy_s)  # 8 items of 20 ms a stage


def test_a_cancelled_get_takes_no_item_with_it():
    async def workflow(flow: Flow) -> list[int]:
        group = await flow.workers("double", Shared)
        channel = flow.channel("numbers")
        waiting = group.on(0).impatient(channel, 5)
        await asyncio.sleep(0.05)
        for number in range(5):
            await channel.put(number)
            await asyncio.sleep(0.03)
        channel.close()
        return await waiting

    assert sorted(run(workflow, ONE)) == [0, 1, 2, 3, 4]


def test_gets_of_two_tasks_of_the_workflow_release_only_their_own_items():
    async def workflow(flow: Flow) -> int:
        channel = flow.channel("arrays", items=4, bytes=4_000_000)
        putting = asyncio.create_task(channel.put_all([np.full(100_000, float(number)) for number in range(12)]))

        async def total() -> float:
            return sum([float(array[-1]) async for array in channel])

        gets = [asyncio.create_task(total()) for _ in range(3)]
        await putting
        channel.close()
        return int(sum(await asyncio.gather(*gets)))

    assert run(workflow, {}) == sum(range(12))


def test_turns_of_two_tasks_do_not_overlap():
    async def workflow(flow: Flow) -> list[float]:
        return await (await flow.workers("double", Shared)).on(0).in_two_tasks()

    assert run(workflow, ONE)[0] >= 0.0


@pytest.mark.timeout(60)
def test_a_death_while_it_is_built_frees_the_devices(tmp_path: Path):
    async def workflow(flow: Flow) -> tuple[int, int]:
        with pytest.raises(WorkerDied):
            await flow.workers("a", Mortal, str(tmp_path / "died"), restarts=2)
        other = await flow.workers("b", Mortal, str(tmp_path / "died"))
        return await other.on(0).answer(), 1

    assert run(workflow, {"a": "cpu:0", "b": "cpu:0"}) == (42, 1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"double": []}, "at least one device"),
        ({"double": "b/cpu:0"}, "node 'b' needs cluster"),
        ({"stages": {"double": {"devices": ["cpu:0"], "chunks": 2}}}, "unknown field"),
    ],
)
def test_plans_that_can_not_be_are_refused(plan: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        run(double_all, plan, 1)


def test_a_folder_holds_one_workflow(tmp_path: Path):
    run(double_all, ONE, 1, directory=tmp_path)
    with pytest.raises(ConfigurationError, match="has the steps of another workflow"):
        run(double_all, ONE, 1, directory=tmp_path)
    with pytest.raises(ConfigurationError, match="run has no option stal_s; valid: devices, items, directory, resume"):
        run(double_all, ONE, 1, stal_s=1)


def test_a_resumed_workflow_numbers_its_steps_on(tmp_path: Path):
    async def workflow(flow: Flow, count: int, start: int | None) -> list[int]:
        await flow.workers("double", Doubles)
        return [step async for step in flow.steps(count, start)]

    assert run(workflow, ONE, 2, None, directory=tmp_path, resume=True) == [0, 1]
    with (tmp_path / "workflow.jsonl").open("a") as file:
        file.write('{"kind":"flow_st')  # torn by a kill
    assert run(workflow, ONE, 2, None, directory=tmp_path, resume=True) == [2, 3]
    assert run(workflow, ONE, 2, 3, directory=tmp_path, resume=True) == [3, 4]  # from a checkpoint of step 2
    lines = [json.loads(line) for line in (tmp_path / "workflow.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "flow_step"] == [0, 1, 2, 3, 3, 4]


@pytest.mark.timeout(60)
def test_stages_that_only_send_messages_are_planned():
    async def workflow(flow: Flow) -> tuple[ExecutionPlan, float]:
        act, simulate = await flow.workers("act", PingPong), await flow.workers("simulate", PingPong)
        async for _ in flow.steps(4):
            calls = [act.rounds("simulate", 10, True), simulate.rounds("act", 10, False)]
            await asyncio.gather(*(call.wait() for call in calls))
        return flow.plan, flow.history[-1].seconds

    plan, seconds = run(workflow, "auto", devices=["cpu:0"], items=8)
    assert plan.expected_s is not None
    assert 0.19 < plan.expected_s < 5 * seconds  # ten rounds of two turns of 10 ms


def test_a_call_of_a_worker_killed_from_outside_fails_at_once():
    async def workflow(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        call = group.on(0).pause(60.0)
        await asyncio.sleep(0.2)
        os.kill(group.slots[0].worker.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(WorkerDied):
                await call
        assert await group.on(1).sleep(0.0) == 0.0

    run(workflow, TWO)


@pytest.mark.slow
def test_what_waits_for_ever_is_named(tmp_path: Path):
    async def unread(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        await group.fill(flow.channel("answers", items=4), 10)

    async def empty(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        await group.take(flow.channel("prompts"), 1)

    async def computing(flow: Flow) -> float:
        group = await flow.workers("double", Doubles)
        return await group.on(0).sleep(3.0)

    with pytest.raises(
        NoProgress, match=r"double-0 waits for space in channel answers; no worker reads channel answers"
    ):
        run(unread, ONE, stall_s=1.0)
    with pytest.raises(NoProgress, match=r"double-0 waits for items of channel prompts"):
        run(empty, ONE, stall_s=1.0)
    assert run(computing, ONE, stall_s=1.0) == 3.0


def test_plans_and_arguments_that_do_not_fit_are_refused():
    async def undeclared(flow: Flow) -> None:
        await flow.workers("judge", Doubles)

    async def other_stages(flow: Flow) -> None:
        await flow.workers("double", Doubles)
        async for _ in flow.steps(1):
            pass

    async def unpicklable(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        await group.sleep({"seconds": [lambda: 1]})

    async def unpicklable_worker(flow: Flow) -> None:
        await flow.workers("double", Doubles, lambda: 1)

    async def too_large(flow: Flow) -> None:
        await flow.channel("small", bytes=10).put("more than ten bytes")

    async def local_class(flow: Flow) -> None:
        class Local(Worker):
            pass

        await flow.workers("double", Local)

    async def no_worker(flow: Flow) -> None:
        await flow.workers("double", flow_workers.Flow)  # pyright: ignore[reportArgumentType]

    for workflow, plan, message in (
        (undeclared, ONE, r"stage 'judge' \(.*test_flow.py:\d+\): the plan has no devices for it; it has: double"),
        (other_stages, {**ONE, "judge": "cpu:1"}, r"the plan has stages that the workflow doesn't: judge; it has: dou"),
        (unpicklable, ONE, r"double-0\.sleep.*seconds.*can't be (sent|pickled)"),
        (unpicklable_worker, ONE, r"arguments of stage 'double'.*can't be (sent|pickled)"),
        (too_large, ONE, r"channel small: an item of \d+ bytes is larger than the channel \(10 bytes\)"),
        (local_class, ONE, r"Local .*must be defined at the top level of a module"),
        (no_worker, ONE, r"must be a class that extends headway.flow.Worker"),
        (double_all, {"double": "cpu:99"}, r"cpu:99"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run(workflow, plan, *([3] if workflow is double_all else []))


def test_nothing_is_left_in_shared_memory(tmp_path: Path):
    folders: list[str] = []

    async def workflow(flow: Flow) -> None:
        group = await flow.workers("double", Doubles)
        folders.append(str(flow._context.machines.settings.folder))
        assert os.listdir(folders[0])
        channel = flow.channel("arrays")
        for _ in range(3):
            await channel.put(np.ones(1_000_000))
        held = group.on(0).hold(channel)
        await asyncio.sleep(0.3)
        os.kill(group.slots[1].worker.pid, signal.SIGKILL)
        held.cancel()

    run(workflow, TWO)
    assert not os.path.exists(folders[0])


@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
@pytest.mark.parametrize("encryption", ["none", "tls"])
def test_workers_on_two_machines(tmp_path: Path, encryption: str, monkeypatch: pytest.MonkeyPatch):
    """In network namespaces, whose /dev/shm is one, so that payloads take shared memory; calls and items cross TCP."""
    program = f"""
from flow_workers import double_all
from headway.config.cluster import ClusterConfig
from headway.flow.run import run
cluster = ClusterConfig(address="10.77.0.1:7400", nodes={{"b": ""}}, encryption={encryption!r})
print(sorted(run(double_all, {{"double": ["cpu:0", "b/cpu:0"]}}, 20, cluster=cluster)))
"""
    script = tmp_path / "double.py"
    script.write_text(program)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with namespaces() as (here, there):
        agent = start_agent("10.77.0.1:7400", "b", log=tmp_path / "agent.log", namespace=there)
        try:
            code, output, errors = tiny_run.run_program(script, namespace=here)
        finally:
            agent.kill()
            agent.wait()
    assert code == 0, errors[-2000:]
    assert output.strip() == str([2 * number for number in range(20)])

"""Loops that end together: the first error wins and names its loop."""

from __future__ import annotations

import asyncio
import signal

import pytest

from headway.records.errors import WorkerDied
from headway.runtime.clock import run_virtual
from headway.runtime.supervision import LoopReturned, cancel_all, end_group, spawn, supervise


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_loop_that_returns_ends_everything_and_is_named():
    ended: list[str] = []

    async def collect() -> None:
        try:
            await forever()
        finally:
            ended.append("collect")

    async def dispatch() -> None:
        await asyncio.sleep(1)

    with pytest.raises(LoopReturned, match="loop 'dispatch' returned unexpectedly"):
        run_virtual(supervise({"dispatch": dispatch, "collect": collect}))
    assert ended == ["collect"]


def test_the_first_error_is_raised_itself_with_the_loop_and_later_errors_as_notes():
    async def train() -> None:
        await asyncio.sleep(1)
        raise WorkerDied("trainer-0", "killed by SIGKILL (9)")

    async def collect() -> None:
        try:
            await forever()
        finally:
            raise ValueError("while leaving")

    with pytest.raises(WorkerDied) as caught:
        run_virtual(supervise({"collect": collect, "train": train}))
    notes = "\n".join(caught.value.__notes__)
    assert "in loop 'train'" in notes
    assert "then: ValueError: while leaving (in loop 'collect')" in notes


def test_until_ends_in_order_and_gives_its_result():
    cancelled: list[str] = []

    async def train() -> int:
        await asyncio.sleep(1)
        return 7

    async def other() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append("other")
            raise

    assert run_virtual(supervise({"train": train, "other": other}, until="train")) == 7
    assert cancelled == ["other"]


def test_an_error_while_the_others_are_ended_is_not_swallowed():
    async def train() -> None:
        await asyncio.sleep(1)

    async def other() -> None:
        try:
            await forever()
        finally:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_virtual(supervise({"train": train, "other": other}, until="train"))


def test_being_cancelled_cancels_all_loops():
    async def main() -> list[bool]:
        task = asyncio.create_task(supervise({"a": forever, "b": forever}))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [other.done() for other in asyncio.all_tasks() if other is not asyncio.current_task()]

    assert run_virtual(main()) == []


def test_until_must_be_one_of_the_loops():
    with pytest.raises(ValueError, match="'trian' is none of the loops"):
        run_virtual(supervise({"train": forever}, until="trian"))


def test_an_error_out_of_a_task_group_inside_a_loop_is_raised_itself():
    async def fail(after_s: float, words: str) -> None:
        await asyncio.sleep(after_s)
        raise OSError(words)

    async def grouped() -> None:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(forever())
            inner.create_task(fail(1, "first"))

    with pytest.raises(OSError, match="first") as caught:
        run_virtual(supervise({"grouped": grouped, "other": forever}))
    assert caught.value.__notes__ == ["in loop 'grouped'"]


def test_spawned_tasks_are_kept_until_they_end_and_cancelled_ones_have_ended():
    async def main() -> None:
        tasks: set[asyncio.Task[int]] = set()

        async def work(fails: bool) -> int:
            try:
                await asyncio.sleep(60)
            finally:
                if fails:
                    raise ValueError("during clean-up")
            return 1

        spawned = [spawn(tasks, work(fails), "work") for fails in (False, True)]
        assert tasks == set(spawned)
        await asyncio.sleep(0)
        await cancel_all(None, *spawned)
        assert all(task.done() for task in spawned)
        await asyncio.sleep(0)
        assert not tasks

    asyncio.run(main())


def test_a_group_that_ignores_a_signal_gets_the_next():
    async def main() -> list[int | None]:
        ends: list[int | None] = []
        for script in ("exec sleep 60", "trap '' TERM; echo; sleep 60"):
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=pipe, process_group=0)
            assert process.stdout is not None
            if "echo" in script:
                await process.stdout.readline()
            await end_group(process, (0, signal.SIGTERM, signal.SIGKILL), 0.1)
            await process.wait()
            ends.append(process.returncode)
        return ends

    assert asyncio.run(main()) == [-signal.SIGTERM, -signal.SIGKILL]

"""Epochs on a real file system, in virtual time; another machine is another boot id."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.buffer.store import GroupBuffer
from headway.records.errors import ConfigurationError, EpochLost, RunLocked
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.epochs import register as epochs
from headway.runtime.epochs.lease import successor
from headway.runtime.epochs.register import EpochRegister, epoch_renewal, take_epoch

ORPHAN_S = 60.0


def group(index: int) -> Group:
    task = Task(task_id="t", prompt="p")
    return Group(index=index, task=task, prompt_ids=(1,), size=1, admitted_version=0, admitted_s=0.0)


def finished(index: int) -> FinishedGroup:
    return FinishedGroup(group=group(index), rollouts=(Rollout(group=index, member=0, prompt_ids=(1,)),))


@contextmanager
def on_machine(folder: Path, name: str) -> Iterator[None]:
    boot = folder / f"boot-{name}"
    boot.write_text(name)
    before, epochs._BOOT = epochs._BOOT, boot
    try:
        yield
    finally:
        epochs._BOOT = before


def test_epochs_count_up_and_a_process_of_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    async def main(clock: Clock) -> None:
        for number in (1, 2):
            assert (await take_epoch(tmp_path, ORPHAN_S, clock)).number == number  # killed: it releases nothing
        async with epoch_renewal(await take_epoch(tmp_path, ORPHAN_S, clock)):
            pass
        with on_machine(tmp_path, "b"):
            assert (await take_epoch(tmp_path, ORPHAN_S, clock)).number == 4  # it was released
        assert clock.now() == started_s
        assert len(list((tmp_path / "epoch").glob("*.json"))) <= 2

    started_s = run_virtual(lambda clock: _now(clock))
    run_virtual(main)


async def _now(clock: Clock) -> float:
    return clock.now()


def test_living_holder_elsewhere_is_named_and_a_dead_one_followed_when_it_has_expired(tmp_path: Path) -> None:
    said: list[str] = []

    async def main(clock: Clock) -> None:
        held = await take_epoch(tmp_path, ORPHAN_S, clock)
        keeper = asyncio.create_task(held.keep(lambda renew: renew()))
        with on_machine(tmp_path, "b"):
            with pytest.raises(RunLocked, match=r"in use: process \d+ on .* renews epoch 1"):
                await take_epoch(tmp_path, ORPHAN_S, clock)
            keeper.cancel()
            started_s = clock.now()
            second = await take_epoch(tmp_path, ORPHAN_S, clock, report=said.append)
            assert ORPHAN_S < clock.now() - started_s < 1.2 * ORPHAN_S
        second.require()
        with pytest.raises(EpochLost, match=r"process \d+ on .* has taken epoch 2"):
            held.require()

    run_virtual(main)
    assert len(said) == 1


def test_holder_of_a_machine_without_a_boot_id_is_waited_for(tmp_path: Path) -> None:
    async def main(clock: Clock) -> None:
        with on_machine(tmp_path, ""):
            await take_epoch(tmp_path, ORPHAN_S, clock)
            started_s = clock.now()
            assert (await take_epoch(tmp_path, ORPHAN_S, clock)).number == 2
            assert clock.now() - started_s > ORPHAN_S

    run_virtual(main)


def test_copied_folder_needs_a_persons_word(tmp_path: Path) -> None:
    async def main(clock: Clock) -> None:
        await take_epoch(tmp_path, ORPHAN_S, clock)
        copy = tmp_path / "copy"
        copy.mkdir()
        shutil.copytree(tmp_path / "epoch", copy / "epoch")
        with on_machine(tmp_path, "b"):
            with pytest.raises(ConfigurationError, match="--take-over"):
                await take_epoch(copy, ORPHAN_S, clock)
            assert (await take_epoch(copy, ORPHAN_S, clock, take_over=True)).number == 2

    run_virtual(main)


def test_orchestrator_that_cannot_renew_ends_and_commits_nothing_more(tmp_path: Path) -> None:
    async def main(clock: Clock) -> None:
        held = await take_epoch(tmp_path, ORPHAN_S, clock)
        buffer = GroupBuffer(tmp_path / "buffer.db", 4, clock, held.require)
        buffer.admit(group(0))
        buffer.finish_group(finished(0))
        away = (tmp_path / "epoch").rename(tmp_path / "unreachable")
        started_s = clock.now()
        with pytest.raises(EpochLost, match="renewed in"):
            async with epoch_renewal(held):
                await clock.sleep(1e6)
        assert clock.now() - started_s <= ORPHAN_S + 2 * ORPHAN_S / 5
        buffer.admit(group(1))
        with pytest.raises(EpochLost):
            buffer.finish_group(finished(1))
        buffer.close()
        away.rename(tmp_path / "epoch")
        again = GroupBuffer(tmp_path / "buffer.db", 4, clock)
        assert again.next_index == 1
        assert again.audit() == []

    run_virtual(main)


def test_stopped_process_that_nobody_followed_keeps_its_epoch(tmp_path: Path) -> None:
    async def main(clock: Clock) -> None:
        held = await take_epoch(tmp_path, ORPHAN_S, clock)
        await clock.sleep(100 * ORPHAN_S)  # without renewals
        held.require()

    run_virtual(main)


def test_swap_replaces_the_expected_record_alone_and_may_be_repeated(tmp_path: Path) -> None:
    register = EpochRegister(tmp_path)
    first = register.read()
    second = successor(first, "a")
    assert register.swap(first, second)
    assert register.swap(first, second)  # a network file system repeats a request whose answer was lost
    assert not register.swap(first, successor(first, "b"))
    assert EpochRegister(tmp_path).read() == second

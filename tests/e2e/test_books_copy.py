"""Runs whose books have a copy: the orchestrator and its disk are lost, and the run resumes from the copy."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from node_processes import namespaces, no_namespaces, start_agent
from test_nodes_run import start_run
from tiers import first

from headway.buffer.replication import AccountingReplica
from headway.buffer.store import GroupBuffer
from headway.records.rollout import Group
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher

needs_namespaces = pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


@pytest.mark.parametrize("fault", first(1, ["batch-committed:4", "step-computed:4", "log-durable:1"]))
def test_run_resumes_from_the_copy_after_its_own_books_are_lost(inputs: Any, tmp_path: Path, fault: str) -> None:
    """Nothing is trained twice, and no group that either side knew of is lost."""
    books, copy = tmp_path / "books", tmp_path / "copy"
    cluster = {"accounting_directory": str(books), "replicate_to": f":{copy}"}
    config = tiny_run.write_experiment(tmp_path, run={"steps": 8}, cluster=cluster, **inputs)
    assert tiny_run.train(config, fault=fault).process.returncode == -signal.SIGKILL
    shutil.rmtree(books)
    second = f"--cluster.replicate_to=:{books}"
    command = tiny_run.train(config, "--resume", f"--cluster.accounting_directory={copy}", second)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 8)
    report = tiny_run.audited(tmp_path / "run")
    assert report.groups["trained"] == 8 * 4
    assert set(report.groups) == {"trained"}


def test_lost_copy_is_reported_and_made_anew_while_the_run_goes_on(inputs: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    config = tiny_run.write_experiment(tmp_path, run={"steps": ENDLESS}, cluster={"replicate_to": f":{copy}"}, **inputs)
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: len(tiny_run.steps_of(run)) >= 2, "two steps")
        os.kill(int((copy / "lock").read_text()), signal.SIGKILL)
        command.until(lambda: tiny_run.events_of(run, "accounting_copied"), "the new copy")
        steps = len(tiny_run.steps_of(run))
        command.until(lambda: len(tiny_run.steps_of(run)) >= steps + 2, "two more steps")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 130, command.output
    assert len(tiny_run.events_of(run, "accounting_copy_lost")) == 1
    before = tiny_run.audited(run)
    for file in run.glob("buffer.db*"):
        file.unlink()
    for file in copy.glob("buffer.db*"):
        shutil.copy(file, run / file.name)
    after = tiny_run.audited(run)
    assert (after.completed_steps, after.groups, after.rollouts) == (
        before.completed_steps,
        before.groups,
        before.rollouts,
    )


def rows(path: Path) -> list[Any]:
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT * FROM groups ORDER BY 1").fetchall()


def test_transactions_while_the_whole_books_are_sent_follow_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.nodes.files.PART_BYTES", 1 << 16)
    monkeypatch.setattr("headway.buffer.replication._PAGES_AT_ONCE", 1)
    path, events = tmp_path / "buffer.db", list[str]()

    async def main() -> None:
        clock, folder = RealClock(), tmp_path / "copy"
        copy = AccountingReplica(
            LocalLauncher(clock), clock, f":{folder}", path, lambda name, detail, /, **_: events.append(name)
        )
        buffer = GroupBuffer(path, 1 << 20, journal=copy.journal)

        def admit() -> None:
            index = buffer.next_index
            task = Task(task_id=str(index), prompt="p" * 10_000)
            buffer.admit(Group(index=index, task=task, prompt_ids=(1,), size=2, admitted_version=0, admitted_s=0.0))

        for _ in range(500):
            admit()
        buffer.make_durable()
        starting = asyncio.create_task(copy.start())
        while not starting.done():
            admit()
            buffer.make_durable()
            await asyncio.sleep(0)
        await starting
        await copy.reached()
        assert rows(folder / "buffer.db") == rows(path)
        assert len(rows(path)) > 501
        await copy.stop()
        buffer.close()

    asyncio.run(main())
    assert not events
    assert not list(tmp_path.glob("accounting-copy-*"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
@pytest.mark.long
def test_second_resume_on_another_machine_is_refused_with_who_holds_the_run(inputs: Any, tmp_path: Path) -> None:
    """The other machine is a mount namespace with a boot id and a lock file of its own, as on a shared file system."""
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": ENDLESS},
        cluster={"disconnect_timeout_s": 5.0, "accounting_directory": str(tmp_path / "books")},
        **inputs,
    )
    run = tmp_path / "run"
    for name in ("boot", "lock", "books-lock"):
        (tmp_path / name).touch()
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: tiny_run.steps_of(run), "a step")
        stored = (run / "config.json").read_bytes()
        binds = {
            "boot": "/proc/sys/kernel/random/boot_id",
            "lock": f"{run}/lock",
            "books-lock": f"{tmp_path}/books/lock",
        }
        mounts = " && ".join(f"mount --bind {tmp_path / name} {place}" for name, place in binds.items())
        there = f"{mounts} && exec '{sys.executable}' -m headway.cli.main train {config} --quiet --resume"
        second = subprocess.run(
            ["unshare", "-m", "sh", "-c", there],
            capture_output=True,
            text=True,
            timeout=60.0,
            cwd=tiny_run.HERE,
            check=False,
        )
        assert second.returncode == 2, second.stderr
        assert f"in use: process {command.process.pid} on " in second.stderr
        assert (run / "config.json").read_bytes() == stored
        steps = len(tiny_run.steps_of(run))
        command.until(lambda: len(tiny_run.steps_of(run)) >= steps + 2, "two more steps")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 130, command.output
    tiny_run.audited(run)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.long
def test_run_resumes_on_the_node_that_has_the_copy_of_its_books(inputs: Any, tmp_path: Path) -> None:
    """The first machine ends with all of its processes, and its disk is lost; the next copy goes to a third machine."""
    run, books, copy, next_copy = (tmp_path / name for name in ("run", "books", "copy", "next"))
    cluster = {
        "address": "10.77.0.1:7400",
        "nodes": ["b", "c"],
        "disconnect_timeout_s": 10.0,
        "accounting_directory": str(books),
    }
    cluster["replicate_to"] = f"b:{copy}"
    config = tiny_run.write_experiment(tmp_path, run={"steps": 300, "directory": str(run)}, cluster=cluster, **inputs)
    with namespaces(3) as (here, there, elsewhere):
        holding = start_agent("10.77.0.1:7400", "b", log=tmp_path / "b.log", namespace=there)
        first = start_run(config, here)
        command = tiny_run.Command(first, run, tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(run)) >= 5, "five steps")
        holder = int((copy / "lock").read_text())
        assert os.readlink(f"/proc/{holder}/ns/net") == os.readlink(f"/proc/{holding.pid}/ns/net"), "it is on node b"
        for pid in subprocess.run(["ip", "netns", "pids", here], capture_output=True, text=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        first.communicate()
        shutil.rmtree(books)
        holding.kill()
        holding.wait()
        next_holding = start_agent("10.77.0.2:7400", "c", log=tmp_path / "c.log", namespace=elsewhere)
        places = {"address": "10.77.0.2:7400", "accounting_directory": str(copy), "replicate_to": f"c:{next_copy}"}
        second = start_run(config, there, "--resume", *(f"--cluster.{key}={value}" for key, value in places.items()))
        output, _ = second.communicate(timeout=120)
        assert second.returncode == 0, output + (tmp_path / "c.log").read_text()
        assert next_holding.wait(10) == 0
    tiny_run.require_whole(run, 300)
    report = tiny_run.audited(run)
    assert report.groups == {"trained": 300 * 4}
    for file in copy.glob("buffer.db*"):
        file.unlink()
    for file in next_copy.glob("buffer.db*"):
        shutil.copy(file, copy / file.name)
    assert tiny_run.audited(run).groups == report.groups


@pytest.mark.slow
@needs_namespaces
@pytest.mark.long
def test_of_two_resumes_on_two_machines_at_once_one_runs(inputs: Any, tmp_path: Path) -> None:
    """Each machine is a namespace with a boot id and lock files of its own, as on a shared file system; the run that
    both resume was killed on a third."""
    run, books = tmp_path / "run", tmp_path / "books"
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": ENDLESS, "directory": str(run)},
        cluster={"disconnect_timeout_s": 5.0, "accounting_directory": str(books)},
        **inputs,
    )
    with namespaces(3) as (here, *others):
        first = start_run(config, here)
        command = tiny_run.Command(first, run, tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(run)) >= 3, "three steps")
        first.kill()
        first.communicate()
        steps = len(tiny_run.steps_of(run))
        resumes = [start_run(config, other, "--resume", as_machine=tmp_path / other) for other in others]
        command.process = resumes[0]
        command.until(lambda: any(resume.poll() is not None for resume in resumes), "a refusal")
        (at,) = [index for index, resume in enumerate(resumes) if resume.poll() is None]
        refused, command.process = resumes[1 - at], resumes[at]
        said = refused.communicate()[0]
        assert refused.returncode == 2, said
        holder = command.process.pid
        assert "another process has taken epoch 2" in said or f"in use: process {holder} on " in said, said
        command.until(lambda: len(tiny_run.steps_of(run)) >= steps + 5, "five steps by the other one")
        os.kill(holder, signal.SIGINT)
        assert command.process.wait(90) == 130, command.process.communicate()[0]
    tiny_run.audited(run)

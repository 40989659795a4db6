"""Planted stalls in real runs: each is named by its cause, with process, file and line, and a healthy run has none.

Limits are a few seconds here; tests/slow/test_stalls_real_limits.py has the real ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import Command, events_of, steps_of, write_experiment, write_inputs

from headway.records.ledger import EventRecord

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

STALLED = tiny_run.HERE / "stalled_headway.py"
PIDS = Path("/sys/fs/cgroup/pids")
VERIFIER = {"timeout_s": 120.0, "workers": 1}


@contextmanager
def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stall: str = "fakes", *, steps: int = 3, **sections: Any
) -> Iterator[Command]:
    """A run without an end, once it has completed ``steps`` steps; STALL_FILE is there then."""
    monkeypatch.setattr(tiny_run, "FAULTY", STALLED)
    monkeypatch.setenv("STALL_FILE", str(folder / "stall"))
    if not (folder / "model").exists():
        write_inputs(folder)
    length = {"steps": 10**6, "directory": str(folder / "run")} | sections.pop("run", {})
    ledger = {"trackers": [], "trace": not stall.startswith("fakes")}  # fakes have no spans
    config = write_experiment(folder, run=length, ledger=ledger, **sections)
    with tiny_run.headway("train", config, "--quiet", run=folder / "run", fault=stall) as command:
        command.until(lambda: len(steps_of(command.run)) >= steps, "steps")
        (folder / "stall").touch()
        yield command


def named(command: Command, *, of: str = "") -> EventRecord:
    """The first stall that is reported, of worker ``of`` if given; there may be no other worker's before. The
    orchestrator's loops may have one: their limits are short here, and they lag beside other tests."""

    own = of in ("", "orchestrator")

    def stalls() -> list[EventRecord]:
        return [event for event in events_of(command.run, "stalled") if own or event.worker != "orchestrator"]

    command.until(stalls, "a stall's name")
    stall = stalls()[0]
    assert stall.worker == of or not of, stall.detail
    assert "\n" not in stall.detail
    assert re.match(r"stalled \d+ s: ", stall.detail)
    return stall


def preloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = folder / "slow_fsync.so"
    source = tiny_run.HERE / "slow_fsync.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))


@pytest.mark.slow
def test_verifier_that_holds_the_interpreter_lock_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = VERIFIER | {"name": "stall_functions:holds_lock"}
    with running(tmp_path, monkeypatch, "fakes-verifier", verifier=verifier) as command:
        stall = named(command, of="verifier-0")
        assert re.search(
            r"for verifier-0, which holds the interpreter's lock in support/stall_functions\.py:\d+ holds_lock",
            stall.detail,
        )
        assert "verifier.score" in stall.detail
        assert "stall_functions.py" in str(stall.data["stacks"])


@pytest.mark.slow
def test_verifier_that_writes_to_a_full_pipe_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = VERIFIER | {"name": "stall_functions:fills_pipe"}
    with running(tmp_path, monkeypatch, "fakes-verifier", verifier=verifier) as command:
        stall = named(command, of="verifier-0")
        assert re.search(
            r"verifier\.score for verifier-0, which is in support/stall_functions\.py:\d+ fills_pipe", stall.detail
        )


@pytest.mark.slow
def test_hook_that_blocks_the_event_loop_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch, hooks={"is_valid_group": "stall_functions:blocks_loop"}) as command:
        stall = named(command, of="orchestrator")
        assert re.search(r"event loop is blocked in support/stall_functions\.py:\d+ blocks_loop", stall.detail)


def test_deadlock_of_two_hooks_is_named_with_both_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, monkeypatch, hooks={"is_valid_group": "stall_functions:first_then_second"}) as command:
        stall = named(command, of="orchestrator")
        assert re.search(r"blocked in support/stall_functions\.py:\d+ first_then_second", stall.detail)
        assert re.search(r"another thread is in support/stall_functions\.py:\d+ second_then_first", stall.detail)


@pytest.mark.slow
def test_fsync_that_hangs_is_named_as_a_commit_to_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preloaded(tmp_path, monkeypatch)
    with running(tmp_path, monkeypatch) as command:
        stall = named(command, of="orchestrator")
        assert re.search(r"blocked in a commit to buffer\.db, at headway/buffer/\w+\.py:\d+", stall.detail)


@pytest.mark.slow
def test_environment_that_never_replies_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(
        tmp_path,
        monkeypatch,
        model={"path": str(tmp_path / "model"), "template": "chat"},
        environment={"name": "stall_functions:NeverReplies", "timeout_s": 300.0},
        rollout={"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 40},
    ) as command:
        stall = named(command, of="environment-0")
        assert re.search(r"rollout \S+ waits in environment\.reply for environment-0, which is in ", stall.detail)
        assert re.search(r"support/stall_functions\.py:\d+ reply", stall.detail)


@contextmanager
def without_pids(worker: int) -> Iterator[None]:
    """A worker's process and its children in a control group in which nothing can be started any more."""
    group = PIDS / f"headway-stall-{os.getpid()}"
    group.mkdir()
    try:
        children = [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
        for task in Path(f"/proc/{worker}/task").iterdir():  # a child belongs to the thread that started it
            children += [int(pid) for pid in (task / "children").read_text().split()]
        for pid in {worker, *children}:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text("1")
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError, OSError):
                (PIDS / "cgroup.procs").write_text(pid)
        group.rmdir()


@pytest.mark.slow
@pytest.mark.skipif(not os.access(PIDS / "cgroup.procs", os.W_OK), reason="no control group of version 1 limits pids")
def test_sandbox_host_out_of_pids_is_named_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(
            tmp_path,
            monkeypatch,
            "none",
            model={"path": str(tmp_path / "model"), "template": "chat"},
            environment={"name": "stall_functions:UsesSandbox", "timeout_s": 300.0},
            sandbox={"live": 4, "limits": {"memory_bytes": 96 << 20, "disk_bytes": 16 << 20}},
            rollout={"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 40},
        ) as command,
        without_pids(command.pid_of("environment-0")),
    ):
        stall = named(command, of="environment-0")
        assert re.search(
            r"(rollout \S+ waits in environment\.reply for environment-0, which|"
            r"the train loop waits for a batch, while environment-0) reports: "
            r"sandbox host \S+ can't start a process: pids \d+ of 1, the control group \S+/headway-stall-\d+",
            stall.detail,
        )
        assert stall.lost_s < float(stall.data["expected_s"]) + 30.0


@pytest.mark.slow
def test_rank_that_skips_a_collective_is_named_by_the_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch, "collective", steps=0, trainer={"devices": ["cpu:0", "cpu:1"]}) as command:
        stall = named(command, of="trainer-0")
        assert re.search(r"trainer-1 waits in all_gather \d+ for trainer-0, which ", stall.detail)
        assert "headway/trainer/" in str(stall.data["stacks"])


@pytest.mark.slow
def test_generator_stuck_in_a_step_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, monkeypatch, "generator", steps=0) as command:
        stall = named(command, of="generator-0")
        assert re.search(r"for generator-0, which is in support/stalled_headway\.py:\d+ wait_in_kernel", stall.detail)


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["generator-0", "trainer-0"])
def test_stopped_worker_is_named_as_stopped(worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, monkeypatch, "none", steps=1) as command:
        os.kill(command.pid_of(worker), signal.SIGSTOP)
        assert f"{worker} is stopped by a signal" in named(command, of=worker).detail.replace(", which", "")


def test_policy_restart_replaces_the_worker_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = VERIFIER | {"name": "stall_functions:fills_pipe"}
    with running(tmp_path, monkeypatch, "fakes-verifier", verifier=verifier, run={"on_stall": "restart"}) as command:
        named(command, of="verifier-0")
        (tmp_path / "stall").unlink()
        command.until(lambda: events_of(command.run, "verifier_restarted"), "a restart")
        assert events_of(command.run, "verifier_died")[0].cause.startswith("stalled ")
        steps = len(steps_of(command.run))
        command.until(lambda: len(steps_of(command.run)) > steps + 3, "more steps")


# Beside load the verifier may be named before the loop: the second form is run by hand.
SECOND = pytest.param("stall_functions:blocks_loop", marks=[pytest.mark.slow, pytest.mark.long])


@pytest.mark.parametrize("hook", [pytest.param("", marks=pytest.mark.slow), SECOND])
def test_policy_end_ends_the_run_so_that_it_can_be_resumed(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"hooks": {"is_valid_group": hook}} if hook else {}
    verifier = VERIFIER | {"name": "stall_functions:fills_pipe"}
    with running(
        tmp_path, monkeypatch, "fakes-verifier", verifier=verifier, run={"on_stall": "end"}, **sections
    ) as command:
        assert command.wait() == (-signal.SIGKILL if hook else 130), command.output
        assert "stalled " in command.output
        assert len(events_of(command.run, "stalled")) == 1
    (tmp_path / "stall").unlink()
    done = len(steps_of(command.run))
    resumed = tiny_run.train(
        tmp_path / "experiment.toml", "--resume", f"--run.steps={done + 3}", fault="fakes-verifier"
    )
    assert resumed.process.returncode == 0, resumed.output
    tiny_run.audited(command.run)


@pytest.mark.slow
def test_healthy_run_has_no_stall_and_no_wait_graph_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_run, "FAULTY", STALLED)
    write_inputs(tmp_path)
    ended = tiny_run.train(write_experiment(tmp_path, run={"directory": str(tmp_path / "run"), "steps": 60}))
    assert ended.process.returncode == 0, ended.output
    assert not events_of(ended.run, "stalled")
    assert not (ended.run / "waits.json").exists()
    tiny_run.require_nothing_left(ended)

"""What is found before a run: at a provider, of an image, of this machine's limits; and that `check` says it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fake_sandboxes import FakeBackend, FakeSandbox

from headway.config.sandbox import SandboxConfig
from headway.config.schema import Experiment
from headway.orchestrator.actors.environments import open_multi_turn_host
from headway.orchestrator.preflight import sandboxes
from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    MIB,
    Capabilities,
    ExecResult,
    SandboxError,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
)
from headway.records.sandbox_statistics import Reaped
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox.faults import SHARE
from headway.sandbox.linux import cgroups
from headway.sandbox.machine import MachineLimits, machine_findings, pids_in_use, read_limits
from headway.sandbox.preflight import PROBE_CONTENT, findings

SPEC = SandboxSpec()
PROVIDER = SandboxConfig(backend="modal")


class Provider(FakeBackend):
    """``quota``: sandboxes of the account; ``images``: those that there are; its commands do what `sh` would."""

    def __init__(self, quota: int = 100, images: Sequence[str | None] = (None,), **settings) -> None:
        super().__init__(VirtualClock(), answer=self.shell, **settings)
        self.quota, self.images = quota, images
        self.can = Capabilities(backend="fake", memory_limit=True, process_limit=True, disk_limit=True)
        self.left: list[Reaped] = []
        self.shell_result = ExecResult(exit_code=0, stdout=PROBE_CONTENT)
        self.limit_holds = True
        self.stays = False

    def shell(self, argv: Sequence[str]) -> ExecResult:
        for box in self.sandboxes.values():
            box.files["preflight"] = PROBE_CONTENT
        hog = "head" in argv[-1]
        return ExecResult(exit_code=None, signal=9, oom=True) if hog and self.limit_holds else self.shell_result

    async def create(self, spec: SandboxSpec, **settings) -> FakeSandbox:
        if spec.root not in self.images:
            raise SandboxError(environment_failure(f"no image {spec.root!r}: give one of {self.images}"))
        box = await super().create(spec, **settings)
        if self.stays:
            box.die = lambda: None
        return box

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        if live > self.quota:
            return [f"the account may have {self.quota} sandboxes, {live} are needed: a smaller sandbox.live"]
        return []

    async def capabilities(self) -> Capabilities:
        return self.can

    async def reap(self) -> list[Reaped]:
        return self.left


def found_of(
    backend: FakeBackend, settings: SandboxConfig = PROVIDER, needed: int = 8, **more
) -> list[tuple[bool, str]]:
    found = run_virtual(findings(settings, backend, needed, **more))
    return [(finding.fatal, str(finding)) for finding in found]


def test_all_is_well_and_nothing_is_left():
    backend = Provider()
    assert found_of(backend) == []
    assert (backend.made, backend.sandboxes) == (1, {})


def test_a_quota_below_need_is_fatal_and_what_is_needed_is_bounded_by_live():
    ((fatal, said),) = found_of(Provider(quota=7))
    assert fatal
    assert "may have 7 sandboxes, 8 are needed: a smaller sandbox.live" in said
    assert found_of(Provider(quota=7), SandboxConfig(backend="modal", live=7)) == []


def test_a_bad_image_is_fatal_with_its_fix():
    ((fatal, said),) = found_of(Provider(images=["good"]), spec=SandboxSpec(root="bad"))
    assert fatal
    assert "no image 'bad': give one of" in said
    assert found_of(Provider(images=["good"]), spec=SandboxSpec(root="good")) == []


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ExecResult(exit_code=127, stderr=b"sh: not found"), "an image with /bin/sh"),
        (ExecResult(exit_code=1, stderr=b"Read-only file system"), "may write in their working directory"),
        (ExecResult(exit_code=0, stdout=b""), "may write in their working directory"),
    ],
)
def test_an_image_in_which_nothing_can_be_done_is_fatal(result: ExecResult, said: str):
    backend = Provider()
    backend.shell_result = result
    ((fatal, line),) = found_of(backend)
    assert fatal
    assert said in line
    assert backend.sandboxes == {}


def test_unbounded_memory_is_refused_unless_that_is_accepted_which_is_said():
    backend = Provider()
    backend.can = Capabilities(
        backend="fake", process_limit=True, disk_limit=True, missing=("no limit of memory: chown x",)
    )
    ((fatal, said),) = found_of(backend)
    assert fatal
    assert "chown x" in said
    assert "sandbox.allow_unbounded = true" in said
    assert backend.made == 0, "nothing runs before that is decided"
    ((fatal, said),) = found_of(backend, SandboxConfig(backend="modal", allow_unbounded=True))
    assert not fatal
    assert "can take all memory" in said


def test_a_limit_of_memory_that_doesnt_hold_is_found():
    backend = Provider()
    backend.limit_holds = False
    found = [line for fatal, line in found_of(backend, SandboxConfig(backend="docker", live=1)) if fatal]
    assert ["took 96 MiB and wasn't stopped" in line for line in found] == [True]


def test_what_dead_owners_left_is_removed_or_named():
    backend = Provider()
    backend.left = [Reaped(owner="owner-1-1-1", sandboxes=3), Reaped(owner="owner-2-2-2", sandboxes=1, stuck=True)]
    (removed, named) = found_of(backend)
    assert removed == (False, "removed what a dead owner had left, owner-1-1-1: 3 sandboxes")
    assert "owner-2-2-2" in named[1]
    assert "headway sandboxes reap" in named[1]


def test_one_that_is_there_after_its_end_is_found():
    backend = Provider()
    backend.stays = True
    ((fatal, said),) = found_of(backend)
    assert fatal
    assert "still there" in said


def test_a_backend_that_fails_otherwise_is_told_and_faults_on_purpose_are_loud(
    monkeypatch: pytest.MonkeyPatch,
):
    refused = Provider(failures=[infrastructure_failure("no token: set MODAL_TOKEN_ID", retry=False)])
    ((fatal, said),) = found_of(refused)
    assert fatal
    assert "set MODAL_TOKEN_ID" in said
    monkeypatch.setenv(SHARE, "0.05")
    ((fatal, said),) = found_of(Provider(), SandboxConfig(backend="modal"))
    assert not fatal
    assert f"{SHARE} = 0.05" in said
    assert "ON PURPOSE" in said


@pytest.mark.parametrize(
    ("limits", "fatal", "said"),
    [
        (MachineLimits(), None, ""),
        (MachineLimits(memory_bytes=64 * 512 * MIB, processes=64 * 128 + 32, namespaces=96), None, ""),
        (MachineLimits(memory_bytes=64 * 512 * MIB - 1), False, "limits.memory_bytes"),
        (MachineLimits(memory_bytes=100 * MIB), True, "100 MiB are left: a smaller sandbox.live"),
        (MachineLimits(processes=8000, processes_by="ulimit -u"), False, "limits.processes"),
        (MachineLimits(processes=100, processes_by="ulimit -u"), True, "raise it: ulimit -u"),
        (
            MachineLimits(namespaces=90, namespaces_by="user.max_net_namespaces"),
            True,
            "sysctl -w user.max_net_namespaces=",
        ),
    ],
)
def test_this_machines_limits(limits: MachineLimits, fatal: bool | None, said: str):
    found = list(machine_findings(limits, SPEC, 64))
    assert [finding.fatal for finding in found] == ([] if fatal is None else [fatal])
    assert all(said in str(finding) for finding in found)


def test_a_look_at_this_machine_finds_its_limits():
    seen = read_limits()
    assert seen.memory_bytes is not None
    assert seen.memory_bytes > MIB
    assert seen.processes is not None
    assert seen.processes_by


def test_pids_in_use_are_those_of_the_limit_that_is_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "loadavg").write_text("0.1 0.2 0.3 2/700 4242\n")
    (tmp_path / "sys/kernel/pid_max").write_text("32768\n")
    group = tmp_path / "job/step"
    group.mkdir(parents=True)
    monkeypatch.setattr(cgroups, "mounted", lambda: {"pids": group})
    for folder, used, most in ((group, "30", "max"), (group.parent, "64", "64")):
        (folder / "pids.current").write_text(used)
        (folder / "pids.max").write_text(most)
    assert pids_in_use(tmp_path) == f"pids 64 of 64, the control group {group.parent}"
    (group.parent / "pids.max").write_text("max")
    assert pids_in_use(tmp_path) == "pids 700 of 32768, sysctl kernel.pid_max"


def test_check_asks_where_an_experiment_uses_sandboxes(monkeypatch: pytest.MonkeyPatch, tmp_path):
    backend = Provider(quota=3)
    monkeypatch.setattr(sandboxes, "backend_of", lambda settings, **_: backend)
    experiment = Experiment.model_validate(
        {
            "run": {"directory": str(tmp_path / "run")},
            "model": {"path": "m"},
            "tasks": {"train": {"path": "t.jsonl"}},
            "sandbox": {"backend": "modal", "live": 4},
        }
    )
    assert sandboxes.sandbox_findings(experiment) == [], "its environment needs none"
    monkeypatch.setattr(sandboxes, "uses_sandboxes", lambda experiment: True)
    monkeypatch.setattr(sandboxes.asyncio, "run", run_virtual)
    error, warning = sandboxes.sandbox_findings(experiment)
    assert (error.level, error.key, warning.level, warning.key) == ("error", "sandbox", "warning", "sandbox.live")
    assert "may have 3 sandboxes, 4 are needed" in error.message
    assert "wait for one" in warning.message


def test_fewer_sandboxes_than_workers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(sandboxes, "backend_of", lambda settings, **_: Provider())
    monkeypatch.setattr(sandboxes.asyncio, "run", run_virtual)

    def experiment(name: str) -> Experiment:
        return Experiment.model_validate(
            {
                "run": {"directory": str(tmp_path / "run")},
                "model": {"path": "m"},
                "tasks": {"train": {"path": "t.jsonl"}},
                "queue": {"max_concurrent_rollouts": 8},
                "environment": {"name": name, "workers": 4},
                "sandbox": {"backend": "modal", "live": 3},
            }
        )

    unused = experiment("dialogue")
    used = experiment("python_tool")
    sandboxes.require_shares(unused)
    assert sandboxes.sandbox_findings(unused) == []
    (error,) = [one for one in sandboxes.sandbox_findings(used) if one.level == "error"]
    for key in ("sandbox.live = 3", "environment.workers = 4", "sandbox.live of 4 or more", "workers of 3 or fewer"):
        assert key in error.message
    assert error.key == "sandbox.live"

    async def starting() -> None:
        async with open_multi_turn_host(used, cast(Any, None), VirtualClock(), lambda name, detail, **data: None):
            raise AssertionError("it began")

    with pytest.raises(ConfigurationError, match=r"sandbox\.live = 3 with environment\.workers = 4"):
        asyncio.run(starting())

"""CPU accounts of a measurement: which of our processes used how much, and how much was used by others."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OTHER = "other worker"  # one without a log: nothing else outside it says what it is


@dataclass(frozen=True)
class Snapshot:
    """Counters since the machine (or the process) started, in seconds."""

    time_s: float
    busy_s: float  # all cores, everybody's
    stolen_s: float  # cores the hypervisor gave to somebody else
    roles_s: dict[str, float]  # CPU time of our processes, by role


@dataclass(frozen=True)
class Usage:
    """What happened between two snapshots."""

    seconds: float
    roles_s: dict[str, float]
    foreign_cores: float  # cores kept busy by processes that aren't ours, or stolen
    ended_s: float  # time.monotonic() of the second one


def snapshot() -> Snapshot:
    """Read the counters of the machine, of this process and of its workers (about 0.3 ms)."""
    fields = [int(field) / TICKS_PER_S for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = fields
    roles = {"orchestrator": time.process_time()}
    for pid in _children():
        role, seconds = _account(pid)
        if role:
            roles[role] = roles.get(role, 0.0) + seconds
    return Snapshot(time.monotonic(), user + nice + system + irq + softirq, stolen, roles)


def between(start: Snapshot, end: Snapshot) -> Usage:
    """The difference of two snapshots. Both must see the same processes."""
    seconds = end.time_s - start.time_s
    roles = {role: end.roles_s[role] - start.roles_s.get(role, 0.0) for role in end.roles_s}
    busy = end.busy_s - start.busy_s + end.stolen_s - start.stolen_s
    return Usage(seconds, roles, max(0.0, busy - sum(roles.values())) / seconds, end.time_s)


def wait_until_quiet(foreign_cores: float, limit_s: float, window_s: float = 2.0) -> float:
    """Wait until everybody together uses at most ``foreign_cores`` for ``window_s``; returns the seconds waited.

    Gives up after ``limit_s``. To be called while no worker of ours runs.
    """
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < limit_s:
        before = snapshot()
        time.sleep(window_s)  # the measuring window itself
        if between(before, snapshot()).foreign_cores <= foreign_cores:
            break
    return waited_s


def load() -> str:
    """The load averages, as `uptime` prints them."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _account(pid: int) -> tuple[str, float]:
    """(role, CPU seconds) of a child; role "" when it is no worker or gone."""
    process = Path(f"/proc/{pid}")
    try:
        command = (process / "cmdline").read_bytes().decode().split("\0")
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        log = (process / "fd" / "1").readlink()
    except OSError:
        return "", 0.0
    if "headway.runtime.child" not in command:
        return "", 0.0
    return role_of(log), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def role_of(log: Path) -> str:
    """What the worker is that writes ``log``, which is called after it: logs/generator-0.log. Its device says nothing:
    both sides may have the same."""
    role, dash, number = log.name.removesuffix(".log").rpartition("-")
    return role if dash and number.isdecimal() and log.suffix == ".log" else OTHER

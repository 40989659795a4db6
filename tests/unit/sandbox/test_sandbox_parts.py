"""The parts of sandboxes that need no kernel: filter, frames, limits, tars, records, what failures mean."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from headway.records.errors import ConfigurationError
from headway.records.sandbox import MIB, Capabilities, ResourceLimits
from headway.sandbox import leftovers
from headway.sandbox.failures import result_of, setup_failure
from headway.sandbox.guest import files, snapshots, wire
from headway.sandbox.linux import cgroups, seccomp

ALLOW = seccomp.ALLOW
NO, NONE, FAMILY = seccomp.ERRNO | 1, seccomp.ERRNO | 38, seccomp.ERRNO | 97


def verdict(filter_program: bytes, machine: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The filter's return value for a call, by a small interpreter of filter programs."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, seccomp.ARCHITECTURES.get(machine, 0), 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", filter_program))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            (loaded,) = struct.unpack_from("=I", data, operand)
            continue
        outcome = {
            seccomp.JUMP_EQUAL: loaded == operand,
            seccomp.JUMP_GREATER: loaded > operand,
            seccomp.JUMP_AT_LEAST: loaded >= operand,
            seccomp.JUMP_SET: bool(loaded & operand),
        }[code]
        at += if_true if outcome else if_false


@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (0, (), ALLOW),  # read
        (59, (), ALLOW),  # execve
        (56, (17,), ALLOW),  # clone, as fork
        (56, (0x3D0F00,), ALLOW),  # ... as a thread
        (56, (0x10000000 | 17,), NO),  # ... a user namespace
        (56, (0x40000000,), NO),  # ... a network namespace
        (435, (), NONE),  # clone3
        (272, (), NO),  # unshare
        (308, (), NO),  # setns
        (165, (), NO),  # mount
        (428, (), NO),  # open_tree
        (101, (), NO),  # ptrace
        (310, (), NO),  # process_vm_readv
        (425, (), NO),  # io_uring_setup
        (321, (), NO),  # bpf
        (250, (), NO),  # keyctl
        (323, (), NO),  # userfaultfd
        (298, (), NO),  # perf_event_open
        (41, (1,), ALLOW),  # socket: unix
        (41, (10,), ALLOW),
        (41, (16,), FAMILY),  # netlink
        (41, (40,), FAMILY),  # vsock
        (53, (1,), ALLOW),
        (53, (40,), FAMILY),
        (16, (0, 0x5401), ALLOW),  # ioctl TCGETS
        (16, (0, 0x5412), NO),  # TIOCSTI
        (16, (0, 0x1_0000_5412), NO),  # the kernel looks at the low half only
        (135, (0xFFFFFFFF,), ALLOW),
        (135, (0x0400000,), NO),
        (302, (0, 7), ALLOW),  # prlimit64 of oneself
        (302, (1, 7), NO),  # ... of the first process
        (302, (4, 7), NO),  # ... of another: of a command that is being made ready
        (302, (0x1_0000_0000, 7), ALLOW),  # ... of oneself: a number of 32 bits
        (203, (0, 8), ALLOW),  # sched_setaffinity
        *((number, (1, 8), NO) for number in (203, 144, 142, 314)),  # ... setscheduler, setparam, setattr
        (144, (0x7_0000_0001, 5), NO),
        (144, (5, 5), ALLOW),
        (141, (0, 0, 7), ALLOW),  # setpriority of oneself
        (141, (0, 1, 7), NO),
        (141, (0x5_0000_0000, 0x5_0000_0001, 7), NO),
        (141, (1, 0, 7), ALLOW),  # ... of one's group
        (141, (1, 1, 7), NO),  # ... of the first process's
        (141, (2, 0, 7), NO),  # ... of all the user's
        (141, (2, 1000, 7), NO),
        (251, (1, 0, 0x6000), ALLOW),  # ioprio_set, whose kinds are one more
        (251, (2, 0, 0x6000), ALLOW),
        (251, (1, 1, 0x6000), NO),
        (251, (2, 1, 0x6000), NO),
        (251, (3, 0, 0x6000), NO),
        (457, (), NONE),  # newer than what is known
        (0x40000000, (), NONE),  # x32
    ],
)
def test_seccomp_filter_decides_calls_on_x86_64(number: int, arguments: tuple[int, ...], expected: int):
    assert verdict(seccomp.program("x86_64"), "x86_64", number, arguments) == expected


def test_seccomp_filter_is_specific_to_its_architecture():
    program = seccomp.program("x86_64")
    assert verdict(program, "aarch64", 0) == seccomp.KILL
    arm = seccomp.program("aarch64")
    assert verdict(arm, "aarch64", 63) == ALLOW  # read
    assert verdict(arm, "aarch64", 220, (0x10000000,)) == NO  # clone
    assert verdict(arm, "aarch64", 97) == NO  # unshare
    assert verdict(arm, "aarch64", 261, (1,)) == NO  # prlimit64
    assert verdict(arm, "aarch64", 119, (2,)) == ALLOW  # sched_setscheduler
    with pytest.raises(OSError, match="no system call filter"):
        seccomp.program("riscv64")


def test_frames_are_reassembled_from_any_chunks():
    sent = wire.frame({"id": 1}, b"body") + wire.frame({"id": 2, "text": "ü"})
    for cut in range(1, len(sent)):
        frames = wire.FrameAssembler()
        got = [frame for part in (sent[:cut], sent[cut:]) for frame in frames.feed(part)]
        assert got == [({"id": 1}, b"body"), ({"id": 2, "text": "ü"}, b"")]


@pytest.mark.parametrize(
    "data", [b"\xff" * 8, wire.LENGTHS.pack(2, wire.BODY_BYTES + 1), wire.LENGTHS.pack(1, 0) + b"["]
)
def test_malformed_frames_are_refused(data: bytes):
    with pytest.raises(wire.Malformed):
        list(wire.FrameAssembler().feed(data))


def test_zygote_imports_standard_library_alone():
    """It runs without site-packages, and every module in it is memory that each sandbox may copy."""
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import headway.sandbox.guest.zygote
print(*sorted(name for name in sys.modules if name.split(".")[0] not in sys.stdlib_module_names))
"""
    root = str(Path(__file__).parents[3])
    said = subprocess.run([sys.executable, "-I", "-S", "-c", script, root], capture_output=True, text=True, check=True)
    guest = {f"guest.{n}" for n in ("commands", "files", "init", "isolation", "preload", "snapshots", "wire", "zygote")}
    linux = {f"linux.{n}" for n in ("cgroups", "kernel", "seccomp", "system_calls")}
    inside = {f"headway.sandbox.{name}" for name in guest | linux | {"guest", "linux"}}
    expected = {"headway", "headway.sandbox", *inside}
    assert set(said.stdout.split()) - {"__main__"} == expected


def test_limits_that_cant_hold_together_are_refused():
    ResourceLimits().check()
    for bad in (
        ResourceLimits(processes=1),
        ResourceLimits(cpus=0),
        ResourceLimits(memory_bytes=MIB),
        ResourceLimits(disk_bytes=500 * MIB),
    ):
        with pytest.raises(ConfigurationError, match="sandbox limit"):
            bad.check()
    assert not Capabilities(backend="x", process_limit=True, disk_limit=True).fit_for_untrusted


def test_groups_of_version_1_are_made_where_that_is_allowed(tmp_path: Path):
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()
    places = {"memory": tmp_path / "memory", "pids": tmp_path / "pids"}
    parents, missing = cgroups.find_parents("owner-1-2-3", os.geteuid(), groups=places)
    assert parents == {name: str(tmp_path / name / "headway-sandboxes" / "owner-1-2-3") for name in places}
    assert [line.split(":")[0] for line in missing] == ["no limit of cpu"]
    assert cgroups.find_parents("o", 0, groups={}) == ({}, missing and tuple(_not_mounted()))


def _not_mounted() -> list[str]:
    return [
        f"no limit of {name}: its controller isn't mounted; mount it, or run where it is"
        for name in cgroups.CONTROLLERS
    ]


def test_limits_as_written_to_version_2(tmp_path: Path):
    group = tmp_path / "slot"
    group.mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "memory.events"):
        (group / name).write_text("low 0\noom_kill 3\n")
    parents = {cgroups.V2: str(tmp_path)}
    cgroups.limit(parents, "slot", memory_bytes=MIB, processes=10, cpus=0.5)
    written = {name: (group / name).read_text().split("\n")[0][:12] for name in ("memory.max", "pids.max", "cpu.max")}
    assert written["memory.max"].startswith(str(MIB))
    assert written["pids.max"].startswith("15")
    assert written["cpu.max"].startswith("50000 100000")
    assert cgroups.kill_count(parents, "slot") == 3


def test_a_group_is_found_below_what_a_container_shows_of_it():
    assert cgroups._below("/sys/fs/cgroup/memory", "/docker/x", "/docker/x/y") == Path("/sys/fs/cgroup/memory/y")
    assert cgroups._below("/sys/fs/cgroup/memory", "/", "/a") == Path("/sys/fs/cgroup/memory/a")


def test_snapshot_round_trips_written_files(tmp_path: Path):
    upper, back = tmp_path / "upper", tmp_path / "back"
    (upper / "folder").mkdir(parents=True)
    (upper / "folder" / "file").write_bytes(b"x" * 700)
    os.link(upper / "folder" / "file", upper / "same")
    (upper / "link").symlink_to("/etc/passwd")
    back.mkdir()
    descriptor = os.open(upper, os.O_RDONLY)
    packed = b"".join(snapshots.pack([("", descriptor)], MIB))
    with pytest.raises(OSError, match="more than 1000 bytes"):
        list(snapshots.pack([("", descriptor)], 1000))
    os.close(descriptor)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["folder", "folder/file", "link", "same"]
    (tmp_path / "t.tar").write_bytes(packed)
    (back / "link").write_text("in its way")
    with open(tmp_path / "t.tar", "rb") as file:
        snapshots.unpack(file, str(back))
    assert (back / "same").read_bytes() == b"x" * 700
    assert (back / "same").stat().st_ino == (back / "folder" / "file").stat().st_ino
    assert os.readlink(back / "link") == "/etc/passwd"


def test_owners_are_told_by_process_and_start(tmp_path: Path):
    mine = tmp_path / leftovers.owner_name(os.getpid(), 1)
    other = tmp_path / f"owner-{os.getpid()}-1-1"
    for folder in (mine, other, tmp_path / "unrelated"):
        folder.mkdir()
    assert dict(leftovers.owners(tmp_path)) == {mine: True, other: False}
    leftovers.reap(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "unrelated"])


def test_owners_of_an_earlier_boot_of_this_machine_are_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as before:
        before.setattr(leftovers, "boot_id", lambda: "0" * 8 + 3 * "-0000" + "-" + "0" * 12)
        before.setattr(leftovers, "machine_id", lambda: "a" * 16)
        ours = tmp_path / leftovers.owner_name(os.getpid(), 1)
        before.setattr(leftovers, "machine_id", lambda: "b" * 16)
        anothers = tmp_path / leftovers.owner_name(os.getpid(), 2)
        before.setattr(leftovers, "machine_id", lambda: "")
        unknown = tmp_path / leftovers.owner_name(os.getpid(), 3)
    for folder in (ours, anothers, unknown):
        (folder / "records").mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as other:  # it happens to have the numbers that the zygote had
        started = leftovers.started(other.pid) or 0
        record = leftovers.OwnerRecord(pid=1, started=1, zygote_pid=other.pid, zygote_started=started)
        leftovers.write(ours, "owner.json", record)
        try:
            monkeypatch.setattr(leftovers, "machine_id", lambda: "")
            assert leftovers.reap(tmp_path) == [], "nothing is known of any"
            monkeypatch.setattr(leftovers, "machine_id", lambda: "a" * 16)
            (reaped,) = leftovers.reap(tmp_path)
            assert leftovers.started(other.pid) == started, "it isn't the zygote"
        finally:
            other.kill()
    assert (reaped.owner, reaped.stuck) == (ours.name, False)
    assert sorted(tmp_path.iterdir()) == sorted([anothers, unknown])


def test_a_machine_is_told_by_its_number_and_its_name(monkeypatch: pytest.MonkeyPatch):
    def told(number: str, name: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda path: number)
        monkeypatch.setattr(leftovers.os, "uname", lambda: os.uname_result(("Linux", name, "6", "", "")))
        return leftovers.machine_id()

    assert leftovers.is_dead(leftovers.owner_name(os.getpid(), 1)) is False, "names of owners are read as they are made"
    number = "0123456789abcdef" * 2
    assert len({told(number, "one"), told(number, "two"), told(number[::-1], "one")}) == 3
    assert told(number, "one") == told(f"{number}\n", "one")
    for unset in ("", "uninitialized\n"):
        assert told(unset, "one") == ""


def test_owners_in_another_namespace_of_processes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their numbers stand for other processes here, or for none."""
    monkeypatch.setattr(leftovers, "machine", lambda: f"{leftovers.boot_id()}-1")
    (tmp_path / leftovers.owner_name(os.getpid(), 1)).mkdir()
    theirs = tmp_path / f"{leftovers.owner_name(os.getpid(), 2)}".replace(f"-{leftovers.started(os.getpid())}-", "-1-")
    theirs.mkdir()
    monkeypatch.undo()
    assert set(dict(leftovers.owners(tmp_path)).values()) == {True}
    assert leftovers.reap(tmp_path) == []
    assert theirs.exists()


def test_a_process_of_another_namespace_in_a_group_isnt_taken_for_ones_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Version 2 shows a process that can't be named here as 0, and to kill 0 is to kill oneself and one's relatives."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "cgroup.procs").write_text("0\n4194305\n0\n")
    assert not cgroups.clear(tmp_path / "owner", patience_s=0.0)
    assert killed == [4194305]


def test_a_listing_is_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b", "ü", "a"):
        (tmp_path / name).write_text(name)
    entries = json.loads(files.listing(str(tmp_path), 3))
    assert [(entry["name"], entry["size_bytes"]) for entry in entries] == [("a", 1), ("b", 1), ("ü", 2)]
    with pytest.raises(OSError, match="more than 2 entries"):
        files.listing(str(tmp_path), 2)
    monkeypatch.setattr(files, "BODY_BYTES", 100)
    with pytest.raises(OSError, match="more than 100"):
        files.listing(str(tmp_path), 3)


def answer(**changed):
    told = {"exit_code": 0, "signal": None, "timed_out": False, "oom": False, "truncated": False}
    return {**told, "stdout_bytes": 3, "duration_s": 0.1, **changed}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (answer(), None),
        (answer(exit_code=1), None),
        (answer(exit_code=0, oom=True), None),  # a child was killed, and it went on
        (answer(exit_code=1, oom=True), "out of memory"),
        (answer(exit_code=None, signal=9, oom=True), "out of memory"),
        (answer(exit_code=None, signal=9, timed_out=True), "not done in 2 s, and killed"),
        (answer(exit_code=None, signal=11), "ended by signal 11"),
    ],
)
def test_how_a_command_ended(told, why):
    result = result_of(told, b"out", b"err", 2.0)
    assert (result.stdout, result.stderr) == (b"out", b"err")
    assert (result.failure and result.failure.message) == why
    assert result.failure is None or (result.failure.cause, result.failure.reward_valid) == ("model_code", True)


@pytest.mark.parametrize(
    ("step", "code", "cause", "retry"),
    [
        ("root file system", 2, "environment", False),
        ("snapshot", 74, "environment", False),
        ("user namespace", 1, "infrastructure", False),
        ("disk", 12, "infrastructure", True),
    ],
)
def test_why_a_sandbox_couldnt_be_made(step: str, code: int, cause: str, retry: bool):
    failure = setup_failure({"failed": step, "error": code, "what": "why"})
    assert (failure.cause, failure.retry, failure.reward_valid) == (cause, retry, False)

"""The process that all sandboxes of an owner are cloned from. Small, of one thread, standard library alone but for what
its owner has it preload.

Started by the owner; under root it gives up being root first, so that sandboxes come from an ordinary user everywhere.
It keeps some *spares*: processes in fresh namespaces and control groups of their own, which wait for a specification.
A request takes the oldest; the rest of the making is the spare's own work, beside others'.

It watches the owner through a descriptor of that process. When the owner ends, however it does, everything is killed
and removed, this process last. When it is killed itself, the kernel kills every sandbox's first process.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from headway.sandbox.guest import init, isolation, preload, snapshots, wire
from headway.sandbox.linux import cgroups, kernel

if TYPE_CHECKING:
    from headway.sandbox.guest import bubblewrap

CLEANING_S = 4.0  # for all that is left of a dead owner's sandboxes
RETRY_MS = 20  # until groups can be removed
SPARE = ""  # in place of a sandbox: none yet


class Zygote:
    """The loop. Every child is in ``_children`` until its groups are removed: process -> (slot, sandbox)."""

    def __init__(self, owner: socket.socket, settings: dict[str, Any]) -> None:
        self._owner = owner
        self._parents: cgroups.Parents = settings["cgroups"]
        self._without: str = settings["without_groups"]
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._wanted_spares: int = settings["spares"]
        self._prefix: str = settings["prefix"]
        self._shell: bubblewrap.Shell | None = settings["shell"]
        self._owner_process: int = settings["owner_process"]
        self._self = os.pidfd_open(os.getpid())
        self._slots = 0
        self._spares: deque[tuple[int, socket.socket]] = deque()
        self._children: dict[int, tuple[str, str]] = {}
        self._by_sandbox: dict[str, int] = {}
        self._emptying: list[tuple[str, str, int, int]] = []  # slot, sandbox, exit status, kills for memory
        self._wake = kernel.wake_on_child()

    def run(self) -> None:
        """Serve requests until the owner is gone."""
        poll = select.poll()
        for descriptor in (self._owner.fileno(), self._owner_process, self._wake):
            poll.register(descriptor, select.POLLIN)
        lost = cgroups.CONTROLLERS if self._without else ()
        self._tell({"zygote": os.getpid(), "groups": self._without, "without": lost})
        self._refill()
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(RETRY_MS if self._emptying else None)}
            if self._owner_process in ready:
                break
            if self._wake in ready:
                os.read(self._wake, 4096)
            if self._owner.fileno() in ready and not self._receive():
                break
            self._reap()
            self._refill()
        self._clean()

    def _receive(self) -> bool:
        """Take one request. False: the owner has closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._owner, wire.MESSAGE_BYTES, 4)
        except OSError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["do"] == "create":
            self._create(request, data, descriptors)
        elif request["do"] == "terminate":
            self._terminate(request["id"])
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _create(self, request: dict[str, Any], data: bytes, descriptors: list[int]) -> None:
        sandbox = request["id"]
        try:
            pid, place = self._spares.popleft() if self._spares else self._clone()
            slot, _ = self._children[pid]
            self._children[pid] = (slot, sandbox)
            self._by_sandbox[sandbox] = pid
            with place:
                socket.send_fds(place, [data], descriptors)
        except OSError as error:  # no process to be had; or the spare is dead, and `_reap` tells
            if sandbox not in self._by_sandbox:
                self._tell({"refused": sandbox, "error": error.errno, "what": f"clone: {error.strerror}"})
            return
        self._tell({"started": sandbox, "pid": pid, "slot": slot})

    def _terminate(self, sandbox: str) -> None:
        if sandbox in self._by_sandbox:
            os.kill(self._by_sandbox[sandbox], signal.SIGKILL)
        elif all(sandbox != ending for _, ending, _, _ in self._emptying):  # never made, or ended before
            self._tell({"ended": sandbox, "code": wire.EXIT_CLOSED, "oom_kills": 0})

    def _refill(self) -> None:
        """Make one spare, so that requests can be served between two."""
        if len(self._spares) < self._wanted_spares:
            with contextlib.suppress(OSError):  # the request that finds none says why
                self._spares.append(self._clone())
                signal.raise_signal(signal.SIGCHLD)  # look again

    def _clone(self) -> tuple[int, socket.socket]:
        self._slots += 1
        slot = f"{self._prefix}{self._slots}"
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = kernel.clone(kernel.ALL_NAMESPACES)
        if pid == 0:
            self._be_spare(there, slot)
        there.close()
        self._children[pid] = (slot, SPARE)
        return pid, here

    def _be_spare(self, place: socket.socket, slot: str) -> None:
        """In the child, which is in namespaces of its own: become a sandbox's first process. Never returns."""
        try:
            kernel.keep_only(place.fileno(), self._self, *(self._shell.descriptors if self._shell else ()))
            self._wait_for_wanted(place, slot)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(wire.EXIT_SETUP)

    def _wait_for_wanted(self, place: socket.socket, slot: str) -> None:
        """In the child: get ready, then take a specification. A step that fails before there is an owner to tell is
        told when there is one."""
        failed: isolation.SetupFailed | None = None
        signal.set_wakeup_fd(-1)
        try:
            kernel.name_process("sandbox-spare")
            with isolation.step("control groups"):
                cgroups.join(self._parents, slot)
            isolation.enter(self._self, self._uid, self._gid)
        except isolation.SetupFailed as error:
            failed = error
        data, descriptors, _, _ = socket.recv_fds(place, wire.MESSAGE_BYTES, 4)
        place.close()
        if not data:
            os._exit(0)  # the zygote is gone, or needs no more
        wanted = json.loads(data)["wanted"]
        owner = socket.socket(fileno=descriptors.pop(0))
        snapshot = descriptors.pop(0) if wanted["snapshot"] else -1
        door = socket.socket(fileno=descriptors.pop(0)) if wanted["door"] else None
        channel = descriptors.pop(0) if wanted["channel"] else -1
        try:
            if failed is not None:
                raise failed
            if door is not None:
                isolation.listen_for_proxy(door)
            self._become_first_process(owner, wanted, slot, snapshot, channel)
        except isolation.SetupFailed as error:
            init.fail(owner, error.step, error.code, str(error))

    def _become_first_process(
        self, owner: socket.socket, wanted: dict[str, Any], slot: str, snapshot: int, channel: int
    ) -> None:
        limits = wanted["limits"]
        kernel.name_process("sandbox-init")
        with isolation.step("limits"):
            own = {name: limits[name] for name in ("memory_bytes", "processes", "cpus")}
            cgroups.limit(self._parents, slot, **own)
            kills = cgroups.open_kill_count(self._parents, slot)
        if self._shell is not None:
            upper, proc = isolation.build_disk(wanted)
            passed = {"owner": owner.fileno(), "upper": upper, "proc": proc, "kills": kills, "snapshot": snapshot}
            with isolation.step("bubblewrap"):
                self._shell.enter(wanted, passed)
        upper, proc = isolation.build_root(wanted)
        isolation.lock(self._self)
        if snapshot >= 0:
            with isolation.step("snapshot"), os.fdopen(snapshot, "rb") as file:
                snapshots.unpack(file)
        os.close(self._self)
        init.Init(owner, wanted, [("", upper)], proc, kills, channel).run()

    def _reap(self) -> None:
        """Reap children that have ended, and remove groups that are empty by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            slot, sandbox = self._children.pop(pid)
            self._by_sandbox.pop(sandbox, None)
            for at, (spare_pid, place) in enumerate(self._spares):
                if spare_pid == pid:
                    place.close()
                    del self._spares[at]
                    break
            self._emptying.append((slot, sandbox, status, cgroups.kill_count(self._parents, slot)))
        left: list[tuple[str, str, int, int]] = []
        for one in self._emptying:
            slot, sandbox, status, kills = one
            if not cgroups.remove(self._parents, slot):
                left.append(one)
            elif sandbox:
                self._tell({"ended": sandbox, "code": os.waitstatus_to_exitcode(status), "oom_kills": kills})
        self._emptying = left

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the owner is gone: seen elsewhere
            self._owner.send(json.dumps(message).encode())

    def _clean(self) -> None:
        """Remove everything: processes, groups, the owner's directory."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._owner.close()
        deadline = time.monotonic() + CLEANING_S
        while (self._children or self._emptying) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        for parent in self._parents.values():
            with contextlib.suppress(OSError):
                os.rmdir(parent)
        folder = os.path.basename(os.getcwd())
        if any(os.path.exists(parent) for parent in self._parents.values()):
            return  # version 2: the group that this process is in itself; the next start removes it by what is recorded
        shutil.rmtree(".", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(f"../{folder}")


def main(settings: dict[str, Any]) -> None:
    """``settings``: what the owner has written to this process's input, the descriptor of its socket in it."""
    owner = socket.socket(fileno=settings["socket"])
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.umask(0o022)
    array.array("i")  # what recv_fds imports
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    with contextlib.suppress(ValueError):  # only the privileged may; of its user there are all sandboxes' processes
        resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    settings["shell"] = None
    if settings["bubblewrap"]:
        from headway.sandbox.guest import bubblewrap  # local sandboxes are copies of this process, and don't need it

        settings["shell"] = bubblewrap.Shell(settings["bubblewrap"])  # opens what its user may not be able to look at
    settings["cgroups"], settings["without_groups"] = cgroups.admit_maker(settings["cgroups"])
    if wanted := settings["preload"]:
        preload.load(wanted["modules"], wanted["folders"])
    if settings["uid"] != os.geteuid():
        if wanted:
            preload.uncover([*wanted["folders"], os.path.dirname(os.__file__)])
        os.setgroups([])
        os.setresgid(settings["gid"], settings["gid"], settings["gid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # changing users has cleared it; its own /proc files are needed
    gc.disable()  # or every sandbox would get copies of pages that only the collector looks at
    gc.freeze()
    Zygote(owner, settings).run()

"""Runs the zygote, from which all sandboxes of an owner are cloned. It is small, has one thread, and uses the standard
library alone but for modules that its owner has it preload.

The owner starts it. Under root it first changes to an ordinary user, so that sandboxes never come from root. It keeps
*spares*: processes in new namespaces and control groups of their own, which wait for a specification. A request takes
the oldest spare, which does the rest of its setup itself, in parallel with others.

It watches the owner through a descriptor of that process. When the owner ends, for any reason, the zygote kills and
removes all sandboxes and then ends. When the zygote is killed, the kernel kills every sandbox's first process.
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

CLEANUP_TIMEOUT_S = 4.0  # to remove all sandboxes of a dead owner
RETRY_MS = 20  # until groups can be removed
SPARE = ""  # in place of a sandbox: none yet


class Zygote:
    """The zygote's loop. ``_children`` maps process -> (slot, sandbox) until the process is reaped."""

    def __init__(self, owner: socket.socket, settings: dict[str, Any]) -> None:
        self._owner = owner
        self._parents: cgroups.Parents = settings["cgroups"]
        self._missing_groups_reason: str = settings["without_groups"]
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._target_spares: int = settings["spares"]
        self._prefix: str = settings["prefix"]
        self._launcher: bubblewrap.BubblewrapLauncher | None = settings["shell"]
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
        missing_controllers = cgroups.CONTROLLERS if self._missing_groups_reason else ()
        self._report({"zygote": os.getpid(), "groups": self._missing_groups_reason, "without": missing_controllers})
        self._refill()
        while True:
            ready_fds = {descriptor for descriptor, _ in poll.poll(RETRY_MS if self._emptying else None)}
            if self._owner_process in ready_fds:
                break
            if self._wake in ready_fds:
                os.read(self._wake, 4096)
            if self._owner.fileno() in ready_fds and not self._receive():
                break
            self._reap()
            self._refill()
        self._clean_up()

    def _receive(self) -> bool:
        """Take one request. False: the owner has closed."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._owner, wire.MESSAGE_BYTES, 4)
        except OSError:
            return False
        if not packet:
            return False
        request = json.loads(packet)
        if request["do"] == "create":
            self._create(request, packet, descriptors)
        elif request["do"] == "terminate":
            self._terminate(request["id"])
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _create(self, request: dict[str, Any], data: bytes, descriptors: list[int]) -> None:
        sandbox_id = request["id"]
        try:
            pid, spare_socket = self._spares.popleft() if self._spares else self._clone()
            slot, _ = self._children[pid]
            self._children[pid] = (slot, sandbox_id)
            self._by_sandbox[sandbox_id] = pid
            with spare_socket:
                socket.send_fds(spare_socket, [data], descriptors)
        except OSError as error:  # no process could be cloned; or the spare is dead, which `_reap` reports
            if sandbox_id not in self._by_sandbox:
                self._report({"refused": sandbox_id, "error": error.errno, "what": f"clone: {error.strerror}"})
            return
        self._report({"started": sandbox_id, "pid": pid, "slot": slot})

    def _terminate(self, sandbox: str) -> None:
        if sandbox in self._by_sandbox:
            os.kill(self._by_sandbox[sandbox], signal.SIGKILL)
        elif all(sandbox != emptying_id for _, emptying_id, _, _ in self._emptying):  # never made, or ended before
            self._report({"ended": sandbox, "code": wire.EXIT_CLOSED, "oom_kills": 0})

    def _refill(self) -> None:
        """Make at most one spare, so that requests can be served between two."""
        if len(self._spares) < self._target_spares:
            with contextlib.suppress(OSError):  # the next request without a spare reports the reason
                self._spares.append(self._clone())
                signal.raise_signal(signal.SIGCHLD)  # wakes the loop, which checks again

    def _clone(self) -> tuple[int, socket.socket]:
        self._slots += 1
        slot = f"{self._prefix}{self._slots}"
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = kernel.clone(kernel.ALL_NAMESPACES)
        if pid == 0:
            self._run_spare(child_socket, slot)
        child_socket.close()
        self._children[pid] = (slot, SPARE)
        return pid, parent_socket

    def _run_spare(self, zygote_socket: socket.socket, slot: str) -> None:
        """Run in the child, in namespaces of its own: become a sandbox's first process. Never returns."""
        try:
            host_files = self._launcher.descriptors if self._launcher else ()
            kernel.keep_only(zygote_socket.fileno(), self._self, *host_files)
            self._wait_for_spec(zygote_socket, slot)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(wire.EXIT_SETUP)

    def _wait_for_spec(self, zygote_socket: socket.socket, slot: str) -> None:
        """Run in the child: prepare, then wait for a specification. The failure of an earlier step is reported to the
        owner once its socket arrives."""
        setup_error: isolation.SetupFailed | None = None
        signal.set_wakeup_fd(-1)
        try:
            kernel.name_process("sandbox-spare")
            with isolation.step("control groups"):
                cgroups.join(self._parents, slot)
            isolation.enter(self._self, self._uid, self._gid)
        except isolation.SetupFailed as error:
            setup_error = error
        packet, descriptors, _, _ = socket.recv_fds(zygote_socket, wire.MESSAGE_BYTES, 4)
        zygote_socket.close()
        if not packet:
            os._exit(0)  # the zygote is gone, or needs no more
        spec = json.loads(packet)["wanted"]
        owner_socket = socket.socket(fileno=descriptors.pop(0))
        snapshot_fd = descriptors.pop(0) if spec["snapshot"] else -1
        proxy_socket = socket.socket(fileno=descriptors.pop(0)) if spec["door"] else None
        channel_fd = descriptors.pop(0) if spec["channel"] else -1
        try:
            if setup_error is not None:
                raise setup_error
            if proxy_socket is not None:
                isolation.listen_for_proxy(proxy_socket)
            self._run_first_process(owner_socket, spec, slot, snapshot_fd, channel_fd)
        except isolation.SetupFailed as error:
            init.fail(owner_socket, error.step, error.code, str(error))

    def _run_first_process(
        self, owner: socket.socket, spec: dict[str, Any], slot: str, snapshot: int, channel: int
    ) -> None:
        limits = spec["limits"]
        kernel.name_process("sandbox-init")
        with isolation.step("limits"):
            group_limits = {name: limits[name] for name in ("memory_bytes", "processes", "cpus")}
            cgroups.limit(self._parents, slot, **group_limits)
            oom_kill_count_fd = cgroups.open_kill_count(self._parents, slot)
        if self._launcher is not None:
            upper_fd, proc_fd = isolation.build_disk(spec)
            fds = {
                "owner": owner.fileno(),
                "upper": upper_fd,
                "proc": proc_fd,
                "kills": oom_kill_count_fd,
                "snapshot": snapshot,
            }
            with isolation.step("bubblewrap"):
                self._launcher.enter(spec, fds)
        upper_fd, proc_fd = isolation.build_root(spec)
        isolation.drop_privileges(self._self)
        if snapshot >= 0:
            with isolation.step("snapshot"), os.fdopen(snapshot, "rb") as snapshot_file:
                snapshots.unpack(snapshot_file)
        os.close(self._self)
        init.Init(owner, spec, [("", upper_fd)], proc_fd, oom_kill_count_fd, channel).run()

    def _reap(self) -> None:
        """Reap children that have ended, and remove control groups that are empty."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            slot, sandbox_id = self._children.pop(pid)
            self._by_sandbox.pop(sandbox_id, None)
            for index, (spare_pid, spare_socket) in enumerate(self._spares):
                if spare_pid == pid:
                    spare_socket.close()
                    del self._spares[index]
                    break
            self._emptying.append((slot, sandbox_id, status, cgroups.kill_count(self._parents, slot)))
        remaining_groups: list[tuple[str, str, int, int]] = []
        for group in self._emptying:
            slot, sandbox_id, status, kills = group
            if not cgroups.remove(self._parents, slot):
                remaining_groups.append(group)
            elif sandbox_id:
                self._report({"ended": sandbox_id, "code": os.waitstatus_to_exitcode(status), "oom_kills": kills})
        self._emptying = remaining_groups

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the owner is gone, which `run` notices
            self._owner.send(json.dumps(message).encode())

    def _clean_up(self) -> None:
        """Remove everything: processes, groups, the owner's directory."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._owner.close()
        deadline_s = time.monotonic() + CLEANUP_TIMEOUT_S
        while (self._children or self._emptying) and time.monotonic() < deadline_s:
            self._reap()
            time.sleep(0.002)
        for parent in self._parents.values():
            with contextlib.suppress(OSError):
                os.rmdir(parent)
        folder_name = os.path.basename(os.getcwd())
        if any(os.path.exists(parent) for parent in self._parents.values()):
            return  # version 2: the group that this process is in; the next start removes it by the owner's record
        shutil.rmtree(".", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(f"../{folder_name}")


def main(settings: dict[str, Any]) -> None:
    """Start the zygote. ``settings``: the JSON that the owner has written to its input; ``"socket"``: the descriptor of
    its socket to the owner."""
    owner_socket = socket.socket(fileno=settings["socket"])
    null_fd = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.umask(0o022)
    array.array("i")  # loads the module that recv_fds imports
    for resource_kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        hard_limit = resource.getrlimit(resource_kind)[1]
        resource.setrlimit(resource_kind, (hard_limit, hard_limit))
    with contextlib.suppress(ValueError):  # only root may raise it; the limit counts all sandboxes' processes
        resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    settings["shell"] = None
    if settings["bubblewrap"]:
        from headway.sandbox.guest import bubblewrap  # local sandboxes are copies of this process, and don't need it

        settings["shell"] = bubblewrap.BubblewrapLauncher(settings["bubblewrap"])  # opens files before the user changes
    settings["cgroups"], settings["without_groups"] = cgroups.join_zygote_group(settings["cgroups"])
    if preload_settings := settings["preload"]:
        preload.load(preload_settings["modules"], preload_settings["folders"])
    if settings["uid"] != os.geteuid():
        if preload_settings:
            preload.make_reachable([*preload_settings["folders"], os.path.dirname(os.__file__)])
        os.setgroups([])
        os.setresgid(settings["gid"], settings["gid"], settings["gid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # changing users has cleared it; its own /proc files are needed
    gc.disable()  # else the collector's writes would copy pages into every sandbox
    gc.freeze()
    Zygote(owner_socket, settings).run()

"""Bubblewrap's walls instead of our own (`isolation.py`), around the same first process. Standard library alone.

Bubblewrap makes the namespaces, the mounts and the new root, gives up all rights and installs the filter of system
calls. Two things it can't: a disk with limits on bytes and inodes that the whole root is written to (it has no overlay
before 0.11), and a `/proc` that init can write to and commands can't. Those are made around it, without any rights
outside, in namespaces of our own, which hold the sandbox a second time: bubblewrap is the first process of the outer
ones, so that with it, by the kernel's rule, everything within is killed.

Inside runs the zygote's Python, whatever is in the root: its files are reached through descriptors that it closes
before it serves, and are mounted nowhere. No command line names anything but numbers: inside it can be read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from headway.sandbox.guest import entry, isolation, portable_python  # noqa: F401  entry: loaded to be carried along
from headway.sandbox.linux import seccomp


class Shell:
    """Host files for all sandboxes of a zygote, opened while it still may: its Python, and this package."""

    def __init__(self, program: str) -> None:
        self.program = program
        libraries = sorted({os.path.dirname(file) for file in portable_python.mapped_files()})
        home = _handle(sys.base_prefix)
        inside_home = os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
        codes, loader = memory(portable_python.codes()), _handle(portable_python.linker())
        folders = [_handle(folder) for folder in libraries]
        self.descriptors = [codes, home, loader, *folders]
        self.command = [_path(loader), "--library-path", ":".join(_path(folder) for folder in folders)]
        self.command += [f"{_path(home)}/{inside_home}", "-I", "-S", "-c"]
        self.command += [portable_python.LOADER + "behind_bubblewrap as main; main(int(sys.argv[2]))", str(codes)]

    def enter(self, wanted: dict[str, Any], passed: dict[str, int]) -> None:
        """Become bubblewrap, which becomes a sandbox around what `isolation` has made. ``passed``: descriptors for its
        first process, by name. Never returns."""
        told = memory(json.dumps({**wanted, "descriptors": passed}).encode())
        filter_ = memory(seccomp.program())
        arguments = memory("\0".join(_arguments(wanted, filter_)).encode())
        for descriptor in (told, filter_, arguments, *self.descriptors, *passed.values()):
            if descriptor >= 0:
                os.set_inheritable(descriptor, True)
        # Bubblewrap wants the arguments as a list that each entry ends with a NUL, and a command that isn't in it.
        command = [self.program, "--args", str(arguments), "--", *self.command, str(told)]
        os.execve(self.program, command, {"LC_ALL": "C.UTF-8"})


def _arguments(wanted: dict[str, Any], filter_: int) -> list[str]:
    words = "--unshare-user --disable-userns --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup"
    words += " --die-with-parent --as-pid-1 --new-session --cap-drop ALL --hostname sandbox"
    words += f" --uid {isolation.INSIDE_ID} --gid {isolation.INSIDE_ID} --seccomp {filter_} --chdir /"
    words += f" --dev-bind {isolation.BY_NAME} /"  # the overlay forbids devices; what is bound over it may be some
    if wanted["root"] is None:
        for name in isolation.host_programs():
            words += f" --ro-bind /{name} /{name}"
    for name in isolation.DEVICES:
        words += f" --dev-bind /dev/{name} /dev/{name}"
    words += " --proc /proc --remount-ro /proc"
    return [*words.split(), ""]


def memory(data: bytes) -> int:
    """A descriptor of an in-memory file from which ``data`` can be read once."""
    descriptor = os.memfd_create("told")
    with open(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _handle(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"

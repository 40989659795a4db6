"""Isolates the first process of a sandbox by bubblewrap instead of `isolation.py`. Standard library alone.

Bubblewrap makes the namespaces, the mounts and the new root, drops all privileges and installs the filter of system
calls. It can't make a disk with limits on bytes and inodes for the whole root (it has no overlay before 0.11), nor a
`/proc` that init can write to and commands can't. Both are made around it, without privileges outside, in namespaces of
our own, which isolate the sandbox a second time: bubblewrap is the first process of the outer namespaces, so that
the kernel kills all processes within when it ends.

The zygote's Python runs inside, independently of the root's files: it reaches its own files through descriptors that
it closes before it serves, and they are mounted nowhere. Command lines hold only numbers, since commands can read them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from headway.sandbox.guest import entry, isolation, portable_python  # noqa: F401  entry: loaded to be carried along
from headway.sandbox.linux import seccomp


class BubblewrapLauncher:
    """Starts bubblewrap for the sandboxes of a zygote. Holds descriptors of the host's Python and this package, which
    were opened before the zygote changed its user."""

    def __init__(self, program: str) -> None:
        self.program = program
        library_folders = sorted({os.path.dirname(file) for file in portable_python.mapped_files()})
        home_fd = _handle(sys.base_prefix)
        interpreter_path = os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
        codes_fd, loader_fd = memory_file(portable_python.codes()), _handle(portable_python.linker())
        folder_fds = [_handle(folder) for folder in library_folders]
        self.descriptors = [codes_fd, home_fd, loader_fd, *folder_fds]
        self.command = [_path(loader_fd), "--library-path", ":".join(_path(folder) for folder in folder_fds)]
        self.command += [f"{_path(home_fd)}/{interpreter_path}", "-I", "-S", "-c"]
        self.command += [portable_python.LOADER + "behind_bubblewrap as main; main(int(sys.argv[2]))", str(codes_fd)]

    def enter(self, spec: dict[str, Any], descriptors: dict[str, int]) -> None:
        """Execute bubblewrap, which makes a sandbox around the disk that `isolation` has made. ``descriptors``: those
        for its first process, by name. Never returns."""
        spec_fd = memory_file(json.dumps({**spec, "descriptors": descriptors}).encode())
        filter_fd = memory_file(seccomp.program())
        arguments_fd = memory_file("\0".join(_arguments(spec, filter_fd)).encode())
        for descriptor in (spec_fd, filter_fd, arguments_fd, *self.descriptors, *descriptors.values()):
            if descriptor >= 0:
                os.set_inheritable(descriptor, True)
        # Bubblewrap reads its options from a file, each ended by a NUL; the command stands outside that file.
        command = [self.program, "--args", str(arguments_fd), "--", *self.command, str(spec_fd)]
        os.execve(self.program, command, {"LC_ALL": "C.UTF-8"})


def _arguments(spec: dict[str, Any], filter_: int) -> list[str]:
    options = "--unshare-user --disable-userns --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup"
    options += " --die-with-parent --as-pid-1 --new-session --cap-drop ALL --hostname sandbox"
    options += f" --uid {isolation.INSIDE_ID} --gid {isolation.INSIDE_ID} --seccomp {filter_} --chdir /"
    options += f" --dev-bind {isolation.ROOT_MOUNT} /"  # the overlay forbids devices; what is bound over it may be some
    if spec["root"] is None:
        for name in isolation.host_programs():
            options += f" --ro-bind /{name} /{name}"
    for name in isolation.DEVICES:
        options += f" --dev-bind /dev/{name} /dev/{name}"
    options += " --proc /proc --remount-ro /proc"
    return [*options.split(), ""]


def memory_file(data: bytes) -> int:
    """Return the descriptor of a file in memory from which ``data`` can be read once."""
    descriptor = os.memfd_create("told")
    with open(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _handle(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"

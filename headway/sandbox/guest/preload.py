"""Preloads modules into a zygote for the first processes of its sandboxes. Standard library alone but for these.

Modules import others late. Their folders are therefore bound into each sandbox, read-only, at the same paths.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
import traceback
from collections.abc import Sequence

from headway.sandbox.guest import isolation
from headway.sandbox.linux import kernel


def load(modules: Sequence[str], folders: Sequence[str]) -> None:
    """Import ``modules``, searched for in ``folders`` too. Raises RuntimeError if that has started a thread: a fork
    copies the locks of other threads, but not the threads."""
    sys.path += [folder for folder in folders if folder not in sys.path]
    for module in modules:
        importlib.import_module(module)
    thread_count = len(os.listdir("/proc/self/task"))
    if thread_count != 1:
        raise RuntimeError(f"importing {', '.join(modules)} starts {thread_count - 1} threads: it can't be preloaded")


def make_reachable(folders: Sequence[str]) -> None:
    """Make ``folders`` reachable for any user in a mount namespace of this process's own, by a memory file system over
    the first folder on the way that others may not search. Needs to be root."""
    folders_by_cover: dict[str, list[str]] = {}
    for folder in folders:
        if cover := _first_private(folder):
            folders_by_cover.setdefault(cover, []).append(folder)
    if not folders_by_cover:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for cover, covered_folders in folders_by_cover.items():
        folder_fds = [os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for folder in covered_folders]
        kernel.mount("tmpfs", cover, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
        for folder, folder_fd in zip(covered_folders, folder_fds, strict=True):
            os.makedirs(folder, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{folder_fd}", folder, "", kernel.MS_BIND | kernel.MS_REC)
            kernel.restrict_mount(folder, isolation.READ_ONLY)
            os.close(folder_fd)


def _first_private(folder: str) -> str | None:
    folder_names = folder.strip("/").split("/")
    ancestors = ("/" + "/".join(folder_names[:count]) for count in range(1, len(folder_names)))
    return next((path for path in ancestors if not os.stat(path).st_mode & stat.S_IXOTH), None)


def call(name: str) -> int:
    """Run ``module:function`` of a preloaded module in this process, and return its exit code."""
    module_name, _, function_name = name.partition(":")
    try:
        getattr(sys.modules[module_name], function_name)()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0

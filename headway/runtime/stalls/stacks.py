"""Python stacks as text: of this process's threads and tasks, and out of what faulthandler wrote for another."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from headway.records.stalls import Stack

if TYPE_CHECKING:
    import asyncio

DUMP_SIGNAL = signal.SIGUSR2  # a process of ours writes its threads' stacks then, without the interpreter's lock
_POLL_S, _POLLS = 0.05, 30
_MOST_BYTES = 1 << 16
MOST_STACKS = 24
MOST_FRAMES = 24  # the innermost
_PACKAGE = [str(Path(file).parents[2]) for file in (__file__, os.path.realpath(__file__))]
_STANDARD = os.path.dirname(os.__file__)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def short_path(path: str) -> str:
    """Shorten a source file's path: "headway/…" in this package, "<library>/…" in installed ones, else from the user's
    folder on. Locations decide, not names of folders: a checkout or a project may be called headway too."""
    for package_folder in _PACKAGE:
        if path.startswith(f"{package_folder}/"):
            return f"headway{path[len(package_folder) :]}"
    libraries = [folder for folder in sys.path if folder.endswith(("/site-packages", "/dist-packages"))]
    if folders := [folder for folder in (_STANDARD, *libraries) if path.startswith(f"{folder}/")]:
        return f"<library>{path[len(max(folders, key=len)) :]}"
    path_parts = path.split("/")
    first_index = next((index for index in range(len(path_parts) - 2, 0, -1) if path_parts[index] != "headway"), 0)
    return "/".join(path_parts[first_index:])


def thread_stacks(skip: tuple[str, ...] = ()) -> list[Stack]:
    """Stacks of this process's threads, "main" first; threads named in ``skip`` are left out."""
    name_by_ident = {thread.ident: thread.name for thread in threading.enumerate()}
    name_by_ident[threading.main_thread().ident] = "main"
    frame_by_ident = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    stacks = [
        Stack(of=name_by_ident.get(ident) or f"thread {ident}", frames=_walk(frame))
        for ident, frame in frame_by_ident.items()
        if name_by_ident.get(ident) not in skip
    ]
    return sorted(stacks, key=lambda stack: stack.of != "main")[:MOST_STACKS]


def task_stacks(loop: asyncio.AbstractEventLoop) -> list[Stack]:
    """Stacks of the tasks of a loop, which may run in another thread, with the awaited frame last."""
    import asyncio  # a worker without a loop doesn't load it

    stacks = [Stack(of=f"task {task.get_name()}", frames=_awaited(task.get_coro())) for task in asyncio.all_tasks(loop)]
    return stacks[:MOST_STACKS]


def parse_dump(text: str) -> list[Stack]:
    """Stacks out of the text that faulthandler writes, which lists the innermost frame first and the main thread
    last; "main" first here."""
    stacks: list[Stack] = []
    thread_name, frame_lines = "", list[str]()

    def finish() -> None:
        if thread_name:
            stacks.append(Stack(of=thread_name, frames=tuple(frame_lines[::-1][-MOST_FRAMES:])))

    for line in text.splitlines():
        if (thread_match := _THREAD.match(line)) is not None:
            finish()
            thread_name, frame_lines = f"thread {thread_match[1].lstrip('0')}", []
        elif thread_name and (frame_match := _FRAME.match(line)) is not None:
            frame_lines.append(f"{short_path(frame_match[1])}:{frame_match[2]} {frame_match[3]}")
    finish()
    if stacks:
        stacks.insert(0, Stack(of="main", frames=stacks.pop().frames))
    return stacks[:MOST_STACKS]


def dump_of(pid: int, log: Path) -> tuple[bool, str]:
    """Make a process of this machine write the stacks of its threads to its ``log``. Returns whether it is stopped
    instead, by a signal or a debugger, and the text written: "" where none comes for 1.5 s, and for a process without
    a handler of the signal. Blocks."""
    try:
        status_by_field = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if status_by_field["State"][:1] in "Tt":
            return True, ""
        if not int(status_by_field["SigCgt"], 16) >> (DUMP_SIGNAL - 1) & 1:
            return False, ""
        start_offset = log.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
    except (OSError, ValueError):
        return False, ""
    for _ in range(_POLLS):
        time.sleep(_POLL_S)
        with suppress(OSError), log.open("rb") as file:
            file.seek(start_offset)
            dump_text = file.read(_MOST_BYTES).decode(errors="replace")
            if dump_text.endswith("\n") and "most recent call first" in dump_text:
                return False, dump_text
    return False, ""


def _walk(frame: FrameType | None) -> tuple[str, ...]:
    frame_lines: list[str] = []
    while frame is not None and len(frame_lines) < MOST_FRAMES:
        frame_lines.append(_line(frame))
        frame = frame.f_back
    return tuple(frame_lines[::-1])


def _awaited(coroutine: Any) -> tuple[str, ...]:
    frame_lines: list[str] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frame_lines.append(_line(frame))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return tuple(frame_lines[-MOST_FRAMES:])


def _line(frame: FrameType) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"

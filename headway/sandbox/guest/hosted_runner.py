"""Serves an owner's request inside a provider's sandbox, as a program. Standard library alone, Python 3.8 and later.

Providers differ in how they run commands and move files: some return text for bytes, leave processes behind after a
timeout, or follow links. The adapters therefore only run this program, once for each request; it does the work as the
local backend's first process does. Request and answer are JSON; the answer is the last line of the output. Code in
the sandbox may run as the same user as this process: it can kill this process, which the owner notices, and the answer
is no more trusted than the sandbox.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from headway.sandbox.guest import files, wire

MARKER = "headway:"  # before an answer
INLINE_BYTES = 1 << 16  # of an answer; a longer one is left in a file
GRACE_S = 0.1  # for output in pipes that another process still holds
READ_BYTES = 1 << 16
CANT_RUN, NOT_FOUND = 126, 127
INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LANG")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    request_name = request["do"]
    try:
        if request_name == "begin":
            return _begin(request)
        if request_name == "exec":
            return _exec(request)
        if request_name == "read":
            return {"data": _base64(b"".join(files.read(request["path"], request["max_bytes"])))}
        if request_name == "list":
            return {"entries": files.entries(request["path"], request["max_entries"])}
        if request_name == "write":
            writer = files.FileWriter(request["path"], request["mode"])
            writer.add(base64.b64decode(request["data"]))
            writer.finish()
            return {}
        raise OSError(errno.ENOSYS, f"unknown request {request_name!r}")
    except wire.REQUEST_ERRORS as error:
        return wire.error_of(error)


def _begin(request: dict[str, Any]) -> dict[str, Any]:
    """Make the working directory, and report the running processes, which are the provider's."""
    try:
        os.makedirs(request["workdir"], exist_ok=True)
    except PermissionError:  # most images whose user isn't root let it use sudo
        sudo = ["sudo", "-n", "install", "-d", "-o", str(os.getuid()), "-g", str(os.getgid()), request["workdir"]]
        completed = subprocess.run(sudo, capture_output=True, check=False) if shutil.which("sudo") else None
        if completed is None or completed.returncode:
            raise
    return {"processes": [[pid, start_time] for pid, start_time in _processes().items()]}


def _exec(request: dict[str, Any]) -> dict[str, Any]:
    if request["exclusive"]:
        _kill(dict(request["processes"]), others_too=True)
    earlier_processes = _processes()
    started_s = time.monotonic()
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    environment = {**environment, "TMPDIR": "/tmp", **request["environment"]}
    stdin = base64.b64decode(request["stdin"])
    try:
        process = subprocess.Popen(
            request["argv"],
            cwd=request["workdir"],
            env=environment,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = f"{getattr(error, 'filename', None) or request['argv'][0]}: {getattr(error, 'strerror', None) or error}\n"
        return _report(NOT_FOUND if missing else CANT_RUN, False, False, b"", why[:1000].encode(errors="replace"), 0.0)
    timed_out, output, truncated = _watch(process, stdin, started_s + request["timeout_s"], request["max_output_bytes"])
    if timed_out:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _kill(earlier_processes)
        process.wait()
    duration_s = time.monotonic() - started_s
    return _report(process.returncode, timed_out, truncated, bytes(output[0]), bytes(output[1]), duration_s)


def _report(code: int, timed_out: bool, truncated: bool, out: bytes, err: bytes, duration_s: float) -> dict[str, Any]:
    return {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "timed_out": timed_out,
        "truncated": truncated,
        "stdout": _base64(out),
        "stderr": _base64(err),
        "duration_s": duration_s,
    }


def _watch(
    process: subprocess.Popen[bytes], data: bytes, deadline_s: float, max_bytes: int
) -> tuple[bool, tuple[bytearray, bytearray], bool]:
    """Wait until the command ends or its time is over; return whether it timed out, its output, and whether that is
    truncated."""
    output = (bytearray(), bytearray())
    truncated = False
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        for pipe, buffer in zip((process.stdout, process.stderr), output):  # noqa: B905  Python 3.8
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, buffer)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        ended_s = None
        while True:
            now = time.monotonic()
            if ended_s is None and process.poll() is not None:
                ended_s = now
            if ended_s is None and now >= deadline_s:
                return True, output, truncated
            if ended_s is not None and (not _has_open_output(selector) or now >= ended_s + GRACE_S):
                return False, output, truncated
            for key, _ in selector.select(0.02):
                pipe: Any = key.fileobj
                if key.data is None:
                    data = _feed(selector, pipe, data)
                    continue
                chunk = os.read(pipe.fileno(), READ_BYTES)
                if not chunk:
                    selector.unregister(pipe)
                    continue
                free_bytes = max_bytes - len(key.data)
                key.data.extend(chunk[:free_bytes])
                truncated = truncated or len(chunk) > free_bytes


def _has_open_output(selector: selectors.BaseSelector) -> bool:
    return any(key.data is not None for key in selector.get_map().values())


def _feed(selector: selectors.BaseSelector, pipe: Any, data: bytes) -> bytes:
    try:
        data = data[os.write(pipe.fileno(), data[:READ_BYTES]) :]
    except BlockingIOError:
        return data
    except OSError:
        data = b""
    if not data:
        selector.unregister(pipe)
        pipe.close()
    return data


def _stat(pid: Any) -> list[str]:
    """Return a process's fields in /proc/PID/stat from its state on; [] if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _processes() -> dict[int, str]:
    """Return all visible processes: id -> start time, since a process id alone may be used again."""
    stat_by_pid = {int(name): _stat(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: fields[19] for pid, fields in stat_by_pid.items() if fields and fields[0] not in "ZX"}


def _kill(spared: dict[int, str], *, others_too: bool = False) -> None:
    """Kill all processes except ``spared`` (id -> start time), this one and its ancestors; with ``others_too`` also
    those of other requests."""
    kept = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in kept:
        kept.add(pid)
        pid = _parent(pid)
    for _ in range(50):
        victim_pids = [pid for pid, start in _processes().items() if spared.get(pid) != start and pid not in kept | {1}]
        if not others_too:
            victim_pids = [pid for pid in victim_pids if not _belongs_to_other_request(pid)]
        for victim_pid in victim_pids:
            with contextlib.suppress(OSError):
                os.kill(victim_pid, signal.SIGKILL)
        if not victim_pids:
            return
        time.sleep(0.005)


def _belongs_to_other_request(pid: int) -> bool:
    """Return whether a process is another run of this program, or descends from one. The search ends at this process,
    which is an ancestor of its own children."""
    while pid > 1 and pid != os.getpid():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if __spec__ is not None and __spec__.name.encode() in file.read().split(b"\0"):
                return True
        pid = _parent(pid)
    return False


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    """Answer the request in ``sys.argv[1]``: base64, or "@" and the file that holds it. ``sys.argv[2]``: the file for
    an answer that is longer than `INLINE_BYTES`."""
    encoded_request = sys.argv[1]
    if encoded_request.startswith("@"):
        with open(encoded_request[1:], "rb") as file:
            encoded_request = file.read().decode()
        os.unlink(sys.argv[1][1:])
    answer_json = json.dumps(answer(json.loads(base64.b64decode(encoded_request))))
    if len(answer_json) > INLINE_BYTES:
        try:
            with open(sys.argv[2], "w") as file:
                file.write(answer_json)
            answer_json = json.dumps({"in": sys.argv[2]})
        except OSError as error:  # a command has filled the disk
            answer_json = json.dumps({"killed": f"had no space for its answer: {error.strerror}"})
    print(f"\n{MARKER}{answer_json}", flush=True)


if __name__ == "__main__":
    main()

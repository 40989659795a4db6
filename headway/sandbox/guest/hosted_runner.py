"""The program that serves an owner's request inside a provider's sandbox. Standard library alone, Python 3.8 and later.

Providers run commands and move files each in their own way, with text for bytes, with timeouts that leave processes
behind, with links followed. So the adapters ask them for one thing only: to run this, once for each request, which does
the rest as the local backend's first process does it. A request is JSON, and so is the answer, on the last line of the
output. Whoever runs code in the sandbox may be the same user as this process: it can be killed, which the owner sees,
and what it says of a command can't be more trusted than the sandbox.
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

MARK = "headway:"  # before an answer
INLINE_BYTES = 1 << 16  # of an answer; a longer one is left in a file
GRACE_S = 0.1  # for output that somebody else still holds the pipe of
READ_BYTES = 1 << 16
CANT_RUN, NOT_FOUND = 126, 127
OWN_NAMES = ("PATH", "HOME", "USER", "LANG")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    do = request["do"]
    try:
        if do == "begin":
            return _begin(request)
        if do == "exec":
            return _exec(request)
        if do == "read":
            return {"data": _encoded(b"".join(files.read(request["path"], request["max_bytes"])))}
        if do == "list":
            return {"entries": files.entries(request["path"], request["max_entries"])}
        if do == "write":
            writing = files.Writing(request["path"], request["mode"])
            writing.add(base64.b64decode(request["data"]))
            writing.finish()
            return {}
        raise OSError(errno.ENOSYS, f"unknown request {do!r}")
    except wire.MISTAKES as error:
        return wire.error_of(error)


def _begin(request: dict[str, Any]) -> dict[str, Any]:
    """Make the working directory, and tell who runs already: the provider's own."""
    try:
        os.makedirs(request["workdir"], exist_ok=True)
    except PermissionError:  # images whose user isn't root mostly let it become root
        own = ["sudo", "-n", "install", "-d", "-o", str(os.getuid()), "-g", str(os.getgid()), request["workdir"]]
        made = subprocess.run(own, capture_output=True, check=False) if shutil.which("sudo") else None
        if made is None or made.returncode:
            raise
    return {"processes": [[pid, started] for pid, started in _processes().items()]}


def _exec(request: dict[str, Any]) -> dict[str, Any]:
    if request["exclusive"]:
        _kill(dict(request["processes"]), others_too=True)
    others = _processes()
    started_s = time.monotonic()
    environment = {name: os.environ[name] for name in OWN_NAMES if name in os.environ}
    environment = {**environment, "TMPDIR": "/tmp", **request["environment"]}
    data = base64.b64decode(request["stdin"])
    try:
        process = subprocess.Popen(
            request["argv"],
            cwd=request["workdir"],
            env=environment,
            stdin=subprocess.PIPE if data else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = f"{getattr(error, 'filename', None) or request['argv'][0]}: {getattr(error, 'strerror', None) or error}\n"
        return _report(NOT_FOUND if missing else CANT_RUN, False, False, b"", why[:1000].encode(errors="replace"), 0.0)
    timed_out, output, truncated = _watch(process, data, started_s + request["timeout_s"], request["max_output_bytes"])
    if timed_out:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _kill(others)
        process.wait()
    duration_s = time.monotonic() - started_s
    return _report(process.returncode, timed_out, truncated, bytes(output[0]), bytes(output[1]), duration_s)


def _report(code: int, timed_out: bool, truncated: bool, out: bytes, err: bytes, duration_s: float) -> dict[str, Any]:
    return {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "timed_out": timed_out,
        "truncated": truncated,
        "stdout": _encoded(out),
        "stderr": _encoded(err),
        "duration_s": duration_s,
    }


def _watch(
    process: subprocess.Popen[bytes], data: bytes, until_s: float, max_bytes: int
) -> tuple[bool, tuple[bytearray, bytearray], bool]:
    """Wait until the command ends or its time is over; return (timed out, output, truncated)."""
    output = (bytearray(), bytearray())
    truncated = False
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        for pipe, kept in zip((process.stdout, process.stderr), output):  # noqa: B905  Python 3.8
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, kept)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        ended_s = None
        while True:
            now = time.monotonic()
            if ended_s is None and process.poll() is not None:
                ended_s = now
            if ended_s is None and now >= until_s:
                return True, output, truncated
            if ended_s is not None and (not _reads(selector) or now >= ended_s + GRACE_S):
                return False, output, truncated
            for key, _ in selector.select(0.02):
                pipe: Any = key.fileobj
                if key.data is None:
                    data = _feed(selector, pipe, data)
                    continue
                part = os.read(pipe.fileno(), READ_BYTES)
                if not part:
                    selector.unregister(pipe)
                    continue
                room = max_bytes - len(key.data)
                key.data.extend(part[:room])
                truncated = truncated or len(part) > room


def _reads(selector: selectors.BaseSelector) -> bool:
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
    """Return the kernel's fields on a process, from its state on; none if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _processes() -> dict[int, str]:
    """Every process that can be seen, by when it was started: a number alone may be another's later."""
    found = {int(name): _stat(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: fields[19] for pid, fields in found.items() if fields and fields[0] not in "ZX"}


def _kill(but: dict[int, str], *, others_too: bool = False) -> None:
    """Every process but those, this one and the ones it comes from; what other requests started, if that's meant."""
    kept = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in kept:
        kept.add(pid)
        pid = _parent(pid)
    for _ in range(50):
        others = [one for one, start in _processes().items() if but.get(one) != start and one not in kept | {1}]
        if not others_too:
            others = [one for one in others if not _of_another_request(one)]
        for one in others:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
        if not others:
            return
        time.sleep(0.005)


def _of_another_request(pid: int) -> bool:
    """Whether it is a process like this one, or comes from one. This one isn't: it goes by its own children."""
    while pid > 1 and pid != os.getpid():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if __spec__ is not None and __spec__.name.encode() in file.read().split(b"\0"):
                return True
        pid = _parent(pid)
    return False


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    """``sys.argv[1]``: the request, encoded, or @ and the file it is in; an answer may go to the file after it."""
    told = sys.argv[1]
    if told.startswith("@"):
        with open(told[1:], "rb") as file:
            told = file.read().decode()
        os.unlink(sys.argv[1][1:])
    said = json.dumps(answer(json.loads(base64.b64decode(told))))
    if len(said) > INLINE_BYTES:
        try:
            with open(sys.argv[2], "w") as file:
                file.write(said)
            said = json.dumps({"in": sys.argv[2]})
        except OSError as error:  # what ran has filled the disk
            said = json.dumps({"killed": f"had no room for its answer: {error.strerror}"})
    print(f"\n{MARK}{said}", flush=True)


if __name__ == "__main__":
    main()

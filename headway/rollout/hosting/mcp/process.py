"""A server of tools as a process: lines of JSON over its stdin and stdout, within limits.

Beside the transport of the package mcp for four things: nothing of our environment is passed on, a line has a limit,
one that can't be read costs its own request alone, and what the server has started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from headway.rollout.hosting.agents.host import MARK, kill_marked
from headway.runtime.supervision import end_group

# An answer's id, at the beginning or the end of its line, as servers order their keys; a line that asks us something.
_VERSION, _ID = rb'"jsonrpc"\s*:\s*"2\.0"', rb'"id"\s*:\s*(\d+|"[^"\\]{1,64}")'
_BEGINS = re.compile(rb"\s*\{\s*(?:%s\s*,\s*)?%s\s*," % (_VERSION, _ID))
_ENDS = re.compile(rb"[{,]\s*%s\s*(?:,\s*%s\s*)?\}\s*$" % (_ID, _VERSION))
_ASKS = re.compile(rb'\s*\{\s*(?:(?:%s|%s)\s*,\s*){0,2}"method"' % (_VERSION, _ID))
_ENDING_BYTES = 200  # of a line, that both of its ends are looked for in
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)", re.DOTALL)
_END_S = 1.0  # after its stdin was closed, and again after SIGTERM
_WRITE_S = 30.0  # that it may leave a request unread


@contextlib.asynccontextmanager
async def process_streams(
    command: Sequence[str], environment: Mapping[str, str], result_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """A transport for mcp's Client: (stream of its messages, stream of ours). A line beyond ``result_bytes``, or
    that can't be read, is dropped, and its request answered with an error that says so. Raises OSError for a program
    that can't be started."""
    import anyio

    pipe, mark = asyncio.subprocess.PIPE, f"mcp-{secrets.token_hex(8)}"
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env={**environment, MARK: mark}, start_new_session=True, limit=result_bytes
    )
    heard, read = anyio.create_memory_object_stream[Any](0)
    write, wanted = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.create_task(_hear(process, heard)), asyncio.create_task(_tell(process, wanted, heard))]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_ended(process, mark)))
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (heard, read, write, wanted):
            stream.close()


async def _hear(process: asyncio.subprocess.Process, heard: Any) -> None:
    """Pass the server's messages to ``heard`` until its stdout ends."""
    assert process.stdout is not None
    async with heard:
        while True:
            line, too_long = await _line(process.stdout)
            if line is None:
                return
            message = None if too_long else _parsed(line)
            if message is None:
                message = _refusal(line, "is too long: ask for less" if too_long else "can't be read")
            if message is not None:
                await heard.send(message)


async def _line(stdout: asyncio.StreamReader) -> tuple[bytes | None, bool]:
    """The next line, or of one that is too long its beginning and its end; None at the end."""
    begun = end = b""
    while True:
        try:
            line = await stdout.readuntil(b"\n")
            return (begun + (end + line)[-_ENDING_BYTES:], True) if begun else (line, False)
        except asyncio.IncompleteReadError:
            return None, False
        except asyncio.LimitOverrunError as error:
            part = await stdout.read(error.consumed)
            begun, end = begun or part[:_ENDING_BYTES], (end + part)[-_ENDING_BYTES:]


def mended(line: bytes) -> bytes:
    """A line of JSON with U+FFFD for what has no UTF-8 form, which would make all of it unreadable: bytes that are no
    UTF-8, and escapes of halves of surrogate pairs."""
    line = line.decode("utf-8", "replace").encode()
    return _ESCAPE.sub(lambda one: rb"\ufffd" if one[1] else one[0], line) if _HALF.search(line) else line


def _parsed(line: bytes) -> Any:
    """The message in a line; None where there is none: some servers also print to stdout."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(mended(line), by_name=False))
    except ValueError:
        return None


def _refusal(line: bytes, why: str) -> Any:
    """The answer to the request whose result is lost; None where the line names none, which then has its time limit."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    found = None if _ASKS.match(line) else _BEGINS.match(line) or _ENDS.search(line)
    if found is None:
        return None
    number = found.group(1).decode()
    error = mcp_types.ErrorData(code=mcp_types.INVALID_PARAMS, message=f"its result {why}")
    request = int(number) if number.isdecimal() else number.strip('"')
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=request, error=error))


async def _tell(process: asyncio.subprocess.Process, wanted: Any, heard: Any) -> None:
    """Write messages to the server's stdin; a server that stops reading counts as dead."""
    assert process.stdin is not None
    try:
        async for message in wanted:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(_WRITE_S):
                await process.stdin.drain()
    except OSError:
        heard.close()  # callers that wait for an answer see the end of the stream


async def _ended(process: asyncio.subprocess.Process, mark: str) -> None:
    """End the server: close stdin, then SIGTERM, then SIGKILL; and kill the rest of its process group, and whatever
    else has its mark."""
    assert process.stdin is not None
    process.stdin.close()
    await end_group(process, (0, signal.SIGTERM, signal.SIGKILL), _END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # processes of its group that are left
    await asyncio.to_thread(kill_marked, mark)
    process._transport.close()  # type: ignore[attr-defined]  (else a pipe that somebody else has keeps it)

"""A server of tools as a process: lines of JSON over its stdin and stdout, within limits.

Beside the transport of the package mcp for three things: nothing of our environment is passed on, a line has a limit,
and what the server has started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

_ID = re.compile(rb'^\{"jsonrpc":\s*"2\.0",\s*"id":\s*(\d+|"[^"]{1,64}")')
_END_S = 1.0  # after its stdin was closed, and again after SIGTERM
_WRITE_S = 30.0  # that it may leave a request unread


@contextlib.asynccontextmanager
async def process_streams(
    command: Sequence[str], environment: Mapping[str, str], result_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """A transport for mcp's Client: (stream of its messages, stream of ours). A line beyond ``result_bytes`` is
    dropped, and its request answered with an error that says so. Raises OSError for a program that can't be started."""
    import anyio

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=dict(environment), start_new_session=True, limit=result_bytes
    )
    heard, read = anyio.create_memory_object_stream[Any](0)
    write, wanted = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.create_task(_hear(process, heard)), asyncio.create_task(_tell(process, wanted, heard))]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_ended(process)))
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
            message = _refusal(line) if too_long else _parsed(line)
            if message is not None:
                await heard.send(message)


async def _line(stdout: asyncio.StreamReader) -> tuple[bytes | None, bool]:
    """The next line, or of one that is too long its beginning; None at the end."""
    begun = b""
    while True:
        try:
            line = await stdout.readuntil(b"\n")
            return (begun, True) if begun else (line, False)
        except asyncio.IncompleteReadError:
            return None, False
        except asyncio.LimitOverrunError as error:
            begun = begun or (await stdout.read(min(error.consumed, 200)))
            await stdout.read(max(0, error.consumed - 200))


def _parsed(line: bytes) -> Any:
    """The message in a line; None where there is none: some servers also print to stdout."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        return None


def _refusal(begun: bytes) -> Any:
    """The answer to the request whose result was too long; ends the conversation where that isn't known."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    found = _ID.match(begun)
    if found is None:
        raise ConnectionError("a line beyond result_bytes that names no request")
    number = found.group(1).decode()
    error = mcp_types.ErrorData(code=mcp_types.INVALID_PARAMS, message="its result is too long: ask for less")
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


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End the server: close stdin, then SIGTERM, then SIGKILL; and kill the rest of its process group."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
                break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # processes of its group that are left
    process._transport.close()  # type: ignore[attr-defined]  (else a pipe that somebody else has keeps it)

"""A transport to a tool server in a process: lines of JSON over its stdin and stdout, within limits.

It differs from the package mcp's transport in four points: the server inherits nothing of our environment, a line has a
limit, an unreadable line fails its own request alone, and all processes that the server has started end with it.
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

# The id of an answer, at the beginning or the end of its line, as servers order their keys; a request of the server.
_VERSION, _ID = rb'"jsonrpc"\s*:\s*"2\.0"', rb'"id"\s*:\s*(\d+|"[^"\\]{1,64}")'
_BEGINS = re.compile(rb"\s*\{\s*(?:%s\s*,\s*)?%s\s*," % (_VERSION, _ID))
_ENDS = re.compile(rb"[{,]\s*%s\s*(?:,\s*%s\s*)?\}\s*$" % (_ID, _VERSION))
_ASKS = re.compile(rb'\s*\{\s*(?:(?:%s|%s)\s*,\s*){0,2}"method"' % (_VERSION, _ID))
_ENDING_BYTES = 200  # searched for the id at both ends of a line
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)", re.DOTALL)
_END_S = 1.0  # wait after its stdin was closed, and again after SIGTERM
_WRITE_S = 30.0  # longest time that it may leave a request unread


@contextlib.asynccontextmanager
async def process_streams(
    command: Sequence[str], environment: Mapping[str, str], result_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a transport for mcp's Client: (stream of the server's messages, stream of ours). A line that is longer than
    ``result_bytes`` or can't be read is dropped, and its request gets an error that says so. Raises OSError for a
    program that can't be started."""
    import anyio

    pipe, mark = asyncio.subprocess.PIPE, f"mcp-{secrets.token_hex(8)}"
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env={**environment, MARK: mark}, start_new_session=True, limit=result_bytes
    )
    incoming, read_stream = anyio.create_memory_object_stream[Any](0)
    write_stream, outgoing = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.create_task(_receive(process, incoming)), asyncio.create_task(_send(process, outgoing, incoming))]
    try:
        yield read_stream, write_stream
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_end_process(process, mark)))
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (incoming, read_stream, write_stream, outgoing):
            stream.close()


async def _receive(process: asyncio.subprocess.Process, incoming: Any) -> None:
    """Send the server's messages to ``incoming`` until its stdout ends."""
    assert process.stdout is not None
    async with incoming:
        while True:
            line, too_long = await _line(process.stdout)
            if line is None:
                return
            message = None if too_long else _parsed(line)
            if message is None:
                message = _refusal(line, "is too long: ask for less" if too_long else "can't be read")
            if message is not None:
                await incoming.send(message)


async def _line(stdout: asyncio.StreamReader) -> tuple[bytes | None, bool]:
    """Return the next line and False, or the ends of a line that is too long and True; None at the end."""
    line_start = line_end = b""
    while True:
        try:
            line = await stdout.readuntil(b"\n")
            return (line_start + (line_end + line)[-_ENDING_BYTES:], True) if line_start else (line, False)
        except asyncio.IncompleteReadError:
            return None, False
        except asyncio.LimitOverrunError as error:
            chunk = await stdout.read(error.consumed)
            line_start, line_end = line_start or chunk[:_ENDING_BYTES], (line_end + chunk)[-_ENDING_BYTES:]


def repair_utf8(line: bytes) -> bytes:
    """Return a line of JSON with U+FFFD in place of bytes that are no UTF-8 and of escaped halves of surrogate pairs,
    each of which would make the whole line unreadable."""
    line = line.decode("utf-8", "replace").encode()
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], line) if _HALF.search(line) else line


def _parsed(line: bytes) -> Any:
    """Return the message in a line; None where there is none: some servers also print to stdout."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(repair_utf8(line), by_name=False))
    except ValueError:
        return None


def _refusal(line: bytes, why: str) -> Any:
    """Return an error answer to the request whose result is lost; None where the line names no request, which then
    ends at its time limit."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    match = None if _ASKS.match(line) else _BEGINS.match(line) or _ENDS.search(line)
    if match is None:
        return None
    id_text = match.group(1).decode()
    error = mcp_types.ErrorData(code=mcp_types.INVALID_PARAMS, message=f"its result {why}")
    request_id = int(id_text) if id_text.isdecimal() else id_text.strip('"')
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


async def _send(process: asyncio.subprocess.Process, outgoing: Any, incoming: Any) -> None:
    """Write messages to the server's stdin; a server that stops reading is treated as dead."""
    assert process.stdin is not None
    try:
        async for message in outgoing:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(_WRITE_S):
                await process.stdin.drain()
    except OSError:
        incoming.close()  # callers that wait for an answer see the end of the stream


async def _end_process(process: asyncio.subprocess.Process, mark: str) -> None:
    """End the server: close stdin, then SIGTERM, then SIGKILL; then kill the rest of its process group and all
    processes with its mark."""
    assert process.stdin is not None
    process.stdin.close()
    await end_group(process, (0, signal.SIGTERM, signal.SIGKILL), _END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the remaining processes of its group
    await asyncio.to_thread(kill_marked, mark)
    process._transport.close()  # type: ignore[attr-defined]  (a pipe held by another process would keep it open)

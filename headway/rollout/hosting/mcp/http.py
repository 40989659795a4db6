"""The HTTP client of tool servers: a malformed reply closes the connection, and an answer's size is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from headway.rollout.hosting.mcp.process import repair_utf8
from headway.runtime.imports import import_extra

_NO_SERVER = (502, 503, 504)  # a proxy's answers for a server that isn't available


def http_client(headers: Mapping[str, str], *, connect_s: float, read_s: float, result_bytes: int) -> Any:
    """Return an HTTP client for mcp's transport. It cuts an answer beyond ``result_bytes``, which can't be parsed then,
    so that only its request fails."""
    httpx = import_extra("httpx2", "mcp", "environment.mcp")

    class BoundedStream(httpx.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            remaining_bytes, line = result_bytes, b""
            async for chunk in self._stream:
                *complete_lines, line = (line + chunk[:remaining_bytes]).split(b"\n")
                for complete_line in complete_lines:
                    yield repair_utf8(complete_line) + b"\n"
                remaining_bytes -= len(chunk)
                if remaining_bytes < 0:
                    yield repair_utf8(line) + b"\n\n"  # the end of an event, where it is one
                    return
            yield repair_utf8(line)

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def check_status(response: Any) -> None:
        if response.status_code in _NO_SERVER:
            response.raise_for_status()
        if response.request.method == "POST":
            response.stream = BoundedStream(response.stream)

    return httpx.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},  # the size limit counts the bytes that are read
        timeout=httpx.Timeout(connect_s, read=read_s),
        follow_redirects=False,  # the key goes nowhere else
        event_hooks={"response": [check_status]},
    )

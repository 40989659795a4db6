"""The HTTP client of tool servers: a malformed reply closes the connection, and an answer's size is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from headway.rollout.hosting.mcp.process import mended
from headway.runtime.imports import import_extra

_NO_SERVER = (502, 503, 504)  # what stands before one says that there is none


def http_client(headers: Mapping[str, str], *, connect_s: float, read_s: float, result_bytes: int) -> Any:
    """HTTP client for mcp's transport. An answer beyond ``result_bytes`` is cut, so that it can't be parsed, and only
    its request fails."""
    httpx = import_extra("httpx2", "mcp", "environment.mcp")

    class Cut(httpx.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left, line = result_bytes, b""
            async for part in self._stream:
                *lines, line = (line + part[:left]).split(b"\n")
                for one in lines:
                    yield mended(one) + b"\n"
                left -= len(part)
                if left < 0:
                    yield mended(line) + b"\n\n"  # the end of an event, where it is one
                    return
            yield mended(line)

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def look(response: Any) -> None:
        if response.status_code in _NO_SERVER:
            response.raise_for_status()
        if response.request.method == "POST":
            response.stream = Cut(response.stream)

    return httpx.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},  # what is counted is what is read
        timeout=httpx.Timeout(connect_s, read=read_s),
        follow_redirects=False,  # the key goes nowhere else
        event_hooks={"response": [look]},
    )

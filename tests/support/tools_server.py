"""A server of tools, of the package mcp: over stdio, or with a port as its argument over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Remember a text; all texts so far."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("out of order")


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def slow() -> str:
    """Takes long."""
    import anyio

    await anyio.sleep(20)
    return "at last"


@server.tool()
def hangs() -> str:
    """Stops the whole server."""
    os.kill(os.getpid(), 19)
    return ""


@server.tool()
def long(characters: int) -> str:
    """A long text."""
    return "x" * characters


@server.tool()
def variables() -> str:
    """Names of the environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def pid() -> int:
    """The process."""
    return os.getpid()


if __name__ == "__main__":
    if os.environ.get("LATE"):
        time.sleep(float(os.environ["LATE"]))
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("a greeting that is no message", flush=True)
        server.run()

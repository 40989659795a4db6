"""The proxy of sandboxes that may reach some hosts, over plain sockets: what one may take from the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from headway.sandbox.local.proxy import Proxy, ProxySettings


def test_a_sandbox_that_asks_for_slow_names_looks_up_a_few_at_a_time_however_often_it_gives_up():
    looking: set[str] = set()

    async def slow(name: str, port: int) -> Sequence[str]:
        looking.add(name)
        await asyncio.sleep(0.6)  # as a thread: it ends when it ends
        looking.discard(name)
        raise OSError("try again")

    async def main():
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        proxy = Proxy(listener, ["*.slow.example"], ProxySettings(connect_s=0.2), slow)

        async def ask(name: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT {name}.slow.example:443 HTTP/1.1\r\n\r\n".encode())
            said = await reader.readline()
            writer.close()
            return said

        said = [await asyncio.gather(*(ask(f"{turn}-{number}") for number in range(6))) for turn in range(2)]
        assert {line.split()[1] for lines in said for line in lines} == {b"502"}
        assert looking == {"0-0.slow.example", "0-1.slow.example"}, "given up, and not over"
        await asyncio.sleep(0.5)
        await ask("again")
        assert "again.slow.example" in looking
        await asyncio.sleep(0.7)
        proxy.close()

    asyncio.run(main())

"""Sandboxes that may reach some hosts and no others: servers of this machine, names by a resolver of ours."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from sandbox_backends import SMALL, nothing_left, run

from headway.records.errors import ConfigurationError
from headway.records.sandbox import Command, ExecResult
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.proxy import ProxySettings
from headway.sandbox.local.sandbox import LocalSandbox
from headway.sandbox.local.zygote_process import LocalSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
RAW = """
import socket, sys
s = socket.create_connection(('127.0.0.1', 3128)); s.settimeout(20)
s.sendall(sys.stdin.buffer.read())
while data := s.recv(65536): sys.stdout.buffer.write(data)
"""


class Server:
    """Answers each request with what it got, and keeps it."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.open = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while True:  # as a server that goes on, whatever it is told of closing
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                if b" /silent" in head:
                    continue
                said = b"x" * (4 << 20) if b" /large" in head else head + body
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
                await writer.drain()
                if b"connection: close" in head.lower():
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


class Names:
    """A resolver: names to addresses, every question kept."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.addresses: dict[str, list[tuple[str, ...]]] = {}

    async def __call__(self, name: str, port: int) -> tuple[str, ...]:
        self.asked.append(name)
        if name not in self.addresses:
            return ("127.0.0.1",)
        answers = self.addresses[name]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


@asynccontextmanager
async def reaching(
    folder: Path, *network: str, names: Names | None = None, proxy: ProxySettings | None = None
) -> AsyncIterator[LocalSandbox]:
    settings = LocalSettings(spares=1, proxy=proxy or ProxySettings())
    backend = LocalBackend(
        folder / "state", snapshots=folder / "snapshots", settings=settings, resolve=names or Names()
    )
    async with backend:
        box = await backend.create(msgspec.structs.replace(SMALL, network=network))
        try:
            yield box
        finally:
            await box.terminate()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


async def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def curl(box: LocalSandbox, *arguments: str) -> ExecResult:
    return await box.exec(Command(argv=["curl", "-sS", "--max-time", "20", *arguments]))


async def raw(box: LocalSandbox, data: bytes) -> bytes:
    return (await box.exec(Command(argv=["python3", "-c", RAW], stdin=data, max_output_bytes=1 << 16))).stdout


def test_a_listed_host_is_reached_plainly_and_by_a_tunnel(tmp_path: Path):
    async def main():
        async with serving() as server, reaching(tmp_path, f"a.test:{server.port}", f"127.0.0.1:{server.port}") as box:
            plain = await curl(box, f"http://a.test:{server.port}/path?q=1", "-d", "sent")
            assert plain.stdout.startswith(b"POST /path?q=1 HTTP/1.1\r\nHost: a.test:"), plain.stderr
            assert plain.stdout.endswith(b"\r\n\r\nsent")
            assert b"proxy" not in plain.stdout.lower()
            tunnel = await curl(box, "-p", f"http://a.test:{server.port}/path")
            assert tunnel.stdout.startswith(b"GET /path HTTP/1.1")
            large = await curl(box, f"http://a.test:{server.port}/large", "-o", "large")
            assert large.ok, large.stderr
            assert (await box.exec(Command(argv=["stat", "-c", "%s", "large"]))).stdout == b"4194304\n"
            use = box.network_use
            assert use is not None
            assert [(one.host, one.port, one.refused, one.requests) for one in use.hosts] == [
                ("a.test", server.port, "", 3)
            ]
            assert use.bytes == use.hosts[0].bytes > 4 << 20

    run(main)


def certified(folder: Path, name: str) -> ssl.SSLContext:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, "-addext", f"subjectAltName=DNS:{name}", *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


URLLIB = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile='/work/cert.pem')
print(urllib.request.urlopen(sys.argv[1], context=context, timeout=20).read().decode())
"""


def test_tls_goes_through_end_to_end(tmp_path: Path):
    async def main():
        async with (
            serving(certified(tmp_path, "secure.test")) as server,
            reaching(tmp_path, f"*.test:{server.port}", f"127.0.0.1:{server.port}") as box,
        ):
            await box.write("cert.pem", (tmp_path / "cert.pem").read_bytes())
            url = f"https://secure.test:{server.port}/by"
            by_curl = await curl(box, "--cacert", "cert.pem", url)
            assert by_curl.stdout.startswith(b"GET /by HTTP/1.1"), by_curl.stderr
            by_urllib = await box.exec(Command(argv=["python3", "-c", URLLIB, url]))
            assert by_urllib.stdout.startswith(b"GET /by HTTP/1.1"), by_urllib.stderr

    run(main)


def test_what_isnt_listed_is_refused_and_told(tmp_path: Path):
    async def main():
        names = Names()
        async with (
            serving() as server,
            reaching(tmp_path, f"a.test:{server.port}", f"*.b.test:{server.port}", names=names) as box,
        ):
            port = server.port
            hosts = ["c.test", "xa.test", "a.test.c", "b.test", "x-b.test", "127.0.0.1", "[::1]", "localhost.c"]
            for url in [*(f"http://{host}:{port}/" for host in hosts), "http://a.test/", "http://a.test:1/"]:
                plain = await curl(box, "--noproxy", "nothing", "-w", "%{http_code}", url)
                assert plain.stdout.endswith(b"403"), (url, plain)
                assert f"(network = a.test:{port}, *.b.test:{port})".encode() in plain.stdout
                tunnel = await curl(box, "--noproxy", "nothing", "-p", url)
                assert b"response 403" in tunnel.stderr
            assert names.asked == []  # not even its name leaves
            assert server.heads == []
            use = box.network_use
            assert use is not None
            assert {one.refused for one in use.hosts} == {"Not on the allow-list"}
            assert sum(one.requests for one in use.hosts) == 20

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.8.8", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "fd00:ec2::254", "0.0.0.0"],
)
def test_a_listed_name_with_an_address_of_the_inside_is_refused(tmp_path: Path, address: str):
    async def main():
        names = Names()
        names.addresses["a.test"] = [(address,)]
        async with serving() as server, reaching(tmp_path, f"a.test:{server.port}", names=names) as box:
            answer = await curl(box, "-w", "%{http_code}", f"http://a.test:{server.port}/")
            assert answer.stdout.endswith(b"403")
            assert b"isn't public" in answer.stdout
            assert server.heads == []

    run(main)


def test_the_address_that_was_looked_at_is_the_one_connected_to(tmp_path: Path):
    """A name that is one address when it is checked and another when it is used: it is asked for once a request."""

    async def main():
        names = Names()
        async with (
            serving() as listed,
            serving() as other,
            reaching(tmp_path, f"a.test:{listed.port}", f"127.0.0.2:{listed.port}", names=names) as box,
        ):
            names.addresses["a.test"] = [("127.0.0.2", "127.0.0.1"), ("127.0.0.1",)]
            answer = await curl(box, "-w", "%{http_code}", f"http://a.test:{listed.port}/")
            assert answer.stdout.endswith(b"502")  # nobody listens at the listed one, and the other isn't tried
            assert names.asked == ["a.test"]
            assert b"403" in (await curl(box, "-w", "%{http_code}", f"http://a.test:{listed.port}/")).stdout
            assert (listed.heads, other.heads) == ([], [])

    run(main)


def test_this_machine_by_its_public_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.sandbox.local.proxy.is_public", lambda address: True)

    async def main():
        async with serving() as server, reaching(tmp_path, f"a.test:{server.port}") as box:
            answer = await curl(box, "-w", "%{http_code}", f"http://a.test:{server.port}/")
            assert answer.stdout.endswith(b"403")
            assert b"is this machine's" in answer.stdout
            assert server.heads == []

    run(main)


def test_nothing_rides_along_with_an_allowed_request(tmp_path: Path):
    async def main():
        async with serving() as server, reaching(tmp_path, f"a.test:{server.port}", f"127.0.0.1:{server.port}") as box:
            host = f"a.test:{server.port}"
            get = f"GET http://{host}/silent HTTP/1.1\r\nHost: {host}\r\n".encode()
            second = b"GET /second HTTP/1.1\r\nHost: internal\r\n\r\n"
            for data, status in [
                (get + b"\r\n" + second, b""),  # pipelined: the connection ends
                (get + b"Content-Length: 5\r\n\r\n" + second, b""),
                (get + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + second, b"411"),
                (get + b"Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + second, b"400"),
                (get + b"Host: internal\r\n\r\n", b"400"),
                (get.replace(b"Host: a.test", b"Host: internal") + b"\r\n", b"400"),
                (get + b" folded: x\r\n\r\n", b"400"),
                (b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n", b"400"),
                (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
            ]:
                answer = await raw(box, data)
                assert answer.startswith(b"HTTP/1.1 " + status) if status else b"200" not in answer, (data, answer)
            assert all(b"internal" not in head for head in server.heads)
            assert all(b" /silent HTTP/1.1\r\nHost: a.test" in head for head in server.heads)

    run(main)


def test_heads_have_a_limit_in_bytes_and_in_time(tmp_path: Path):
    async def main():
        async with reaching(tmp_path, "a.test", proxy=ProxySettings(head_s=0.5)) as box:
            assert (await raw(box, b"GET http://a.test/" + b"x" * 100_000)).startswith(b"HTTP/1.1 431")
            assert (await raw(box, b"GET http://a.test/ HTTP/1.1\r\nHost:")).startswith(b"HTTP/1.1 408")

    run(main)


def test_connections_end_when_nothing_moves_and_when_the_bytes_are_used_up(tmp_path: Path):
    async def main():
        proxy = ProxySettings(idle_s=0.3, bytes=1 << 20)
        async with (
            serving() as server,
            reaching(tmp_path, f"a.test:{server.port}", f"127.0.0.1:{server.port}", proxy=proxy) as box,
        ):
            answer = await curl(box, f"http://a.test:{server.port}/silent")
            assert b"Empty reply" in answer.stderr
            assert not (await curl(box, f"http://a.test:{server.port}/large", "-o", "/dev/null")).ok
            after = await curl(box, "-w", "%{http_code}", f"http://a.test:{server.port}/")
            assert after.stdout.endswith(b"403")
            assert b"its 1048576 bytes" in after.stdout
            use = box.network_use
            assert use is not None
            assert use.bytes < (1 << 20) + (1 << 17)

    run(main)


THOUSAND = """
import socket, time
kept = []
for _ in range(200):
    s = socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1', 3128)); kept.append(s)
print('open', flush=True)
time.sleep(1000)
"""


def test_a_thousand_connections_take_no_more_than_their_places(tmp_path: Path):
    async def main():
        proxy = ProxySettings(connections=8, head_s=0.2, connections_per_s=500)
        async with serving() as server:
            allowed = (f"a.test:{server.port}", f"127.0.0.1:{server.port}")
            async with (
                reaching(tmp_path / "one", *allowed, proxy=proxy) as hog,
                reaching(tmp_path / "two", *allowed) as box,
            ):
                before = len(os.listdir("/proc/self/fd"))
                hogs = [
                    asyncio.create_task(hog.exec(Command(argv=["python3", "-c", THOUSAND], timeout_s=60)))
                    for _ in range(5)
                ]
                await until(lambda: (use := hog.network_use) is not None and use.peak == 8)
                for _ in range(5):  # the owner and its other sandboxes go on
                    assert (await curl(box, f"http://a.test:{server.port}/")).ok
                    assert len(os.listdir("/proc/self/fd")) < before + 40
                use = hog.network_use
                assert use is not None
                assert use.peak == use.capacity == 8
                await hog.terminate()
                await asyncio.gather(*hogs, return_exceptions=True)

    run(main)


def test_the_way_out_ends_with_the_sandbox(tmp_path: Path):
    async def main():
        async with serving() as server:
            before = len(os.listdir("/proc/self/fd"))
            async with reaching(tmp_path, f"a.test:{server.port}", f"127.0.0.1:{server.port}") as box:
                hanging = asyncio.create_task(curl(box, f"http://a.test:{server.port}/silent"))
                await until(lambda: bool(server.heads))
                assert server.open == 1
                await box.terminate()
                await asyncio.gather(hanging, return_exceptions=True)
                await until(lambda: server.open == 0)
                use = box.network_use
                assert use is not None
                assert (use.used, use.hosts[0].requests) == (0, 1)
            assert len(os.listdir("/proc/self/fd")) == before

    run(main)


def test_it_stays_through_pause_and_snapshot(tmp_path: Path):
    async def main():
        async with serving() as server:
            allowed = (f"a.test:{server.port}", f"127.0.0.1:{server.port}")
            settings = LocalSettings(spares=1)
            async with LocalBackend(
                tmp_path / "state", snapshots=tmp_path / "snapshots", settings=settings, resolve=Names()
            ) as backend:
                spec = msgspec.structs.replace(SMALL, network=allowed)
                box = await backend.create(spec)
                await box.pause()
                await box.resume()
                assert (await curl(box, f"http://a.test:{server.port}/one")).ok
                taken = await box.snapshot("kept")
                await box.terminate()
                again = await backend.create(spec, snapshot=taken)
                assert (await curl(again, f"http://a.test:{server.port}/two")).ok
                without = await backend.create(msgspec.structs.replace(spec, network=()), snapshot=taken)
                assert (await without.exec(Command(argv=["sh", "-c", "env | grep -ci proxy"]))).stdout == b"0\n"
                assert not (await curl(without, "-x", "http://127.0.0.1:3128", f"http://a.test:{server.port}/")).ok
                await again.terminate()
                await without.terminate()

    run(main)


PACKAGE = "headway_test_package-1.0-py3-none-any.whl"


def test_pip_downloads_through_it(tmp_path: Path):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
        page = f'<a href="http://files.test:{port}/{PACKAGE}">{PACKAGE}</a>'.encode()
        body, kind = (wheel, b"application/zip") if b".whl" in first else (page, b"text/html")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(body)) + body)
        await writer.drain()
        writer.close()

    async def main():
        nonlocal port
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, reaching(tmp_path, f"*.test:{port}", f"127.0.0.1:{port}") as box:
            if not (await box.exec(Command(argv=["python3", "-m", "pip", "--version"]))).ok:
                pytest.skip("the host's own Python has no pip")
            index = ["--index-url", f"http://index.test:{port}/simple", "--trusted-host", f"index.test:{port}"]
            trusted = ["--trusted-host", f"files.test:{port}", "headway-test-package"]
            result = await box.exec(
                Command(argv=["python3", "-m", "pip", "download", "--no-cache-dir", *index, *trusted])
            )
            assert result.ok, result.stderr
            assert await box.read(PACKAGE) == wheel

    port = 0
    wheel = wheel_of(tmp_path)
    run(main)


def wheel_of(folder: Path) -> bytes:
    with zipfile.ZipFile(folder / "made.whl", "w") as made:
        about = "headway_test_package-1.0.dist-info"
        made.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: headway-test-package\nVersion: 1.0\n")
        made.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{about}/RECORD", "")
    return (folder / "made.whl").read_bytes()


def test_a_list_that_cant_be_one_is_refused_before_anything_is_made(tmp_path: Path):
    async def main():
        async with LocalBackend(tmp_path / "state", settings=LocalSettings(spares=1)) as backend:
            with pytest.raises(ConfigurationError, match="valid: NAME"):
                await backend.create(msgspec.structs.replace(SMALL, network=("https://a.test",)))
            assert await backend.list() == []

    run(main)

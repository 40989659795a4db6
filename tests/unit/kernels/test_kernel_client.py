"""The client of several kernel services: load, breakers, retries elsewhere, Retry-After, refusals, deadlines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from kernel_service import HOST, ServedKernels, candidate, reached, served_kernels, submission

from headway.config.router import RouterConfig
from headway.kernels.client import KernelClient, KernelRequestRefused, KernelServiceFailed
from headway.kernels.wire import evaluation_of
from headway.records.errors import ConfigurationError
from headway.runtime.clock import RealClock

SETTINGS = RouterConfig(failures_to_open=1, cool_down_s=30.0)


def client_of(*addresses: str, **options: Any) -> KernelClient:
    return KernelClient(addresses, RealClock(), breaker=SETTINGS, **options)


def open_requests(client: KernelClient) -> list[int]:
    return [machine.open for machine in client._machines]


def play(
    test: Callable[[KernelClient, list[ServedKernels]], Awaitable[Any]], services: int = 2, **options: Any
) -> None:
    """Play a test against some services; options of the client are those named ``client_...``."""
    mine = {name.removeprefix("client_"): value for name, value in options.items() if name.startswith("client_")}
    others = {name: value for name, value in options.items() if not name.startswith("client_")}

    async def main() -> None:
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(served_kernels(**others)) for _ in range(services)]
            client = await stack.enter_async_context(client_of(*(one.address for one in found), **mine))
            async with asyncio.timeout(20):
                await test(client, found)

    asyncio.run(main())


def test_an_evaluation_crosses_whole() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        sent = submission(candidate(speedup=1.5), timed_trials=7, seed=3, timeout_s=9.0)
        evaluation = await client.evaluate(sent)
        [seen] = services[0].judge.seen
        assert seen.task == sent.task
        assert (seen.source, seen.timed_trials, seen.seed, seen.timeout_s) == (sent.source, 7, 3, 9.0)
        expected = services[0].judge._judged(seen, {"speedup": "1.5"})
        assert (evaluation.timing, evaluation.speedup, evaluation.device) == (expected.timing, 1.5, HOST.name)
        assert evaluation.correct

    play(test, services=1)


def test_submissions_go_to_the_least_loaded_machine() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        waiting = [asyncio.create_task(client.evaluate(submission(candidate(gate=n)))) for n in range(4)]
        await reached(lambda: [one.dispatch.running for one in services] == [2, 2])
        assert open_requests(client) == [2, 2]
        services[1].judge.gate.set()
        await reached(lambda: open_requests(client) == [2, 0])
        await client.evaluate(submission(candidate()))
        assert len(services[1].judge.seen) == 3
        services[0].judge.gate.set()
        await asyncio.gather(*waiting)

    play(test)


def test_a_dead_machine_is_left_out_by_its_breaker() -> None:
    async def main() -> None:
        async with served_kernels() as service, client_of("http://127.0.0.1:9", service.address) as client:
            for number in range(3):
                assert (await client.evaluate(submission(candidate(number=number)))).correct
            dead = client._machines[0]
            assert dead.breaker.opens_s() is not None
            assert len(service.judge.seen) == 3

    asyncio.run(main())


def test_infrastructure_is_retried_on_another_machine() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        source = candidate(fails=1)
        services[1].judge.failed[source] = 1  # it has failed there already
        assert (await client.evaluate(submission(source))).correct
        assert [len(one.judge.seen) for one in services] == [1, 1]

    play(test, retries=0)


def test_failures_end_as_infrastructure_after_all_retries() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        with pytest.raises(KernelServiceFailed, match="HTTP 503: the zygote has died; then: http") as caught:
            await client.evaluate(submission(candidate(fails=99)))
        assert str(caught.value).count("HTTP 503") == 2
        assert [len(one.judge.seen) for one in services] == [1, 1]

    play(test, retries=0, client_retries=1)


def test_a_full_machine_is_avoided_and_its_retry_after_honoured() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        waiting = [asyncio.create_task(client.evaluate(submission(candidate(gate=n)))) for n in range(3)]
        await reached(lambda: [one.dispatch.running for one in services] == [1, 1])
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
        for one in services:
            one.judge.gate.set()
        assert all(one.correct for one in await asyncio.gather(*waiting))
        assert asyncio.get_running_loop().time() - began >= 0.9  # both were full when the third came: one second
        assert sum(len(one.judge.seen) for one in services) == 3

    play(test, cores=["cpu:0"], queue=0)


def test_refusals_of_the_request_are_typed_and_not_retried() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        with pytest.raises(KernelRequestRefused, match=r"HTTP 400.*: timeout_s = 61\.0: valid: at most 60") as caught:
            await client.evaluate(submission(candidate(), timeout_s=61.0))
        assert (caught.value.status, caught.value.param) == (400, "timeout_s")

    play(test, services=1)

    async def without_key() -> None:
        async with served_kernels(keys=["k" * 16]) as service, client_of(service.address) as client:
            with pytest.raises(KernelRequestRefused, match=r"HTTP 401.*no API key"):
                await client.evaluate(submission(candidate()))
            async with client_of(service.address, key="k" * 16) as known:
                assert (await known.evaluate(submission(candidate()))).correct

    asyncio.run(without_key())


def test_a_refused_candidate_is_an_outcome() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        evaluation = await client.evaluate(submission("def f(): ..."))
        assert not evaluation.compiled
        assert evaluation.text.startswith("custom_model_src: defines no ModelNew")
        huge = await client.evaluate(submission(candidate() + "#" * 150_000))
        assert "150020 bytes; valid: at most 100000" in huge.text

    play(test, services=1)


def test_a_submission_without_a_result_in_time_is_infrastructure() -> None:
    async def test(client: KernelClient, services: list[ServedKernels]) -> None:
        with pytest.raises(KernelServiceFailed, match=r"no result within 0\.2 s"):
            await client.evaluate(submission(candidate(gate=1), timeout_s=0.1))
        assert open_requests(client) == [0]
        await reached(lambda: services[0].judge.cancelled == 1)

    play(test, services=1, client_queue_s=0.1)


@asynccontextmanager
async def server_of(answer: bytes) -> AsyncIterator[str]:
    """Something that isn't a kernel service, and answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "its answer is no evaluation"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "missing required field `evaluation`"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 6\r\nRetry-After: soon\r\n\r\n<html>", "HTTP 502: <html>"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n{", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
)
def test_answers_that_are_no_service_s_are_failures(answer: bytes, words: str) -> None:
    async def main() -> None:
        async with server_of(answer) as address, client_of(address, retries=0) as client:
            with pytest.raises(KernelServiceFailed, match=words):
                await client.evaluate(submission(candidate()))

    asyncio.run(main())


def test_addresses_are_checked() -> None:
    for addresses in ((), ("a:8010",)):
        with pytest.raises(ConfigurationError, match="valid: http://HOST:PORT"):
            client_of(*addresses)
    with pytest.raises(ValueError, match="malformed"):
        evaluation_of(b"<html>")


def test_client_loads_no_torch_and_no_control() -> None:
    code = "import headway.kernels.client, sys; print([m for m in sys.modules if m in ('torch', 'headway.control')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

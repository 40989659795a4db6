"""A `vllm serve` that a replica starts: the conditions every engine must meet, kills of the server at any time, of its
replica, and starts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_server import many_in_flight
from vllm_engines import model_of, needs_vllm
from vllm_servers import KEY, LONGEST_TOKENS, SLOTS, engine_of, model_folder

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.managed_server import ManagedServer, start_server
from headway.generator.engines.vllm.server_client import KEY_VARIABLE
from headway.generator.routing import replica
from headway.models.loading import weights_of
from headway.records.errors import ConfigurationError
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.reference import replayed_logprobs

pytestmark = needs_vllm
TOKENS = 200
CALLS = ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/inference"]  # of an update, in this order
SLOW = {"logits_processors": ["slow_sampling:SlowSampling"]}
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        patch.setenv("PYTHONPATH", os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


# --- the server alone -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    """As a replica starts one."""
    settings = EngineSettings(
        model_path=str(model_folder(tied=True)),
        dtype="float32",
        slots=SLOTS,
        max_context_tokens=LONGEST_TOKENS,
        engine_arguments=SLOW,
    )
    started_s = time.monotonic()
    one = start_server(settings, model_of(0).config, parse_device("cpu:0"), {})
    print(f"started in {time.monotonic() - started_s:.1f} s")
    (group,) = servers_of(os.getpid())
    assert len(members_of(group)) > 1  # its scheduler is a process of its own
    yield one
    one.close()
    asyncio.run(until(lambda: not members_of(group), 10.0))


@pytest.fixture
def make(server: ManagedServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(conformance, "model_of", model_of)
    return functools.partial(engine_of, server.address)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            functools.partial(conformance.check_logprobs_at_every_composition, seed=0), marks=pytest.mark.long
        ),
        functools.partial(conformance.check_tokens_do_not_depend_on_neighbours, seed=0),
        functools.partial(conformance.check_updates_in_flight, mode="keep", seed=0, waits=False),
        functools.partial(conformance.check_updates_in_flight, mode="recompute", seed=0, waits=False),
        *(functools.partial(conformance.check_update_changes_what_is_sampled, mode=mode) for mode in ("keep", "abort")),
        conformance.check_prefix_is_not_shared_across_versions,
        conformance.check_prefix_is_not_shared_across_updates_of_one_version,
        conformance.check_priorities,
        conformance.check_one_bad_request_is_its_own_error,
        conformance.check_context_limit,
    ],
    ids=lambda check: getattr(check, "func", check).__name__,
)
def test_it_meets_the_conditions_of_every_engine(make: Any, check: Any) -> None:
    check(make)


@pytest.mark.long
def test_it_updates_with_many_requests_in_flight(make: Any) -> None:
    many_in_flight(make, "keep")


# --- in a replica -----------------------------------------------------------------------------------------------


def members_of(group: int) -> list[int]:
    """The living processes of a group."""
    found: list[int] = []
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and alive(pid):
                found.append(pid)
    return found


def servers_of(parent: int) -> list[int]:
    """The servers of a replica: the children of its guards."""
    guards = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for guard in guards for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]


def experiment(**generator: Any) -> Any:
    sections = {
        "run": {"directory": "unused"},
        "model": {"path": str(model_folder(tied=True))},
        "tasks": {"train": {"path": "unused"}},
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": TOKENS},
        "generator": {"devices": ["cpu:0"], "slots": 8, "engine": "vllm-server", "engine_arguments": SLOW} | generator,
    }
    return validate_experiment(sections, "test")


def requests(round_: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{round_}-{index}",
            prompt_ids=(5, 6, index),
            sampling=SamplingParameters(max_tokens=TOKENS - 7 * index, seed=100 * round_ + index),
        )
        for index in range(6)
    ]


async def until(condition: Any, limit_s: float = 240.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the change comes from another process)
            await asyncio.sleep(0.01)


class Pool:
    """A pool with events, whose requests are compared with the versions that sampled them."""

    def __init__(self, experiment: Any) -> None:
        self.events: list[tuple[str, str]] = []
        clock = RealClock()
        self.pool = GeneratorPool(
            LocalLauncher(clock), experiment, clock, on_event=lambda *event, **data: self.events.append(event)
        )
        self.asked: list[GenerationRequest] = []
        self.jobs: list[Any] = []

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    async def ask(self, round_: int) -> None:
        """Begin six requests; returns once a token of any has come."""
        self.asked += requests(round_)
        self.jobs += [asyncio.create_task(self.pool.generate(one)) for one in requests(round_)]
        await until(lambda: any(call.tokens for call in self.pool._replicas[0].calls.values()))

    async def require_exact(self) -> list[Any]:
        results = await asyncio.gather(*self.jobs)
        for asked, result in zip(self.asked, results, strict=True):
            ids, spans = result.response.ids, result.response.versions
            assert (result.finish_reason, len(ids)) == ("length", asked.sampling.max_tokens), result
            assert len(result.response.logprobs) == len(ids) == sum(span.tokens for span in spans)
        for asked, result in list(zip(self.asked, results, strict=True))[::6]:  # token by token: a second each
            if not result.resumes:  # else some of its KV was computed anew, by a newer version
                response = result.response
                expected = replayed_logprobs(model_of, asked.prompt_ids, response.ids, response.versions, 1.0)
                assert (torch.tensor(response.logprobs) - expected).abs().max() <= 1e-3
        return results


@pytest.mark.long
def test_a_server_and_a_replica_that_are_killed(tmp_path: Path) -> None:
    """The replica starts another one, and the requests go on with their tokens; nothing outlives the pool."""

    async def main() -> None:
        run = Pool(experiment())
        await run.pool.start()
        (first,) = servers_of(run.pool.pids[0])
        await run.ask(0)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "generator_restarted" in run.names())
        (died,) = [detail for name, detail in run.events if name == "generator_died"]
        assert "the server" in died or "refused" in died, died
        (second,) = servers_of(run.pool.pids[0])
        assert second != first
        group = os.getpgid(second)
        assert second in members_of(group)
        await run.ask(1)
        os.kill(run.pool.pids[0], signal.SIGKILL)  # alone: its guard ends the server
        await until(lambda: not members_of(group), 10.0)
        results = await run.require_exact()
        assert any(result.resumes for result in results)
        await until(lambda: run.names().count("generator_restarted") == 2)
        (third,) = servers_of(run.pool.pids[0])
        await run.pool.stop()
        await until(lambda: not members_of(third), 10.0)
        print(run.names())

    asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_killed_between_any_two_calls_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of five versions another call finds no server. Nothing is lost, and no folder of weights stays."""
    monkeypatch.setattr(replica, "_FACTORY", "faulty_vllm:KilledInUpdate")
    monkeypatch.setenv("KILLED_AT", f"{','.join(CALLS)}:{tmp_path}")
    exchange = tmp_path / "exchange"
    exchange.mkdir()

    async def main() -> None:
        folder = {"weights": {"exchange": str(exchange)}}
        sections = experiment().model_dump(mode="json", exclude_unset=True) | folder
        run = Pool(validate_experiment(sections, "test"))
        await run.pool.start()
        with Publisher(f"vllm-managed-{os.getpid()}") as publisher:
            for version, _ in enumerate(CALLS, start=1):
                await run.ask(version)
                weights = publisher.publish(version, weights_of(model_of(version)))
                await run.pool.update_weights(weights)
                await until(lambda version=version: run.names().count("generator_restarted") == version)
                print(f"version {version}: {[detail for name, detail in run.events if name.endswith('restarted')][-1]}")
            await run.ask(len(CALLS) + 1)
            results = await run.require_exact()
        last = results[-1].response.versions
        assert {span.version for span in last} == {len(CALLS)}
        assert run.names().count("generator_died") == len(CALLS)
        assert all("the server is unreachable" in detail for name, detail in run.events if name == "generator_died")
        (pid,) = servers_of(run.pool.pids[0])
        await run.pool.stop()
        await until(lambda: not members_of(pid), 10.0)
        print(run.names())

    asyncio.run(main())
    assert sorted(path.name for path in tmp_path.glob("killed-*")) == [f"killed-{n}" for n in range(len(CALLS))]
    assert list(exchange.iterdir()) == []


def test_a_start_that_fails_shows_its_last_lines() -> None:
    """An argument that vLLM doesn't know, of a run that begins: a configuration error."""

    async def main() -> None:
        run = Pool(experiment(engine_arguments={"no_such_argument": 3}))
        with pytest.raises(Exception, match="unrecognized arguments: --no-such-argument") as raised:
            await run.pool.start()
        cause = raised.value if isinstance(raised.value, ConfigurationError) else raised.value.__cause__
        assert isinstance(cause, ConfigurationError)
        assert str(cause).startswith("generator.engine = 'vllm-server': `vllm serve` ended with exit code 2 before")
        await run.pool.stop()

    asyncio.run(main())

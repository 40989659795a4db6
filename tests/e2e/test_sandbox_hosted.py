"""Sandboxes at providers: what every backend must do, as far as they can, against local servers that speak the SDKs'
protocols (`hosted_servers.py`); what their failures mean; what becomes of those that a killed run has left."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hosted_modal import AuthError, Modal, NotFoundError, ResourceExhaustedError
from hosted_servers import E2B, KEY, Cloud, Prime, serving
from sandbox_backends import SMALL, nothing_left, run
from test_sandbox_conformance import (  # noqa: F401  run here with the fixture below
    test_a_command_beyond_its_time_ends_with_everything_it_started,
    test_a_command_has_its_exit_code_output_environment_and_directory,
    test_alone_means_that_nothing_else_runs,
    test_commands_run_side_by_side_and_large_data_goes_both_ways,
    test_commands_that_cant_run_say_so,
    test_files,
    test_its_time_to_live_ends_it_and_can_be_renewed,
    test_list_knows_the_labels_of_those_that_live,
    test_names_that_cant_be_names_are_refused_and_nothing_breaks,
)

from headway.records.errors import ConfigurationError
from headway.records.sandbox import Command, SandboxError, Snapshot
from headway.sandbox.hosted.backend import HostedBackend
from headway.sandbox.hosted.provider import OWNER, this_owner
from headway.sandbox.snapshot_store import drop, dropped_snapshots, note_hosted, remove_others

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
CLOUDS = {"e2b": (E2B, "e2b"), "prime": (Prime, "prime_sandboxes"), "modal": (Modal, "sys")}  # and what they need


def provider_of(name: str, cloud: Cloud, **settings: Any) -> Any:
    rates = {"creates_per_s": 100.0, "creates_at_once": 50, **settings}
    if name == "e2b":
        from headway.sandbox.hosted.e2b import E2BProvider, E2BSettings

        return E2BProvider(E2BSettings(address=cloud.address, sandbox_address=cloud.address, **rates))
    if name == "modal":
        from headway.sandbox.hosted.modal import ModalProvider, ModalSettings

        assert isinstance(cloud, Modal)
        return ModalProvider(ModalSettings(**rates), sdk=cloud.sdk())
    from headway.sandbox.hosted.prime import PrimeProvider, PrimeSettings

    return PrimeProvider(PrimeSettings(address=cloud.address, **rates))


class Hosted:
    """A backend with the server behind it: started with it, and ended."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self.snapshots = folder / "noted"  # what the provider keeps
        self._opened = contextlib.AsyncExitStack()
        self.cloud: Cloud = None  # pyright: ignore[reportAttributeAccessIssue]
        self._backend: HostedBackend = None  # pyright: ignore[reportAttributeAccessIssue]

    async def __aenter__(self) -> HostedBackend:
        self.cloud = await self._opened.enter_async_context(serving(CLOUDS[self.name][0], self._folder))
        self._backend = self.another()
        return await self._opened.enter_async_context(self._backend)

    def another(self, **settings: Any) -> HostedBackend:
        provider = provider_of(self.name, self.cloud, **settings)
        return HostedBackend(provider, run="one", state=self._folder / "hosted", snapshots=self.snapshots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()


@pytest.fixture(params=CLOUDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    package = CLOUDS[request.param][1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    monkeypatch.setenv("MODAL_TOKEN_ID", "id")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "secret")
    monkeypatch.setenv("HOME", str(tmp_path))  # Prime's SDK keeps its tokens there
    with nothing_left(tmp_path / "state"):
        yield Hosted(request.param, tmp_path)


def test_what_goes_wrong_at_a_provider_is_told_apart(backend: Hosted, monkeypatch: pytest.MonkeyPatch):
    if backend.name == "modal":
        faults = [(ResourceExhaustedError, "infrastructure", True), (ConnectionError, "infrastructure", True)]
        faults += [(AuthError, "environment", False), (NotFoundError, "environment", False)]
    else:
        faults = [(status, "infrastructure", True) for status in (429, 500, 503, 0)]
        faults += [(status, "environment", False) for status in (400, 401, 403, 404)]
    if backend.name == "prime":  # or its SDK waits for 40 s
        from prime_sandboxes.core.client import _PLATFORM_RETRY_WAIT

        monkeypatch.setattr(_PLATFORM_RETRY_WAIT, "_rate_limit_delays", (0.0, 0.0))
    making = {"e2b": "POST /v2/sandboxes", "prime": "POST /api/v1/sandbox", "modal": "Sandbox.create"}[backend.name]

    async def main():
        async with backend:
            for fault, cause, retry in faults:
                backend.cloud.faults = [[making, fault, 99]]
                other = backend.another()
                with pytest.raises(SandboxError) as raised:
                    await other.create(SMALL)
                await other.close()
                failure = raised.value.failure
                assert (failure.cause, failure.retry, failure.reward_valid) == (cause, retry, False), failure
                assert ("hold_s" in failure.evidence) == (fault in (429, ResourceExhaustedError))
            backend.cloud.faults = []
            assert backend.cloud.boxes == {}

    monkeypatch.setattr("headway.sandbox.hosted.provider.HOLD_S", 0.05)
    run(main)


def test_a_wrong_template_is_the_environments_fault(backend: Hosted):
    async def main():
        async with backend:
            with pytest.raises(SandboxError) as raised:
                await backend.create(msgspec.structs.replace(SMALL, root="missing"))
            assert (raised.value.failure.cause, raised.value.failure.retry) == ("environment", False)

    run(main)


def test_a_sandbox_that_dies_is_no_outcome(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "100"])))
            await asyncio.sleep(0.5)
            await backend.cloud.boxes[box.id].sandbox.terminate()
            with pytest.raises(SandboxError) as raised:
                await running
            assert (raised.value.failure.cause, raised.value.failure.reward_valid) == ("infrastructure", False)
            assert box.ended
            with pytest.raises(SandboxError):
                await box.exec(Command(argv=["true"]))
            await box.terminate()

    run(main)


def test_a_command_that_kills_what_watches_it_is_the_models_doing(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            result = await box.exec(Command(argv=["sh", "-c", "kill -9 $PPID; sleep 1"]))
            assert (result.exit_code, result.signal) == (None, 9)
            assert result.failure is not None
            assert result.failure.cause == "model_code"
            assert (await box.exec(Command(argv=["echo", "well"]))).stdout == b"well\n"

    run(main)


def test_output_is_cut_and_any_bytes_come_through(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            result = await box.exec(
                Command(argv=["sh", "-c", "printf '\\377\\0\\033'; yes | head -c 3000000; echo e >&2"])
            )
            assert (result.truncated, len(result.stdout), result.stderr) == (True, 1 << 20, b"e\n")
            assert result.stdout.startswith(b"\xff\0\x1by\n")
            daemon = await box.exec(Command(argv=["sh", "-c", "sleep 100 & echo started"], timeout_s=20.0))
            assert (daemon.stdout, daemon.timed_out) == (b"started\n", False)

    run(main)


OWNER_THAT_ENDS = "from headway.sandbox.hosted.provider import this_owner; print(this_owner())"


def test_what_dead_owners_left_is_ended_at_the_next_start_and_nothing_else(backend: Hosted):
    async def main():
        async with backend:
            command = [sys.executable, "-c", OWNER_THAT_ENDS]
            dead = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            machine = this_owner().rpartition(".")[0].rpartition(".")[0]
            owners = {
                "dead": dead.stdout.strip(),
                "alive": this_owner(),
                "number used again": f"{this_owner().rpartition('.')[0]}.1",
                "elsewhere": "0badcafe.4026531836.1.1",
                "odd": f"{machine}.x.y",
                "nobody's": "",
            }
            boxes = {}
            for who, owner in owners.items():
                labels = {OWNER: owner} if owner else {}
                boxes[who] = await backend.cloud.make(who, labels, {"name": who, "key": who}, 100.0, "")
            async with backend.another():
                ended = {who for who, box in boxes.items() if box.sandbox.ended}
                assert ended == {"dead", "number used again"}

    run(main)


def test_sandboxes_carry_their_labels_from_the_start(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL, labels={"rollout": "r/1"})
            labels = backend.cloud.boxes[box.id].labels
            assert labels == {"rollout": "r-1", "headway-run": "one", OWNER: this_owner()}
            assert [info.id for info in await backend.list({"rollout": "r/1"})] == [box.id]

    run(main)


def test_preflight_counts_what_lives_against_the_accounts_limit(backend: Hosted):
    async def main():
        async with backend:
            assert await backend.preflight(SMALL) == []
            kept = [await backend.create(SMALL) for _ in range(2)]
            limited = backend.another(account_limit=5)
            assert await limited.preflight(SMALL, live=3) == []
            (problem,) = await limited.preflight(SMALL, live=4)
            assert "4 sandboxes are needed and 2 live" in problem
            assert "lower sandbox.live to 3" in problem
            assert len(await backend.list()) == len(kept)
            can = await backend.capabilities()
            assert any("untested against the live service" in line for line in can.missing)

    run(main)


def test_hosts_that_may_be_reached_are_the_providers_to_keep(backend: Hosted):
    async def main():
        async with backend:
            asked = []
            for network in ((), ("pypi.org", "*.example.org")):
                box = await backend.create(msgspec.structs.replace(SMALL, network=network))
                asked.append(backend.cloud.boxes[box.id].body)
            if backend.name == "e2b":
                assert asked[0]["allow_internet_access"] is False
                assert asked[1]["network"]["allowOut"] == ["pypi.org", "*.example.org"]
                assert asked[1]["network"]["denyOut"] == ["0.0.0.0/0"]
            elif backend.name == "modal":
                assert [body["block_network"] for body in asked] == [True, False]
                assert asked[1]["outbound_domain_allowlist"] == ["pypi.org", "*.example.org"]
                assert asked[1]["outbound_cidr_allowlist"] == []
            else:
                assert [body["network_allowlist"] for body in asked] == [[], ["pypi.org", "*.example.org"]]
            with pytest.raises(ConfigurationError, match="8080"):
                await backend.create(msgspec.structs.replace(SMALL, network=("pypi.org:8080",)))

    run(main)


def test_snapshots_and_pauses_are_the_providers(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await box.write("kept", b"kept")
            taken = await box.snapshot("one")
            await box.terminate()
            again = await backend.create(SMALL, snapshot=taken)
            assert await again.read("kept") == b"kept"
            with pytest.raises(SandboxError, match="no snapshot of"):
                await backend.create(SMALL, snapshot=msgspec.structs.replace(taken, path="/tmp/x.tar"))
            if backend.name != "e2b":
                with pytest.raises(SandboxError, match="no pauses"):
                    await again.pause()
                return
            await again.pause()
            assert (await again.snapshot("two")).path.endswith("snapshot-1")
            with pytest.raises(SandboxError, match="paused"):
                await again.exec(Command(argv=["true"]))
            await again.resume()
            assert (await again.exec(Command(argv=["echo", "on"]))).stdout == b"on\n"

    run(main)


def test_snapshots_that_are_dropped_are_deleted_there_where_there_is_a_call_for_it(backend: Hosted):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            taken = [(await box.snapshot(name)).path for name in ("one", "two", "three")]
            await box.terminate()
            assert len(backend.cloud.snapshots) == 3
            drop(backend.snapshots, taken[0])
            assert remove_others(backend.snapshots, {taken[1]}) == [taken[2]]
            await backend.reap()
            kept = 3 if backend.name == "modal" else 1
            assert len(backend.cloud.snapshots) == kept
            assert dropped_snapshots(backend.snapshots) == []
            note_hosted(backend.snapshots, gone := f"{backend.name}:no-such")
            drop(backend.snapshots, gone)
            await backend.reap()
            assert dropped_snapshots(backend.snapshots) == []
            assert not (await backend.create(SMALL, snapshot=Snapshot(path=taken[1], bytes=0, sha256=""))).ended

    run(main)


def test_without_a_key_it_is_said_which_variable_is_missing(backend: Hosted, monkeypatch: pytest.MonkeyPatch):
    async def main():
        async with backend:
            variable = {"e2b": "E2B_API_KEY", "prime": "PRIME_API_KEY", "modal": "MODAL_TOKEN_SECRET"}[backend.name]
            monkeypatch.delenv(variable)
            with pytest.raises(ConfigurationError, match=variable):
                backend.another()

    run(main)

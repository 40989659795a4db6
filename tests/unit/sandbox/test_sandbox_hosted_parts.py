"""Sandboxes at providers, without any: the rate of creations, settings, what an adapter's odd days come to."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.cli.sandboxes import reap
from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox.backends import backend_of
from headway.sandbox.guest.hosted_runner import INLINE_BYTES, MARKER, answer
from headway.sandbox.guest.hosted_runner import main as run_request
from headway.sandbox.hosted import sandbox as hosted_sandbox
from headway.sandbox.hosted.backend import HostedBackend
from headway.sandbox.hosted.provider import HostedSettings, Provider, ShellResult, failure_of_status, plain_labels
from headway.sandbox.pool import PoolSettings, SandboxPool
from headway.sandbox.rate_limiter import RateLimiter, SharedRateLimit
from headway.sandbox.snapshot_store import drop, dropped_snapshots, note_hosted, remove_others


class Scripted(Provider[HostedSettings]):
    """A provider whose commands answer what they are told to, on the loop's clock."""

    name = "scripted"
    missing = ()
    life_s = 100.0

    def __init__(self, **settings: Any) -> None:
        self.settings = HostedSettings(**settings)
        self.account = "account"
        self.made: list[tuple[str, float]] = []
        self.ended: list[str] = []
        self.makes_s = 1.0
        self.errors: list[Exception] = []
        self.end_errors: list[Exception] = []
        self.put_errors: list[Exception] = []
        self.delete_errors: list[Exception] = []
        self.deleted: list[str] = []
        self.says = ShellResult(exit_code=0, stdout=f'\n{MARKER}{{"processes": []}}')

    def check(self, spec: SandboxSpec) -> None: ...

    async def create(self, spec: SandboxSpec, labels: dict[str, str], key: str, snapshot: str | None) -> str:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self.makes_s)
        if self.errors:
            raise self.errors.pop(0)
        self.made.append((f"box-{len(self.made)}", began_s))
        return self.made[-1][0]

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        return []

    async def count(self) -> int:
        return len(self.made) - len(self.ended)

    async def terminate(self, sandbox: str) -> None:
        if self.end_errors:
            raise self.end_errors.pop(0)
        self.ended.append(sandbox)

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult:
        return self.says

    async def put(self, sandbox: str, path: str, data: bytes) -> None:
        if self.put_errors:
            raise self.put_errors.pop(0)

    async def get(self, sandbox: str, path: str) -> bytes:
        return b""

    async def renew(self, sandbox: str, ttl_s: float) -> None: ...

    async def pause(self, sandbox: str) -> None: ...

    async def resume(self, sandbox: str, ttl_s: float) -> None: ...

    async def snapshot(self, sandbox: str, name: str) -> str:
        return name

    async def delete_snapshot(self, snapshot: str) -> None:
        if self.delete_errors:
            raise self.delete_errors.pop(0)
        self.deleted.append(snapshot)

    def failure_of(self, error: Exception, what: str) -> SandboxFailure:
        if str(error) == "too many":
            return failure_of_status(429, what)
        return model_failure(what) if str(error) == "a file" else infrastructure_failure(what)

    async def close(self) -> None: ...


def backend(folder: Path, provider: Scripted) -> HostedBackend:
    return HostedBackend(provider, state=folder, clock=VirtualClock())


def test_a_pace_lets_a_burst_through_and_then_so_many_a_second():
    async def main():
        pace, clock = RateLimiter(2.0, 3, VirtualClock()), VirtualClock()
        times: list[float] = []

        async def one():
            await pace.wait()
            times.append(clock.now())

        await asyncio.gather(*(one() for _ in range(6)))
        assert times == [0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
        await clock.sleep(100.0)
        await asyncio.gather(*(one() for _ in range(4)))
        assert [time - 101.5 for time in times[6:]] == [0.0, 0.0, 0.0, 0.5]

    run_virtual(main())


def test_an_accounts_pace_is_one_for_all_that_name_its_file(tmp_path: Path):
    async def main():
        clock = VirtualClock()
        paces = [SharedRateLimit(tmp_path / "rate", 2.0, 2, clock) for _ in range(3)]
        times: list[float] = []

        async def one(pace: SharedRateLimit):
            await pace.wait()
            times.append(clock.now())

        await clock.sleep(10.0)
        await asyncio.gather(*(one(paces[at % 3]) for at in range(6)))
        assert times == [10.0, 10.0, 10.5, 11.0, 11.5, 12.0]
        paces[0].hold(5.0)
        await one(paces[1])
        assert times[-1] == 17.0
        (tmp_path / "rate").write_text("99999999.0")  # of before the machine was started anew
        await one(paces[2])
        assert times[-1] == 17.0

    run_virtual(main())


def test_creations_keep_to_the_rate_and_one_that_was_too_many_holds_all(tmp_path: Path):
    async def main():
        provider = Scripted(creates_per_s=1.0, creates_at_once=1)
        made = backend(tmp_path, provider)
        await asyncio.gather(*(made.create(SandboxSpec()) for _ in range(3)))
        assert [began for _, began in provider.made] == [0.0, 1.0, 2.0]
        provider.errors = [RuntimeError("too many")]
        with pytest.raises(SandboxError):
            await made.create(SandboxSpec())  # told at 4
        await made.create(SandboxSpec())
        assert provider.made[-1][1] == 14.0

    run_virtual(main())


def test_one_that_nobody_waits_for_any_more_is_ended(tmp_path: Path):
    async def main():
        provider = Scripted()
        made = backend(tmp_path, provider)
        asking = asyncio.create_task(made.create(SandboxSpec()))
        await asyncio.sleep(0.5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert provider.ended == [name for name, _ in provider.made] == ["box-0"]

    run_virtual(main())


def test_dropped_snapshots_are_deleted_at_the_next_look_or_a_later_one(tmp_path: Path):
    async def main():
        folder = tmp_path / "sandboxes"
        provider = Scripted()
        one = HostedBackend(provider, state=tmp_path, snapshots=folder, clock=VirtualClock())
        box = await one.create(SandboxSpec())
        taken = [(await box.snapshot(name)).path for name in ("a", "b", "team/c:1.5", "d")]
        await one.reap()
        assert provider.deleted == [], "all of them may be gone on from"
        note_hosted(folder, "another:e")
        for name in (*taken[:3], "another:e", "scripted:unknown"):
            drop(folder, name)
        provider.delete_errors = [OSError("too many")]
        await one.reap()
        assert provider.deleted == [], "nothing more is asked for"
        provider.delete_errors = [OSError("it is still needed")]
        await one.reap()
        assert len(provider.deleted) == 2
        await one.close()
        assert sorted(provider.deleted) == ["a", "b", "team/c:1.5"]
        assert [name for name, _ in dropped_snapshots(folder)] == ["another:e"]
        again = Scripted()
        resumed = HostedBackend(again, state=tmp_path, snapshots=folder, clock=VirtualClock())
        assert remove_others(folder, set()) == ["scripted:d"], "the process before was killed"
        await resumed.start()
        assert again.deleted == [], "nobody's sandbox waits for that"
        await resumed.reap()
        assert again.deleted == ["d"]
        await resumed.close()

    run_virtual(main())


def test_a_snapshot_of_one_that_is_paused_is_taken_while_it_isnt(tmp_path: Path):
    """E2B refuses otherwise, and says that there is no such sandbox."""
    did: list[str] = []

    class Pausing(Scripted):
        pauses = True

        async def pause(self, sandbox: str) -> None:
            did.append("pause")

        async def resume(self, sandbox: str, ttl_s: float) -> None:
            did.append("resume")

        async def snapshot(self, sandbox: str, name: str) -> str:
            did.append("snapshot")
            return "kept"

    async def main():
        one = backend(tmp_path, Pausing())
        box = await one.create(SandboxSpec())
        await box.pause()
        assert (await box.snapshot("one")).path == "scripted:kept"
        assert did == ["pause", "resume", "snapshot", "pause"]
        await one.close()

    run_virtual(main())


def test_a_place_is_given_back_once_what_was_made_too_late_has_ended(tmp_path: Path):
    async def main():
        provider = Scripted(creates_per_s=1000.0, creates_at_once=100)
        provider.makes_s = 10.0
        provider.end_errors = [RuntimeError("502")]
        pool = SandboxPool(
            backend(tmp_path, provider), PoolSettings(live=1, retries=0, start_timeout_s=2.0), VirtualClock()
        )
        for number in range(3):
            with pytest.raises(SandboxError, match="wasn't ready in 2 s"):
                async with pool.lease(SandboxSpec()):
                    raise AssertionError("there is none")
            assert len(provider.ended) == len(provider.made) == number + 1

    run_virtual(main())


@pytest.mark.parametrize("failed_ends", [2, 3])
def test_one_that_cant_be_opened_and_not_ended_either_is_tried_again(tmp_path: Path, failed_ends: int):
    async def main():
        provider = Scripted()
        provider.put_errors, provider.end_errors = [RuntimeError("502")], [RuntimeError("502")] * (failed_ends + 1)
        made = backend(tmp_path, provider)
        with pytest.raises(SandboxError, match="put the runner in"):
            await made.create(SandboxSpec())
        assert provider.ended == []
        left = await made.reap()
        assert [reaped.stuck for reaped in left] == [failed_ends == 3]
        await made.close()
        assert provider.ended == ["box-0"]

    run_virtual(main())


def test_a_provider_that_never_makes_what_was_given_up_holds_nobody_for_ever(tmp_path: Path):
    async def main():
        provider = Scripted()
        provider.makes_s = 1e9
        made = backend(tmp_path, provider)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await made.create(SandboxSpec())
        await made.close()
        assert asyncio.get_running_loop().time() < 200.0

    run_virtual(main())


def test_no_start_is_a_models_doing(tmp_path: Path):
    async def main():
        provider = Scripted()
        made = backend(tmp_path, provider)
        for errors in (provider.errors, provider.put_errors):
            errors.append(RuntimeError("a file"))
            with pytest.raises(SandboxError) as raised:
                await made.create(SandboxSpec())
            failure = raised.value.failure
            assert (failure.cause, failure.reward_valid, failure.retry) == ("infrastructure", False, True)

    run_virtual(main())


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (ShellResult(exit_code=0, stdout=f'\n{MARKER}{{"error": {errno.EIO}, "what": "I/O error"}}'), "infrastructure"),
        (ShellResult(exit_code=0, stdout=f'\n{MARKER}{{"error": {errno.ENOENT}, "what": "none"}}'), "model_code"),
        (ShellResult(exit_code=255, stdout=""), "infrastructure"),
        (ShellResult(exit_code=137, stdout=""), "model_code"),
        (ShellResult(exit_code=143, stdout=""), "model_code"),  # kill $PPID
        (ShellResult(exit_code=1, stdout=""), "model_code"),  # rm -rf /tmp
        (ShellResult(exit_code=0, stdout=f'\n{MARKER}{{"killed": "had no room"}}'), "model_code"),
    ],
)
def test_whose_doing_an_answer_is(tmp_path: Path, says: ShellResult, cause: str):
    async def main():
        provider = Scripted()
        box = await backend(tmp_path, provider).create(SandboxSpec())
        provider.says = says
        with pytest.raises(SandboxError) as raised:
            await box.read("x")
        assert raised.value.failure.cause == cause

    run_virtual(main())


def test_an_answer_that_a_full_disk_has_no_room_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    (tmp_path / "large").write_bytes(bytes(INLINE_BYTES))
    request = {"do": "read", "path": str(tmp_path / "large"), "max_bytes": INLINE_BYTES}
    told = base64.b64encode(json.dumps(request).encode()).decode()
    for place, key in ((tmp_path / "answer", "in"), (tmp_path / "none" / "answer", "killed")):
        monkeypatch.setattr(sys, "argv", ["runner", told, str(place)])
        run_request()
        assert key in json.loads(capsys.readouterr().out.rpartition(MARKER)[2])


def test_much_data_is_encoded_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def main():
        provider = Scripted()
        box = await backend(tmp_path, provider).create(SandboxSpec())
        aside: list[Any] = []
        to_thread = asyncio.to_thread

        async def seen(work: Any, *arguments: Any) -> Any:
            aside.append(arguments)
            return await to_thread(work, *arguments)

        monkeypatch.setattr(asyncio, "to_thread", seen)
        await box.write("short", b"x")
        assert not aside
        await box.write("long", bytes(1 << 20))
        assert len(aside) == 1
        request = json.loads(base64.b64decode(hosted_sandbox._encode({"data": b"x"})))
        assert request == {"data": base64.b64encode(b"x").decode()}

    run_virtual(main())


def test_what_couldnt_be_ended_ends_when_its_time_is_over(tmp_path: Path):
    async def main():
        provider = Scripted()
        box = await backend(tmp_path, provider).create(SandboxSpec(ttl_s=10.0))
        provider.end_errors = [RuntimeError("502")]
        with pytest.raises(SandboxError):
            await box.terminate()
        await asyncio.sleep(11.0)
        assert provider.ended == [box.id]

    run_virtual(main())


def test_closing_waits_for_what_is_being_made_and_ends_it(tmp_path: Path):
    async def main():
        provider = Scripted()
        made = backend(tmp_path, provider)
        kept = await made.create(SandboxSpec())
        asking = asyncio.create_task(made.create(SandboxSpec()))
        await asyncio.sleep(0.5)
        await made.close()
        assert asking.done()
        assert sorted(provider.ended) == ["box-0", "box-1"]
        assert kept.ended

    run_virtual(main())


def test_where_the_provider_keeps_no_time_its_owner_does(tmp_path: Path):
    async def main():
        provider = Scripted()
        box = await backend(tmp_path, provider).create(SandboxSpec(ttl_s=10.0))
        await asyncio.sleep(8.0)
        await box.renew(10.0)
        await asyncio.sleep(8.0)
        assert not box.ended
        await asyncio.sleep(3.0)
        assert provider.ended == [box.id]
        with pytest.raises(SandboxError, match="time to live of 10 s is over") as raised:
            await box.renew(10.0)
        assert (raised.value.failure.cause, raised.value.failure.retry) == ("environment", False)

    run_virtual(main())


@pytest.mark.parametrize(
    ("says", "cause", "what"),
    [
        (ShellResult(exit_code=127, stdout="python3: not found"), "environment", "no python3"),
        (ShellResult(exit_code=0, stdout=f"\n{MARKER}no json"), "infrastructure", "sent an unreadable message"),
        (ShellResult(exit_code=0, stdout=f"\n{MARKER}{{}}"), "infrastructure", "sent an unreadable message"),
        (ShellResult(exit_code=0, stdout=f'\n{MARKER}{{"error": 13, "what": "no"}}'), "environment", "can't be made"),
    ],
)
def test_what_doesnt_begin_well_is_ended_and_told(tmp_path: Path, says: ShellResult, cause: str, what: str):
    async def main():
        provider = Scripted()
        provider.says = says
        with pytest.raises(SandboxError, match=what) as raised:
            await backend(tmp_path, provider).create(SandboxSpec())
        assert raised.value.failure.cause == cause
        assert provider.ended == ["box-0"]

    run_virtual(main())


def test_settings_are_checked_and_unknown_ones_named(monkeypatch: pytest.MonkeyPatch):
    for variable in ("PRIME_API_KEY", "MY_KEY"):
        monkeypatch.delenv(variable, raising=False)

    def built(**settings: Any) -> Any:
        return backend_of(SandboxConfig.model_validate({"backend": "prime", "settings": settings}))

    with pytest.raises(
        ConfigurationError, match=r"sandbox\.settings\.templat: prime has none; did you mean 'template'"
    ):
        built(templat="x")
    with pytest.raises(ConfigurationError, match="Expected `float"):
        built(creates_per_s="many")
    with pytest.raises(ConfigurationError, match="creates_per_s = 0"):
        built(creates_per_s=0)
    pytest.importorskip("prime_sandboxes")
    with pytest.raises(ConfigurationError, match="set MY_KEY"):
        built(key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "key")
    made = backend_of(
        SandboxConfig.model_validate({"backend": "prime", "image": "img", "settings": {"key_variable": "MY_KEY"}})
    )
    assert made._provider.settings.template == "img"  # pyright: ignore[reportAttributeAccessIssue]


def test_labels_become_what_every_provider_takes():
    assert plain_labels({"a b": "é/" + "x" * 60, "run": ""}) == {"a-b": "--" + "x" * 48, "run": "-"}


def test_the_runner_says_what_it_cant_do(tmp_path: Path):
    assert answer({"do": "read", "path": str(tmp_path / "none"), "max_bytes": 5})["error"] == 2
    assert answer({"do": "read", "path": "a\0b", "max_bytes": 5})["error"] == 22
    assert answer({"do": "list", "path": "\ud800", "max_entries": 5})["error"] == 22
    data = base64.b64encode(b"written").decode()
    assert answer({"do": "write", "path": str(tmp_path / "a" / "b"), "mode": 0o600, "data": data}) == {}
    assert (
        json.dumps(answer({"do": "read", "path": str(tmp_path / "a" / "b"), "max_bytes": 7})) == f'{{"data": "{data}"}}'
    )


def test_reap_names_the_providers_there_are(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="--backend docker: valid: modal, e2b, prime"):
        reap(state=tmp_path, backend="docker")

"""What stands guard over sandboxes: faults on purpose, the periodic reaper, a run's own wiring of all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from fake_sandboxes import FakeBackend

from headway.config.sandbox import SandboxConfig
from headway.orchestrator.actors.sandboxes import BREAKER, open_sandboxes
from headway.records.sandbox import Command, SandboxError, SandboxFailure, SandboxSpec, infrastructure_failure
from headway.records.sandbox_statistics import EDGES_S, Latencies, Reaped
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox import faults, leftovers
from headway.sandbox.faults import SHARE, FaultyBackend
from headway.sandbox.linux import cgroups
from headway.sandbox.pool import pool_settings
from headway.sandbox.reaper import Reaper

SPEC = SandboxSpec()


class ReapingBackend(FakeBackend):
    """``found``: what each look finds, or how it fails."""

    def __init__(self, clock, found) -> None:
        super().__init__(clock)
        self.found = list(found)

    async def reap(self) -> list[Reaped]:
        found = self.found.pop(0) if self.found else []
        if isinstance(found, Exception):
            raise found
        return found


def test_faults_look_like_those_of_the_infrastructure_and_are_counted():
    async def once(seed: int) -> tuple[dict[str, int], list[str], float]:
        backend = FakeBackend(VirtualClock())
        faulty = FaultyBackend(backend, backend.clock, share=0.3, seed=seed)
        ends: list[str] = []
        failures: list[SandboxFailure] = []
        began_s = backend.clock.now()
        for _ in range(200):
            try:
                async with asyncio.timeout(100):
                    box = await faulty.create(SPEC)
                await box.exec(Command(argv=["true"], timeout_s=5.0))
                await box.write("f", b"")
                ends.append("fine")
                await box.terminate()
            except TimeoutError:
                ends.append("unanswered")
            except SandboxError as error:
                failures.append(error.failure)
                ends.append(error.failure.message)
                if "sandbox" in error.failure.message:
                    assert box.ended
                    with pytest.raises(SandboxError, match="injected"):
                        await box.read("f")
        assert backend.sandboxes == {}
        assert {(failure.cause, failure.retry, failure.reward_valid) for failure in failures} == {
            ("infrastructure", True, False)
        }
        return dict(faulty.injected), ends, backend.clock.now() - began_s

    async def main():
        injected, ends, took_s = await once(1)
        kinds = {f"create {kind}" for kind in faults.CREATE_FAULTS} | {f"exec {kind}" for kind in faults.EXEC_FAULTS}
        assert injected.keys() == kinds
        assert 90 < sum(injected.values()) < 130, "30% of 200 starts, and of the commands of those that were made"
        assert ends.count("fine") == 200 - sum(injected.values()) + injected["create slow"]
        assert ends.count("unanswered") == injected["create unanswered"]
        waits_s = 100 * injected["create unanswered"] + 30 * injected["create slow"] + 15 * injected["exec unanswered"]
        assert took_s == pytest.approx(waits_s, abs=5)
        assert (await once(1))[:2] == (injected, ends)
        assert (await once(2))[0] != injected

    run_virtual(main())


def test_the_reaper_looks_again_and_again_and_counts():
    async def main():
        stuck = Reaped(owner="owner-1-1-1", sandboxes=4, stuck=True)
        gone = [Reaped(owner="owner-1-1-1", sandboxes=4), Reaped(owner="owner-2-1-1", sandboxes=0)]
        backend = ReapingBackend(VirtualClock(), [[], [stuck], OSError("no room"), gone])
        reaper = Reaper(backend, backend.clock, 60.0)
        looking = asyncio.create_task(reaper.run())
        await backend.clock.sleep(130.0)
        assert (reaper.statistics().checks, reaper.statistics().owners, reaper.statistics().stuck) == (2, 0, 1)
        await backend.clock.sleep(60.0)
        assert reaper.statistics().failed == "no room"
        await backend.clock.sleep(60.0)
        seen = reaper.statistics()
        assert (seen.checks, seen.owners, seen.sandboxes, seen.stuck, seen.failed) == (4, 2, 4, 0, "")
        looking.cancel()

    run_virtual(main())


def test_what_wouldnt_end_is_tried_again_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "owner-1-1-1"
    (folder / "records").mkdir(parents=True)
    place = tmp_path / "group" / folder.name
    record = leftovers.OwnerRecord(pid=1, started=1, cgroups={"memory": str(place)})
    leftovers.write(folder, "owner.json", record)
    tries: list[Path] = []
    monkeypatch.setattr(cgroups, "mounted", dict)
    monkeypatch.setattr(cgroups, "clear", lambda place: tries.append(place) or len(tries) > 1)
    (first,) = leftovers.reap(tmp_path)
    assert (first.stuck, folder.exists()) == (True, True)
    (second,) = leftovers.reap(tmp_path)
    assert (second.stuck, folder.exists(), tries) == (False, False, [place, place])
    assert "didn't end" in str(first)
    assert "didn't end" not in str(second)


def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts aren't repeated, and the reaper looks every 5 s."""
    monkeypatch.setattr("headway.orchestrator.actors.sandboxes._REAP_EVERY_S", 5.0)
    monkeypatch.setattr(
        "headway.orchestrator.actors.sandboxes.pool_settings",
        lambda settings: msgspec.structs.replace(pool_settings(settings), retries=0),
    )


def test_a_runs_sandboxes_have_their_breaker_reaper_and_faults_and_all_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(SHARE, "0.2")
    once(monkeypatch)

    async def main():
        clock = VirtualClock()
        backend = ReapingBackend(clock, [[Reaped(owner="owner-1-1-1", sandboxes=3)]])
        settings = SandboxConfig(live=2, starts=1)
        async with open_sandboxes(settings, clock, backend=backend) as sandboxes:
            for _ in range(40):
                try:
                    async with asyncio.timeout(500), sandboxes.pool.lease(SPEC) as box:
                        await box.exec(Command(argv=["true"]))
                except SandboxError:
                    pass
            assert sandboxes.reaped().sandboxes == 3
            seen = sandboxes.statistics()
            failed = sandboxes.injected()
            assert seen.start_failures == {"infrastructure": failed["create refused"] + failed["create unanswered"]}
            assert seen.exec_failures == {"infrastructure": failed["exec lost"] + failed["exec unanswered"]}
            assert seen.lost == failed["exec lost"] + failed["exec unanswered"]

            backend._failures = [infrastructure_failure("down", retry=False)] * BREAKER.failures_to_open * 2
            while not sandboxes.statistics().breaker_open:
                with pytest.raises(SandboxError):
                    async with sandboxes.pool.lease(SPEC):
                        await box.exec(Command(argv=["true"]))
            assert sandboxes.statistics().breaker_openings == 1
            backend._failures = []
            holding = asyncio.create_task(sandboxes.pool.lease(SPEC).__aenter__())
            await clock.sleep(200.0)
        assert backend.sandboxes == {}
        await asyncio.gather(holding, return_exceptions=True)

    run_virtual(main())


def test_a_runs_sandbox_that_wouldnt_end_ends_at_a_later_look(monkeypatch: pytest.MonkeyPatch):
    once(monkeypatch)

    async def main():
        clock = VirtualClock()
        backend = ReapingBackend(clock, [])
        settings = SandboxConfig(live=2)
        async with open_sandboxes(settings, clock, backend=backend) as sandboxes:
            backend.end_failures = [infrastructure_failure("502")]
            async with sandboxes.pool.lease(SPEC):
                pass
            assert (sandboxes.statistics().leaked, len(backend.sandboxes)) == (1, 1)
            await clock.sleep(6.0)
            assert (sandboxes.statistics().leaked, len(backend.sandboxes)) == (0, 0)

    run_virtual(main())


def test_quantiles_of_latencies_are_a_little_above_the_true_ones():
    seen = Latencies()
    for seconds in [0.0005, 0.004, 0.004, 1.0, 1e6]:
        seen = seen.with_duration(seconds)
    assert (seen.count, seen.quantile_s(0.0), seen.quantile_s(1.0)) == (5, EDGES_S[0], 2 * EDGES_S[-1])
    assert 0.004 <= seen.quantile_s(0.5) < 0.004 * 1.42
    assert 1.0 <= seen.quantile_s(0.8) < 1.42
    later = seen.with_duration(2.0)
    assert (later.since(seen).count, later.since(seen).total_s) == (1, pytest.approx(2.0))
    assert Latencies().quantile_s(0.5) == 0.0

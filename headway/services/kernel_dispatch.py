"""Evaluations of the kernel service: their places, devices and repetitions, and what is counted of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from headway.config.router import RouterConfig
from headway.generator.routing.limiter import Limiter
from headway.kernels.backends import DeviceKind, device_kinds
from headway.kernels.client import KernelServiceFailed
from headway.kernels.devices import DeviceTable, DeviceUnavailable, OnDeviceEvent
from headway.kernels.jobs.judging import SubmissionJudge
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.runtime.clock import Clock

_log = logging.getLogger("headway.kernels")
_OVERTIME_S = 30.0  # beyond a submission's own limit, until the evaluator itself counts as hung


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Limits of the service."""

    concurrency: int = 2  # evaluations at once that need no device of their own
    queue: int = 256  # that wait for a place, of each kind; more are refused
    queue_s: float = 300.0  # longest wait; then a submission is refused
    retries: int = 2  # after failures of the infrastructure
    timeout_s: float = 600.0  # the longest of an evaluation, waiting apart


@dataclass(kw_only=True)
class KernelCounts:
    """Counts since the service started."""

    evaluations: int = 0
    correct: int = 0
    cheats: int = 0
    repeated: int = 0  # answered from an equal submission's evaluation
    retries: int = 0
    failures: int = 0  # evaluations without a result, after all retries
    faults: Counter[str] = field(default_factory=Counter[str])
    waited_s: float = 0.0  # for places and devices, together
    evaluated_s: float = 0.0


class KernelDispatch:
    """Gives each submission a place, and a device where it needs one of its own, and has it judged.

    A timed evaluation has a device to itself, and so has any on a GPU; the others share the cores that aren't for
    timing. An evaluator that ``leases_cores`` takes those of the same table itself, for the timing alone: others
    compile and check meanwhile. Waiting is first come, first served, bounded in number and time. A failure of the
    infrastructure (the evaluator's own, or a GPU that its driver has lost meanwhile) is repeated, ahead of others, on
    another device.
    """

    def __init__(
        self,
        judge: SubmissionJudge,
        devices: DeviceTable,
        limits: KernelLimits,
        clock: Clock,
        on_event: OnDeviceEvent,
        *,
        leases_cores: bool = False,
    ) -> None:
        self.counts = KernelCounts()
        self.running = 0
        self._judge = judge
        self._leases_cores = leases_cores
        self._devices = devices
        self._limits = limits
        self._clock = clock
        self._on_event = on_event
        # A place is the limiter's "token": so many may be open, the rest waits or is refused.
        settings = RouterConfig(overcommit=1.0, queue_requests=limits.queue, queue_s=limits.queue_s)
        capacities = {
            "gpu": lambda: devices.usable("gpu"),
            "cpu": lambda: devices.usable("cpu") + limits.concurrency * leases_cores,
            "shared": lambda: limits.concurrency,
        }
        self._limiters = {
            name: Limiter(settings, clock, capacity, lambda name, detail, /, **_: on_event(name, detail))
            for name, capacity in capacities.items()
        }

    @property
    def waiting(self) -> dict[str, int]:
        """Submissions that wait, by what they wait for: gpu, cpu (timing) or shared."""
        return {name: limiter.waiting for name, limiter in self._limiters.items()}

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        """Have a submission judged, on the device that it names if that is free; its result is the candidate's. Raises
        Overloaded, ConfigurationError (the task's fault) and KernelServiceFailed (the service's own)."""
        causes: list[str] = []
        began_s = self._clock.now()
        for attempt in range(self._limits.retries + 1):
            try:
                async with self._place(submission, -attempt) as device:
                    waited_s = self._clock.now() - began_s
                    evaluation = await self._judged(msgspec.structs.replace(submission, device=device))
            except DeviceUnavailable as error:
                causes.append(str(error))
                await self._devices.refresh()  # one that was lost may be there again
                continue
            if not evaluation.infrastructure:
                seconds = {**evaluation.seconds, "wait": evaluation.seconds.get("wait", 0.0) + waited_s}
                self._count(evaluation, waited_s)
                return msgspec.structs.replace(evaluation, seconds=seconds)
            causes.append(evaluation.infrastructure)
            self.counts.retries += attempt < self._limits.retries
            began_s = self._clock.now()
        self.counts.failures += 1
        raise KernelServiceFailed("; then: ".join(dict.fromkeys(causes)))

    @asynccontextmanager
    async def _place(self, submission: KernelSubmission, priority: int) -> AsyncIterator[str]:
        """A place for the block, with its device; "": the cores that are shared."""
        kinds, preferred = device_kinds(submission.task.backend), submission.device
        present: list[DeviceKind] = [one for one in kinds if self._devices.names((one,))]
        kind = self._devices.kind(preferred) if preferred else (present or kinds)[0]
        if kind == "cpu" and not submission.timed:
            async with self._limiters["shared"].place(1, priority):
                yield ""
            return
        async with self._limiters[kind].place(1, priority):
            if kind == "cpu" and self._leases_cores:
                yield preferred
                return
            with self._devices.lease(kind, preferred) as device:
                yield device

    async def _judged(self, submission: KernelSubmission) -> KernelEvaluation:
        """Make one attempt; failures of the evaluator, and of the device, are ``infrastructure`` in the result."""
        device, began_s = submission.device, self._clock.now()
        self.running += 1
        limit_s = submission.timeout_s + _OVERTIME_S
        if self._leases_cores and submission.timed:
            limit_s += self._limits.queue_s  # it waits for a core within
        try:
            async with asyncio.timeout(limit_s):
                evaluation = await self._judge.evaluate(submission)
        except ConfigurationError:
            raise
        except TimeoutError:
            evaluation = KernelEvaluation(infrastructure=f"the evaluator didn't end within {limit_s:g} s")
        except Exception as error:  # the boundary to the evaluator: no failure of its own is the candidate's
            _log.error("an evaluation failed: %s", error, exc_info=error)
            evaluation = KernelEvaluation(infrastructure=f"{type(error).__name__}: {error}")
        finally:
            self.running -= 1
            self.counts.evaluated_s += self._clock.now() - began_s
        if device and self._devices.kind(device) == "gpu" and (evaluation.infrastructure or evaluation.fault):
            await self._devices.refresh()
            if self._devices.lost(device):
                return KernelEvaluation(infrastructure=f"{device} was lost", device=device)
        if self._leases_cores:
            device = evaluation.device
        if device and not evaluation.infrastructure:
            self._devices.note(device, evaluation)
        if evaluation.infrastructure:
            self._on_event("evaluation_failed", f"{device or 'shared cores'}: {evaluation.infrastructure}")
        return evaluation

    def reset(self, names: tuple[str, ...]) -> list[str]:
        """Reset devices, see `DeviceTable.reset`, and admit what waits for them."""
        usable = self._devices.reset(names)
        for limiter in self._limiters.values():
            limiter.go_on()
        return usable

    def stop(self) -> None:
        """Refuse what waits."""
        for limiter in self._limiters.values():
            limiter.stop()

    def _count(self, evaluation: KernelEvaluation, waited_s: float) -> None:
        self.counts.evaluations += 1
        self.counts.correct += evaluation.correct
        self.counts.cheats += bool(evaluation.cheat)
        self.counts.repeated += evaluation.repeated
        self.counts.waited_s += waited_s
        if evaluation.fault is not None:
            self.counts.faults[evaluation.fault] += 1

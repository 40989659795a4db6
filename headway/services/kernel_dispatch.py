"""Schedules and counts evaluations of the kernel service: permits, devices, retries."""

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
    """Limits of the kernel service: evaluations at once, waiting submissions and their wait, retries, duration."""

    concurrency: int = 2  # evaluations at once that need no device of their own
    queue: int = 256  # submissions that wait for a permit, of each kind; more are refused
    queue_s: float = 300.0  # longest wait, after which a submission is refused
    retries: int = 2  # after failures of the infrastructure
    timeout_s: float = 600.0  # longest evaluation, without its wait


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
    waited_s: float = 0.0  # for permits and devices, in total
    evaluated_s: float = 0.0


class KernelDispatch:
    """Gives each submission a permit, and an exclusive device where it needs one, and has it evaluated.

    Timed evaluations, and all evaluations on a GPU, have a device exclusively; the others share the cores that aren't
    reserved for timing. An evaluator that ``leases_cores`` leases cores of the same table itself, for the timing only;
    others compile and check meanwhile. Waiting is first come, first served, and bounded in number and time. After a
    failure of the infrastructure (of the evaluator, or a GPU that its driver has lost) the submission is tried again on
    another device, ahead of others.
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
        # A permit counts as a token of the limiter: the capacity bounds open permits, the rest waits or is refused.
        limiter_settings = RouterConfig(overcommit=1.0, queue_requests=limits.queue, queue_s=limits.queue_s)
        capacity_by_resource = {
            "gpu": lambda: devices.usable("gpu"),
            "cpu": lambda: devices.usable("cpu") + limits.concurrency * leases_cores,
            "shared": lambda: limits.concurrency,
        }
        self._limiters = {
            name: Limiter(limiter_settings, clock, capacity, lambda name, detail, /, **_: on_event(name, detail))
            for name, capacity in capacity_by_resource.items()
        }

    @property
    def waiting(self) -> dict[str, int]:
        """Return the numbers of waiting submissions by resource: gpu, cpu (timing) or shared."""
        return {name: limiter.waiting for name, limiter in self._limiters.items()}

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        """Evaluate a submission, on the device that it names if that is free; the result concerns the candidate alone.
        Raises Overloaded, ConfigurationError (the task is at fault) and KernelServiceFailed (the service is)."""
        failure_causes: list[str] = []
        began_s = self._clock.now()
        for attempt in range(self._limits.retries + 1):
            try:
                async with self._acquire_device(submission, -attempt) as device:
                    waited_s = self._clock.now() - began_s
                    evaluation = await self._evaluate_once(msgspec.structs.replace(submission, device=device))
            except DeviceUnavailable as error:
                failure_causes.append(str(error))
                await self._devices.refresh()  # a lost device may have returned
                continue
            if not evaluation.infrastructure:
                seconds = {**evaluation.seconds, "wait": evaluation.seconds.get("wait", 0.0) + waited_s}
                self._count(evaluation, waited_s)
                return msgspec.structs.replace(evaluation, seconds=seconds)
            failure_causes.append(evaluation.infrastructure)
            self.counts.retries += attempt < self._limits.retries
            began_s = self._clock.now()
        self.counts.failures += 1
        raise KernelServiceFailed("; then: ".join(dict.fromkeys(failure_causes)))

    @asynccontextmanager
    async def _acquire_device(self, submission: KernelSubmission, priority: int) -> AsyncIterator[str]:
        """Hold a permit within the block; yields its device, "" for the shared cores."""
        allowed_kinds, preferred = device_kinds(submission.task.backend), submission.device
        present: list[DeviceKind] = [candidate for candidate in allowed_kinds if self._devices.names((candidate,))]
        device_kind = self._devices.kind(preferred) if preferred else (present or allowed_kinds)[0]
        if device_kind == "cpu" and not submission.timed:
            async with self._limiters["shared"].permit(1, priority):
                yield ""
            return
        async with self._limiters[device_kind].permit(1, priority):
            if device_kind == "cpu" and self._leases_cores:
                yield preferred
                return
            with self._devices.lease(device_kind, preferred) as device:
                yield device

    async def _evaluate_once(self, submission: KernelSubmission) -> KernelEvaluation:
        """Make a single attempt; failures of evaluator and device are ``infrastructure`` in the result."""
        device, began_s = submission.device, self._clock.now()
        self.running += 1
        limit_s = submission.timeout_s + _OVERTIME_S
        if self._leases_cores and submission.timed:
            limit_s += self._limits.queue_s  # the evaluator waits for a core within its time
        try:
            async with asyncio.timeout(limit_s):
                evaluation = await self._judge.evaluate(submission)
        except ConfigurationError:
            raise
        except TimeoutError:
            evaluation = KernelEvaluation(infrastructure=f"the evaluator didn't end within {limit_s:g} s")
        except Exception as error:  # the boundary to the evaluator, whose failures aren't the candidate's
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
        """Reset devices, see `DeviceTable.reset`, and admit the submissions that wait for them."""
        usable_names = self._devices.reset(names)
        for limiter in self._limiters.values():
            limiter.admit_waiting()
        return usable_names

    def stop(self) -> None:
        """Refuse all waiting submissions."""
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

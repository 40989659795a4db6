"""References compiled by torch.compile, each in a sandbox of its own, and their times against the eager ones'."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from headway.kernels.isolation import Deception, GuestEnded, GuestError, GuestProcess, guest_spec
from headway.kernels.timing import TimingResult
from headway.kernels.trials import CandidateTrials, TaskFault, TrialGroup
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask
from headway.records.sandbox import MIB, SandboxError, SandboxSpec
from headway.runtime.devices import parse_device

COMPILE_S = 120.0  # to compile one (40 s on a quiet core), and half of it to time it
NO_TIME = "no time for torch.compile of the reference"
_MEMORY_BYTES, _DISK_BYTES = 4096 * MIB, 256 * MIB
_REMEMBERED = 1024
# Behind the reference, in the place of a candidate. Inductor starts Python to try out this CPU's vector instructions:
# there is none in a sandbox, and a program that always ends well takes the CPU's word for them.
_SOURCE = """


def ModelNew(*arguments, made=[]):
    if not made:
        import os
        import sys

        folders = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor", "HOME": "/tmp"}
        os.environ.update(folders, TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
        sys.executable = "/bin/true"
        import torch

        made.append(torch.compile(Model(*arguments), dynamic=False))
    return made[0]
"""


def compiled_spec(cores: int) -> SandboxSpec:
    """The specification of the sandbox of a compiled reference: a guest's, with room for a compiler."""
    spec = guest_spec(cores, _MEMORY_BYTES)
    return msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, disk_bytes=_DISK_BYTES))


def compile_reference(guest: GuestProcess, task: KernelTask, group: TrialGroup, seed: int) -> None:
    """Compile a reference as the candidate of its guest, ready to be timed. Raises TaskFault where its values are
    wrong then, and what a guest's calls raise."""
    guest.call("load", (task.source + _SOURCE).encode(), module="candidate", confined=False)
    trials = CandidateTrials(guest, task, seed)
    trials.make(group.arguments)
    trials.run(group)
    if trials.result.passed != trials.result.trials:
        raise TaskFault(f"its values are wrong: {trials.result.text}")


class CompiledReferences:
    """Compiled references' times, or why there is none: found out once for each task and set of cores."""

    def __init__(
        self, measure: Callable[[KernelSubmission, TrialGroup, tuple[int, ...]], Awaitable[TimingResult]]
    ) -> None:
        """``measure``: compiles one and times it as the candidate on cores that are leased."""
        self._measure = measure
        self._found: OrderedDict[tuple[str, tuple[int, ...]], TimingResult | str] = OrderedDict()
        self._lock = asyncio.Lock()  # a compiler at a time: two would disturb each other's times

    async def compare(
        self, submission: KernelSubmission, group: TrialGroup, found: KernelEvaluation, until_s: float
    ) -> KernelEvaluation:
        """A timed evaluation that tells the speed-up over the compiled reference too, or why it can't: whatever fails
        there changes nothing else. Who asks first waits for the compiler, if there is time until ``until_s``."""
        assert found.speedup is not None
        cores, since_s = parse_device(found.device).core_ids(), time.monotonic()
        key = (submission.task.source, cores)
        async with self._lock:
            left_s = until_s - time.monotonic()
            if key not in self._found and left_s < 1.5 * COMPILE_S:
                note = f"{NO_TIME}: it needs {1.5 * COMPILE_S:g} s, {max(left_s, 0):.0f} s were left"
                return msgspec.structs.replace(found, compiled_note=note)
            if key not in self._found:
                self._found[key] = await self._measured(submission, group, cores)
                while len(self._found) > _REMEMBERED:
                    self._found.popitem(last=False)
            compiled = self._found[key]
        found = msgspec.structs.replace(found, seconds={**found.seconds, "reference": time.monotonic() - since_s})
        if isinstance(compiled, str):
            return msgspec.structs.replace(found, compiled_note=compiled)
        speedup = (found.speedup or 0.0) / compiled.speedup
        return msgspec.structs.replace(found, reference_compiled=compiled.timing, speedup_compiled=speedup)

    async def _measured(
        self, submission: KernelSubmission, group: TrialGroup, cores: tuple[int, ...]
    ) -> TimingResult | str:
        try:
            result = await self._measure(submission, group, cores)
        except (Deception, GuestError, GuestEnded, TaskFault, SandboxError, OSError) as error:
            return f"torch.compile of the reference: {error}"[:300]
        return f"torch.compile of the reference: {result.refused}" if result.refused else result

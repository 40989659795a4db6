"""References compiled by torch.compile, each in a sandbox of its own."""

from __future__ import annotations

import msgspec

from headway.kernels.isolation import GuestProcess, guest_spec
from headway.kernels.trials import CandidateTrials, TaskFault, TrialGroup
from headway.records.kernels import KernelTask
from headway.records.sandbox import MIB, SandboxSpec

COMPILE_S = 120.0  # to compile one (40 s on a quiet core), and half of it to time it
NO_TIME = "no time for torch.compile of the reference"
_MEMORY_BYTES, _DISK_BYTES = 4096 * MIB, 256 * MIB
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
    guest.load("candidate", task.source + _SOURCE, confined=False)
    trials = CandidateTrials(guest, task, seed)
    trials.make(group.arguments)
    trials.run(group)
    if trials.text:
        raise TaskFault(f"its values are wrong: {trials.text}")

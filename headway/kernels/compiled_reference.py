"""References compiled by torch.compile, each in its own sandbox."""

from __future__ import annotations

import msgspec

from headway.kernels.cases import CandidateTrials, TaskFault, TrialGroup
from headway.kernels.isolation import GuestProcess, guest_spec
from headway.records.kernels import KernelTask
from headway.records.sandbox import MIB, SandboxSpec

COMPILE_S = 120.0  # to compile one (40 s on a quiet core), and half of it to time it
NO_TIME = "no time for torch.compile of the reference"
_MEMORY_BYTES, _DISK_BYTES = 4096 * MIB, 256 * MIB
# Appended to the reference, which takes the candidate's role. Inductor starts Python to test this CPU's vector
# instructions. A sandbox has none, so /bin/true, which always succeeds, replaces it: the CPU's flags are trusted.
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
    """The sandbox specification of a compiled reference: a guest's, with memory and disk for a compiler."""
    spec = guest_spec(cores, _MEMORY_BYTES)
    return msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, disk_bytes=_DISK_BYTES))


def compile_reference(guest: GuestProcess, task: KernelTask, group: TrialGroup, seed: int) -> None:
    """Compile a reference as the candidate of its guest, ready for timing. Raises TaskFault if the compiled values are
    wrong, and the exceptions of a guest's calls."""
    guest.load("candidate", task.source + _SOURCE, confined=False)
    trials = CandidateTrials(guest, task, seed)
    trials.make(group.arguments)
    trials.run(group)
    if trials.text:
        raise TaskFault(f"its values are wrong: {trials.text}")

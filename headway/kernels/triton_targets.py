"""Compilation of a candidate's Triton kernels for GPUs that this machine lacks, for the launches that the interpreter
recorded, in a separate sandbox that receives only the kernels."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from headway.kernels.isolation import LOG_BYTES, LOG_CHARACTERS, ONE_THREAD
from headway.kernels.triton_source import kernel_module
from headway.records.kernels import KernelEvaluation, KernelFault
from headway.records.sandbox import ResourceLimits, SandboxError, SandboxSpec, infrastructure_failure
from headway.sandbox.local.backend import LocalBackend

FUNCTION = "headway.kernels.guest.triton_compiler:main"
# Shared memory of a block: 227 KiB by compute capability 9.0 (CUDA C programming guide), 64 KiB of LDS by CDNA 3 (ISA).
TARGETS: tuple[dict[str, Any], ...] = (
    {"name": "sm_90", "gpu": ["cuda", 90, 32], "shared_bytes": 227 << 10},
    {"name": "gfx942", "gpu": ["hip", "gfx942", 64], "shared_bytes": 64 << 10},
)
NOT_LAUNCHED = "no Triton kernel of its own is launched"
NOT_TIMED = "Triton's interpreter isn't timed: it checks values, not speed"
_ENVIRONMENT = {**ONE_THREAD, "TRITON_CACHE_DIR": "/work/cache", "TRITON_DEFAULT_FP_FUSION": "1"}


class TritonLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel's launch, as the guest reports it; `guest/triton_interpreter.py` defines the arguments' form."""

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]


class CompileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first launch that fails for a target. Without ``error`` all launches compile and fit into shared memory."""

    error: str = ""
    log: str = ""
    fault: KernelFault = "triton_compilation_error"  # shared_memory_exceeded: it compiles, but needs more than there is


async def judge_compilation(
    backend: LocalBackend,
    limits: ResourceLimits,
    source: str,
    launches: list[Any],
    verdict: KernelEvaluation,
    left_s: float,
) -> KernelEvaluation:
    """Add the compiler's outcome to the ``verdict`` of the interpreter's trials: ``compiled`` is whether all launches
    compile for all targets. Raises SandboxError."""
    if verdict.cheat or verdict.fault == "timeout":  # there is no time left
        return msgspec.structs.replace(verdict, compiled=False)
    if not launches:
        cheat = "" if verdict.fault else NOT_LAUNCHED
        return msgspec.structs.replace(verdict, compiled=False, cheat=cheat, text=cheat or verdict.text)
    try:
        parsed_launches, module = msgspec.convert(launches, list[TritonLaunch]), kernel_module(source)
    except msgspec.ValidationError:
        return msgspec.structs.replace(verdict, compiled=False, cheat="it forged a launch", text="it forged a launch")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # numbers too long, expressions too deep
        return msgspec.structs.replace(verdict, compiled=False, fault="triton_compilation_error", text=str(error))
    outcome = await _compile(backend, limits, module, parsed_launches, left_s)
    verdict = msgspec.structs.replace(verdict, compiled=not outcome.error or outcome.fault == "shared_memory_exceeded")
    if not outcome.error or verdict.fault not in (None, "triton_jit_error"):
        return verdict
    return msgspec.structs.replace(verdict, fault=outcome.fault, text=outcome.error, log=outcome.log[:LOG_CHARACTERS])


async def _compile(
    backend: LocalBackend, limits: ResourceLimits, module: str, launches: list[TritonLaunch], timeout_s: float
) -> CompileOutcome:
    box = await backend.create(SandboxSpec(limits=limits, environment=_ENVIRONMENT))
    try:
        await box.write("/work/kernels.py", module.encode())
        await box.write("/work/launches.json", msgspec.json.encode({"launches": launches, "targets": TARGETS}))
        done = await box.run_function(FUNCTION, timeout_s=timeout_s, max_output_bytes=LOG_BYTES)
        log = (done.stderr or done.stdout).decode(errors="replace")
        if done.timed_out:
            return CompileOutcome(error="not compiled in time", fault="timeout")
        if done.oom or done.signal is not None:  # a compiler that fails on a source
            return CompileOutcome(error=f"the compiler {'is out of memory' if done.oom else 'crashed'}", log=log)
        if done.exit_code:
            raise SandboxError(infrastructure_failure(f"the sandbox that compiles Triton kernels: {log[-1000:]}"))
        return msgspec.json.decode(await box.read("/work/outcome.json"), type=CompileOutcome)
    finally:
        await asyncio.shield(box.terminate())

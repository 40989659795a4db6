"""Compilation of a candidate's Triton and CUDA kernels for GPUs that this machine lacks, for the launches and
extensions that its guest recorded, in a separate sandbox that receives only the kernels."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import struct
import sysconfig
from typing import Any

import msgspec

from headway.kernels.faults import fault_in, first_line
from headway.kernels.isolation import LOG_BYTES, LOG_CHARACTERS, ONE_THREAD, torch_folder
from headway.kernels.triton_source import kernel_module
from headway.records.kernels import KernelBackend, KernelEvaluation, KernelFault
from headway.records.sandbox import (
    MIB,
    Command,
    ExecResult,
    ResourceLimits,
    SandboxError,
    SandboxSpec,
    infrastructure_failure,
)
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.sandbox import LocalSandbox

FUNCTION = "headway.kernels.guest.triton_compiler:main"
# Shared memory of a block: 227 KiB by compute capability 9.0 (CUDA C programming guide), 64 KiB of LDS by CDNA 3 (ISA).
TARGETS: tuple[dict[str, Any], ...] = (
    {"name": "sm_90", "gpu": ["cuda", 90, 32], "shared_bytes": 227 << 10},
    {"name": "gfx942", "gpu": ["hip", "gfx942", 64], "shared_bytes": 64 << 10},
)
NOT_LAUNCHED = "no Triton kernel of its own is launched"
NO_KERNEL = "no CUDA kernel of its own is compiled"
NOT_TIMED = "Triton's interpreter isn't timed: it checks values, not speed"
NOT_RUN = "CUDA kernels are compiled, and not run: the evaluator uses no GPU yet"
NVCC = "nvcc"
# As `load_inline` compiles, for the first of TARGETS, without the C++ beside the kernels.
_NVCC_FLAGS = [
    *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__"),
    *("-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr", "-std=c++20", "-arch=sm_90", "-cubin"),
]
_HEADERS = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
# A candidate's own flags that change nothing but the code; with others nvcc could end well and compile nothing.
_FLAG = re.compile(r"-O[0-3]|--?use_fast_math|-lineinfo|--?expt-\w+(-\w+)*|--?maxrregcount=\d+|-[DU]\w+(=\w+)?|-w")
_CUDA_DISK_BYTES = 256 * MIB  # of preprocessed sources: each contains torch's headers
_ENVIRONMENT = {**ONE_THREAD, "TRITON_CACHE_DIR": "/work/cache", "TRITON_DEFAULT_FP_FUSION": "1"}


class TritonLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel's launch, as the guest reports it; `guest/triton_interpreter.py` defines the arguments' form."""

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]


class CudaExtension(msgspec.Struct, frozen=True, kw_only=True):
    """A call of ``load_inline``, as the guest reports it."""

    sources: list[str]
    flags: list[str]


class CompileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first launch that fails for a target. Without ``error`` all launches compile and fit into shared memory."""

    error: str = ""
    log: str = ""
    fault: KernelFault = (
        "triton_compilation_error"  # of Triton's; shared_memory_exceeded: it compiles, but needs more than there is
    )


async def judge_compilation(
    backend: LocalBackend,
    limits: ResourceLimits,
    language: KernelBackend,
    source: str,
    launches: list[Any],
    verdict: KernelEvaluation,
    left_s: float,
) -> KernelEvaluation:
    """Add the compiler's outcome to the ``verdict`` of a guest: ``compiled`` is whether all launches of Triton kernels
    compile for all targets, or all extensions in CUDA for the first. Raises SandboxError."""
    if verdict.cheat or verdict.fault == "timeout":  # there is no time left
        return msgspec.structs.replace(verdict, compiled=False)
    if not launches:
        cheat = "" if verdict.fault else NOT_LAUNCHED if language == "triton" else NO_KERNEL
        return msgspec.structs.replace(verdict, compiled=False, cheat=cheat, text=cheat or verdict.text)
    try:
        extensions = msgspec.convert(launches, list[CudaExtension]) if language == "cuda" else []
        parsed_launches = msgspec.convert(launches, list[TritonLaunch]) if language == "triton" else []
        module_source = kernel_module(source) if language == "triton" else ""
    except msgspec.ValidationError:
        return msgspec.structs.replace(verdict, compiled=False, cheat="it forged a launch", text="it forged a launch")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # numbers too long, expressions too deep
        return msgspec.structs.replace(verdict, compiled=False, fault="triton_compilation_error", text=str(error))
    if language == "cuda":
        limits = msgspec.structs.replace(limits, disk_bytes=_CUDA_DISK_BYTES)
    sandbox = await backend.create(SandboxSpec(limits=limits, environment=_ENVIRONMENT))
    try:
        if language == "cuda":
            outcome = await _compile_cuda(sandbox, extensions, left_s)
        else:
            outcome = await _compile_triton(sandbox, module_source, parsed_launches, left_s)
    finally:
        await asyncio.shield(sandbox.terminate())
    if outcome.error == NO_KERNEL:
        return msgspec.structs.replace(verdict, compiled=False, cheat=NO_KERNEL, text=NO_KERNEL)
    fits_nowhere = language == "triton" and outcome.fault == "shared_memory_exceeded"  # nvcc refuses to compile it
    verdict = msgspec.structs.replace(verdict, compiled=not outcome.error or fits_nowhere)
    if not outcome.error or verdict.fault not in (None, "triton_jit_error"):
        return verdict
    return msgspec.structs.replace(verdict, fault=outcome.fault, text=outcome.error, log=outcome.log[:LOG_CHARACTERS])


async def _compile_triton(
    box: LocalSandbox, module: str, launches: list[TritonLaunch], timeout_s: float
) -> CompileOutcome:
    await box.write("/work/kernels.py", module.encode())
    await box.write("/work/launches.json", msgspec.json.encode({"launches": launches, "targets": TARGETS}))
    exec_result = await box.run_function(FUNCTION, timeout_s=timeout_s, max_output_bytes=LOG_BYTES)
    if early_outcome := _ended(exec_result):
        return early_outcome
    if exec_result.exit_code:
        log = (exec_result.stderr or exec_result.stdout).decode(errors="replace")
        raise SandboxError(infrastructure_failure(f"the sandbox that compiles Triton kernels: {log[-1000:]}"))
    return msgspec.json.decode(await box.read("/work/outcome.json"), type=CompileOutcome)


async def _compile_cuda(box: LocalSandbox, extensions: list[CudaExtension], timeout_s: float) -> CompileOutcome:
    """Compile extensions one after the other, as `load_inline` compiles their CUDA sources."""
    include, has_kernels = os.path.join(torch_folder(), "include"), False
    include_paths = [include, os.path.join(include, "torch", "csrc", "api", "include"), sysconfig.get_path("include")]
    for extension in extensions:
        await box.write("/work/kernel.cu", (_HEADERS + "\n".join(extension.sources)).encode(errors="replace"))
        flags = [*_NVCC_FLAGS, *filter(_FLAG.fullmatch, extension.flags), *(f"-I{path}" for path in include_paths)]
        command = [shutil.which(NVCC) or NVCC, *flags, "-o", "/work/kernel.cubin", "/work/kernel.cu"]
        exec_result = await box.exec(Command(argv=command, timeout_s=max(timeout_s, 0.1), max_output_bytes=LOG_BYTES))
        timeout_s -= exec_result.duration_s
        if early_outcome := _ended(exec_result):
            return early_outcome
        if exec_result.exit_code:
            log = exec_result.stderr.decode(errors="replace").replace("/work/kernel.cu", "kernel.cu")
            return CompileOutcome(error=first_line(log), log=log, fault=fault_in(log) or "syntax_error")
        has_kernels = has_kernels or _has_instructions(await box.read("/work/kernel.cubin"))
    return CompileOutcome() if has_kernels else CompileOutcome(error=NO_KERNEL)


def _has_instructions(cubin: bytes) -> bool:
    """Whether a section of an ELF object of 64 bits is executable: each kernel has one."""
    (table_start,), (entry_size, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    return any(struct.unpack_from("<Q", cubin, table_start + n * entry_size + 8)[0] & 4 for n in range(count))


def _ended(done: ExecResult) -> CompileOutcome | None:
    """The outcome of a compiler that a limit or a signal has ended; None: it ended by itself."""
    if done.timed_out:
        return CompileOutcome(error="not compiled in time", fault="timeout")
    if not done.oom and done.signal is None:
        return None
    log = (done.stderr or done.stdout).decode(errors="replace")  # a compiler that fails on a source
    return CompileOutcome(error=f"the compiler {'is out of memory' if done.oom else 'crashed'}", log=log)

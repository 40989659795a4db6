"""Classification of faults, by messages of drivers, compilers and interpreters and by how a process ended.

The eleven classes and their order are TritonForge's (its fault detector); drivers' texts are those of CUDA and ROCm.
"""

from __future__ import annotations

import re
import signal

from headway.kernels.isolation import LOG_CHARACTERS, GuestEnded, GuestError, GuestProcess
from headway.records.kernels import KernelFault
from headway.records.sandbox import ExecResult

TEXT_CHARACTERS = 300
_TEXTS: tuple[tuple[KernelFault, str], ...] = (
    (
        "shared_memory_exceeded",
        r"out of resource: shared memory|too much shared (memory|data)|exceeds? .*shared memory|"
        r"local memory \(\d+\) exceeds limit",
    ),
    (
        "illegal_memory_access",
        r"illegal memory access|misaligned address|cudaErrorIllegalAddress|hipErrorIllegalAddress",
    ),
    ("memory_fault", r"memory access fault by gpu|HSA_STATUS_ERROR_MEMORY|page not present|MEMORY_APERTURE_VIOLATION"),
    (
        "unsupported_architecture",
        r"no kernel image is available|unsupported (gpu )?arch|invalid device function|"
        r"hipErrorNoBinaryForGpu|not a recognized processor|is not defined for option 'gpu-(architecture|name)'",
    ),
    ("segmentation_fault", r"segmentation fault|SIGSEGV"),
    (
        "triton_compilation_error",
        r"triton.*compilationerror|CompilationError: at \d+|UnsupportedLanguageConstruct|"
        r"CompileTimeAssertionFailure",
    ),
    ("triton_jit_error", r"triton.*(jit|interpreter)|InterpreterError|JITFunction|@triton\.jit"),
)
_NOISE = re.compile(
    r"^\s*(from |In file included|.*: In (member )?function|.*: At global scope|Traceback|File |\^|\|)|^\W*$"
)


def fault_in(text: str) -> KernelFault | None:
    """The fault class that a text names; None: it names none."""
    for fault, pattern in _TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return fault
    return None


def fault_of(error: GuestError | GuestEnded, guest: GuestProcess) -> tuple[KernelFault, str, str]:
    """The fault class of an error that ended a candidate's run, its first useful line, and its log. Blocks. Raises
    SandboxError if its sandbox has failed."""
    if isinstance(error, GuestError):
        text = first_line(str(error)) or str(error)
        return fault_of_error(error), text, (error.log or str(error))[:LOG_CHARACTERS]
    exec_result = None if error.late else guest.wait_ended()
    log = "" if exec_result is None else exec_result.stderr.decode(errors="replace")[-LOG_CHARACTERS:]
    return *fault_of_end(error, exec_result), log


def fault_of_error(error: GuestError) -> KernelFault:
    """The fault class of an exception of a candidate's source, or of its compiler's message."""
    if error.kind in ("syntax", "compile"):
        return fault_in(str(error)) or "syntax_error"
    named_fault = fault_in(f"{error}\n{error.log}")
    return named_fault if named_fault not in (None, "segmentation_fault") else "process_error"


def fault_of_end(ended: GuestEnded, result: ExecResult | None) -> tuple[KernelFault, str]:
    """The fault class of a candidate's process that ended, and a line on its end."""
    if ended.late or (result is not None and result.timed_out):
        return "timeout", "not done in time"
    if result is None:
        return "unknown", str(ended)
    log = result.stderr.decode(errors="replace")
    if result.oom:
        return "process_error", "out of memory"
    if result.signal is not None:
        default_fault = "segmentation_fault" if result.signal in (signal.SIGSEGV, signal.SIGBUS) else "process_error"
        return fault_in(log) or default_fault, first_line(log) or f"ended by {_name(result.signal)}"
    return fault_in(log) or "process_error", first_line(log) or f"ended by itself with exit code {result.exit_code}"


def first_line(text: str) -> str:
    """The first useful line: the compiler's first error, else the first line that isn't a frame or a caret."""
    lines = text.splitlines()
    for pattern in (r"\berror:|Error\b", r"warning:|undefined reference|fault"):
        for line in lines:
            if re.search(pattern, line):
                return line.strip()[:TEXT_CHARACTERS]
    return next((line.strip()[:TEXT_CHARACTERS] for line in lines if not _NOISE.match(line)), "")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Kernel tasks, submissions and evaluations: records between service, evaluator, environment and clients."""

from __future__ import annotations

from typing import Literal

import msgspec

KernelBackend = Literal["torch", "cpp", "triton", "cuda"]
# As TritonForge publishes them; the first four need a device.
KernelFault = Literal[
    "shared_memory_exceeded",
    "illegal_memory_access",
    "memory_fault",
    "unsupported_architecture",
    "segmentation_fault",
    "triton_compilation_error",
    "triton_jit_error",
    "syntax_error",
    "timeout",
    "process_error",
    "unknown",
]
TOLERANCES = {"float32": (1e-4, 1e-4), "float16": (1e-2, 1e-2), "bfloat16": (1e-2, 1e-2), "float64": (1e-6, 1e-6)}


class KernelTask(msgspec.Struct, frozen=True, kw_only=True):
    """A reference module to be made faster. Its source defines ``Model``, ``get_inputs()`` and ``get_init_inputs()``,
    as KernelBench's do; a candidate defines ``ModelNew`` with the same signature."""

    name: str
    source: str
    level: int = 1
    backend: KernelBackend = "cpp"
    tolerances: dict[str, tuple[float, float]] = msgspec.field(
        default_factory=TOLERANCES.copy
    )  # by dtype: absolute, relative
    shapes: tuple[dict[str, int], ...] = ()  # further sizes to be checked: the source's constants by name
    allowed_operators: tuple[str, ...] | None = None  # ATen's, beside own kernels and the back end's list
    forbidden_operators: tuple[str, ...] = ()  # of back end "torch": the fused one that is the task's answer


class KernelSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for a task, with the settings of its evaluation."""

    task: KernelTask
    source: str
    correct_trials: int = 5
    timed: bool = True
    timed_trials: int = 100  # calls of the candidate within all intervals, at least
    compare_compiled: bool = False  # measure the speed-up over torch.compile of the reference too, where possible
    seed: int = 42
    timeout_s: float = 600.0  # of the whole evaluation, without the wait for a device
    device: str = ""  # leased for it: cpu:2-3, cuda:0; "": any that the evaluator has. No part of what is judged


class KernelTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one call, ms, over the intervals measured."""

    mean: float
    std: float
    min: float
    max: float
    calls: int


class KernelEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of a candidate. With ``infrastructure`` it says nothing of the candidate, and gives no reward."""

    compiled: bool = False
    passed: int = 0  # trials whose outputs are within the tolerances ...
    trials: int = 0  # ... of so many
    fault: KernelFault | None = None
    cheat: str = ""  # how it tried to deceive; reward 0
    text: str = ""  # first useful line of what the compiler, the interpreter or the comparison says
    log: str = ""  # more of it, capped
    device: str = ""
    timing: KernelTiming | None = None
    reference: KernelTiming | None = None  # eager
    speedup: float | None = None  # over the eager reference; None: not timed, or refused
    speedup_interval: tuple[float, float] | None = None  # 95 %
    reference_compiled: KernelTiming | None = None  # by torch.compile, measured once for each task and set of cores
    speedup_compiled: float | None = None  # over it: the speed-up / torch.compile's own over the eager reference
    compiled_note: str = ""  # why there is none, though one was asked for
    refused: str = ""  # why there is no speed-up, though one was asked for: noise, an interpreter
    precision: str = ""  # a lower one than the reference's, within the tolerance: reported
    seconds: dict[str, float] = {}  # wait, compile, check, time
    repeated: bool = False  # answered from an equal submission's evaluation
    infrastructure: str = ""  # the evaluator's own failure

    @property
    def correct(self) -> bool:
        """Whether it compiled, every trial passed, and neither a fault nor a cheat was detected."""
        return self.compiled and 0 < self.trials == self.passed and self.fault is None and not self.cheat

    @property
    def outcome(self) -> str:
        """The outcome: "correct", "wrong" (outputs), "cheat", "not compiled", "not run", or the class of its fault."""
        if self.cheat:
            return "cheat"
        if self.fault is not None:
            return self.fault
        if not self.compiled:
            return "not compiled"
        if not self.trials:
            return "not run"
        return "correct" if self.correct else "wrong"


class KernelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer's evaluation that its rollout keeps, in the verdict under ``KERNEL_ANSWERS``."""

    reward: float
    compiled: bool
    correct: bool
    fault: str = ""  # the evaluation's outcome; "": correct
    speedup: float | None = None
    repeated: bool = False
    evaluation_s: dict[str, float] = {}  # wait, compile, check, time
    text: str = ""


KERNEL_ANSWERS = "kernel_answers"

"""Submissions and evaluations as JSON of the kernel service, with TritonForge's names, those of its article, and the
complete record."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.kernels.reward import kernel_reward
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask, KernelTiming

TASK_FIELDS = tuple(name for name in KernelTask.__struct_fields__ if name != "source")
SUBMISSION_FIELDS = {  # a request's -> a submission's
    "seed_num": "seed",
    "num_correct_trials": "correct_trials",
    "num_perf_trials": "timed_trials",
    "measure_performance": "timed",
    "compare_compiled": "compare_compiled",
    "timeout_s": "timeout_s",
}


def request_of(submission: KernelSubmission) -> dict[str, Any]:
    """The body of a request for ``/eval``."""
    task = submission.task
    return {
        "original_model_src": task.source,
        "custom_model_src": submission.source,
        "preferred_device": submission.device or None,
        **{name: getattr(submission, field) for name, field in SUBMISSION_FIELDS.items()},
        **{name: getattr(task, name) for name in TASK_FIELDS},
    }


def answer_of(evaluation: KernelEvaluation, hardware: str) -> dict[str, Any]:
    """The body of the answer of ``/eval``. Times are in ms. ``hardware``: the model of the device."""
    timing, device_fields = evaluation.timing, {"hardware": hardware, "device": evaluation.device}
    keys = ("cheat", "precision", "refused", "repeated", "compiled_note")
    return {
        "compiled": evaluation.compiled,
        "correctness": evaluation.correct,
        "metadata": {**device_fields, "message": evaluation.text, **{name: getattr(evaluation, name) for name in keys}},
        "runtime": -1.0 if timing is None else timing.mean,
        "runtime_stats": {} if timing is None else {**_statistics(timing), **device_fields},
        "compile_ok": evaluation.compiled,
        "pass_rate": evaluation.passed / evaluation.trials if evaluation.trials else 0.0,
        "perf_stats": {
            "speedup": evaluation.speedup,
            "speedup_interval": evaluation.speedup_interval,
            "candidate": timing and _statistics(timing),
            "reference": evaluation.reference and _statistics(evaluation.reference),
            "reference_compiled": evaluation.reference_compiled and _statistics(evaluation.reference_compiled),
            "speedup_compiled": evaluation.speedup_compiled,
        },
        "raw_reward": kernel_reward(evaluation),
        "fault_type": evaluation.fault,
        "evaluation": evaluation,
    }


def evaluation_of(body: bytes) -> KernelEvaluation:
    """The evaluation in an answer. Raises msgspec.DecodeError (a ValueError) for a body that isn't one."""
    return msgspec.json.decode(body, type=_Answer).evaluation


class _Answer(msgspec.Struct):
    evaluation: KernelEvaluation


def _statistics(timing: KernelTiming) -> dict[str, Any]:
    return {**msgspec.structs.asdict(timing), "num_trials": timing.calls}

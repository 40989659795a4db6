"""Kernel tasks and candidates that say what becomes of them, and an evaluator that does it. No torch, no sandbox."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask, KernelTiming


def kernel_task(name: str, level: int = 1) -> KernelTask:
    body = f"SIZE = {sum(name.encode())}\nclass Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"
    return KernelTask(name=name, source=f"# {name}\n{body}", level=level)


def scripted(outcome: str, number: int = 0, speedup: float | None = 1.5) -> str:
    """A candidate. ``outcome``: correct, cheat, wrong, wrong at seed N, not compiled, infrastructure, refused, or the
    class of a fault."""
    return f'OUTCOME = "{outcome}"\nSPEEDUP = {speedup}\nNUMBER = {number}\n\n\nclass ModelNew:\n    pass\n'


class ScriptedEvaluator:
    """Evaluates as `scripted` says, and counts what it was given."""

    def __init__(self) -> None:
        self.seen = Counter[str]()
        self.submissions: list[KernelSubmission] = []
        self.running = self.peak = 0

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        self.seen[submission.source] += 1
        self.submissions.append(submission)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        found = re.search(r'^OUTCOME = "(.*)"\nSPEEDUP = (.*)$', submission.source, re.MULTILINE)
        assert found, submission.source
        outcome, speedup = found[1], None if found[2] == "None" else float(found[2])
        return evaluation(outcome, speedup, submission)


def evaluation(
    outcome: str, speedup: float | None = 1.5, submission: KernelSubmission | None = None
) -> KernelEvaluation:
    timed = submission is None or submission.timed
    trials = 5 if submission is None else submission.correct_trials
    if outcome == "refused":
        raise ConfigurationError("its reference fails")
    if outcome == "infrastructure":
        return KernelEvaluation(infrastructure="the zygote has died")
    if outcome == "not compiled":
        return KernelEvaluation(text="error: expected ';'")
    if outcome == "cheat":
        return KernelEvaluation(compiled=True, trials=trials, passed=trials, cheat="it prints a result", speedup=9.0)
    if match := re.fullmatch(r"wrong at seed (\d+)", outcome):
        outcome = "wrong" if submission is not None and submission.seed == int(match[1]) else "correct"
    if outcome == "wrong":
        return KernelEvaluation(compiled=True, trials=trials, passed=trials - 1, text="1 of 8 values differs")
    if outcome != "correct":
        fault: Any = outcome
        return KernelEvaluation(compiled=True, trials=trials, fault=fault, text=f"{outcome} in line 3")
    if not timed or speedup is None:
        return KernelEvaluation(compiled=True, trials=trials, passed=trials, refused="noise" if timed else "")
    return KernelEvaluation(
        compiled=True,
        trials=trials,
        passed=trials,
        speedup=speedup,
        timing=_timing(2.0 / speedup),
        reference=_timing(2.0),
    )


def _timing(mean_ms: float) -> KernelTiming:
    return KernelTiming(mean=mean_ms, std=0.0, min=mean_ms, max=mean_ms, calls=100)

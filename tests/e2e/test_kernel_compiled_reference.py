"""The speed-up over torch.compile of the reference, with real sandboxes: compiled once, and never a fault."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kernel_evaluators import opened
from kernel_sources import HONEST, submission

from headway.kernels import evaluator as module
from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.kernels.timing import TimingSettings

pytestmark = pytest.mark.real
FEW = EvaluatorSettings(concurrent=2, timing=TimingSettings(pairs=5, most_s=0.4, refused_width=1000.0))


@pytest.mark.long
@pytest.mark.timeout(420)
def test_the_compiled_reference_is_timed_once_and_its_failure_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = next(iter(HONEST.values()))
    asked = msgspec.structs.replace(submission(source, timed=True, timed_trials=10), compare_compiled=True)
    asked = msgspec.structs.replace(asked, timeout_s=400.0)

    async def use(evaluator: KernelEvaluator) -> None:
        hurried = await evaluator.evaluate(msgspec.structs.replace(asked, timeout_s=30.0))
        assert hurried.correct
        assert hurried.compiled_note.startswith("no time for torch.compile of the reference: it needs 180 s")
        found = await evaluator.evaluate(asked)
        assert (found.correct, found.compiled_note) == (True, "")
        assert found.speedup is not None
        assert found.reference_compiled is not None
        assert found.speedup_compiled is not None
        # the timing of another candidate asks no compiler any more
        again = await evaluator.evaluate(msgspec.structs.replace(hurried_with(asked), seed=43))
        assert again.reference_compiled == found.reference_compiled
        assert again.speedup_compiled is not None
        assert again.speedup is not None
        assert again.speedup_compiled / again.speedup == pytest.approx(found.speedup_compiled / found.speedup)

    def hurried_with(one: module.KernelSubmission) -> module.KernelSubmission:
        return msgspec.structs.replace(one, timeout_s=30.0)

    async def fail(evaluator: KernelEvaluator) -> None:
        def broken(*_: object) -> None:
            raise module.GuestError("no C++ compiler", "raised", "")

        monkeypatch.setattr(module, "compile_reference", broken)
        found = await evaluator.evaluate(asked)
        assert found.correct
        assert found.speedup is not None
        assert (found.fault, found.infrastructure, found.speedup_compiled) == (None, "", None)
        assert found.compiled_note == "torch.compile of the reference: no C++ compiler"

    with opened(tmp_path / "one", FEW) as run:
        run(use)
    with opened(tmp_path / "two", FEW) as run:
        run(fail)

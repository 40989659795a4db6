"""The evaluator with real sandboxes: honest candidates, faults, deceptions, and what is left afterwards."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from kernel_evaluators import opened
from kernel_sources import CHEATS, CPP, HONEST, REFERENCE, TASK, Cheat, model, submission

from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.kernels.timing import TimingSettings
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelTask

FEW = EvaluatorSettings(concurrent=3, timing=TimingSettings(pairs=5, most_s=0.4, refused_width=100.0))
FAULTS = {
    "segmentation_fault": CPP.replace("y[i] =", "((volatile int*)8)[i] = 1, y[i] ="),
    "syntax_error": "class ModelNew(:\n    pass\n",
    "timeout": model("while True:\n    pass"),
    "process_error": model("raise ValueError('no such thing')"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs a function with an evaluator that all tests here share."""
    with opened(tmp_path_factory.mktemp("evaluator"), FEW) as run:
        yield run


@pytest.mark.slow
def test_honest_candidates_pass_and_are_timed(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        for source in HONEST.values():
            found = await evaluator.evaluate(submission(source, timed=True, timed_trials=10))
            assert found.correct, found
            assert (found.trials, found.cheat, found.infrastructure) == (10, "", ""), found
            assert found.timing is not None
            assert found.reference is not None
            assert 0.05 < found.reference.mean / found.timing.mean < 200
            assert found.speedup is not None
            assert found.speedup_interval is not None
            assert found.speedup_interval[0] <= found.speedup <= found.speedup_interval[1]
            assert found.device.startswith("cpu:")

    shared(use)


@pytest.mark.slow
def test_deceptions_are_recognised_and_their_correct_twins_pass(shared):
    async def use(evaluator: KernelEvaluator) -> list[str]:
        async def one(cheat: Cheat, source: str):
            timed = "timed" in cheat.why or "cores" in cheat.why
            return await evaluator.evaluate(submission(source, timed=timed, timed_trials=30))

        sources = [*((cheat, cheat.source) for cheat in CHEATS), *((cheat, cheat.twin) for cheat in CHEATS)]
        found = await asyncio.gather(*(one(*pair) for pair in sources))
        wrong = []
        for cheat, caught, honest in zip(CHEATS, found, found[len(CHEATS) :], strict=False):
            if not re.search(cheat.why, caught.cheat):
                wrong.append(f"{cheat.name}: {caught.cheat or caught}")
            if not honest.correct:
                wrong.append(f"{cheat.name}, honestly: {honest}")
        return wrong

    assert len(CHEATS) >= 25
    assert shared(use) == []


@pytest.mark.slow
def test_faults_are_classed_beside_a_healthy_candidate(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        def wanted(source: str):
            return msgspec.structs.replace(submission(source), timeout_s=4.0)

        healthy = submission(model("return self.right(x) + 0"))
        await evaluator.evaluate(submission(HONEST["torch"]))
        found = await asyncio.gather(
            *map(evaluator.evaluate, map(wanted, FAULTS.values())), evaluator.evaluate(healthy)
        )
        assert [one.fault for one in found[:-1]] == list(FAULTS), found
        assert all(one.text and not one.infrastructure and not one.correct for one in found[:-1])
        assert found[-1].correct, found[-1]

    shared(use)


def test_a_crash_in_timed_calls_has_its_class(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        counted = (
            "self.count = getattr(self, 'count', 0) + 1\nif self.count > 30:\n    os.abort()\nreturn self.right(x)"
        )
        found = await evaluator.evaluate(submission(model(counted, top="import os"), timed=True))
        assert (found.fault, found.text, found.infrastructure) == ("process_error", "ended by SIGABRT", ""), found

    shared(use)


@pytest.mark.slow
def test_compile_errors_memory_and_exits_are_the_candidates(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        broken = await evaluator.evaluate(submission(CPP.replace("y[i] =", "z[i] =")))
        assert (broken.compiled, broken.fault) == (False, "syntax_error")
        assert re.match(r"/?.*kernel\.cpp:\d+:\d+: error: .z. was not declared", broken.text), broken.text
        undefined = await evaluator.evaluate(
            submission(
                CPP.replace("sinf(", "cblas_dot(").replace("<cmath>", "<cmath>\n extern float cblas_dot(float);")
            )
        )
        assert (undefined.compiled, undefined.fault) == (False, "syntax_error"), undefined
        hungry = await evaluator.evaluate(submission(model("y = [torch.ones(1 << 26) for _ in range(64)]\nreturn x")))
        assert (hungry.compiled, hungry.fault, hungry.text) == (True, "process_error", "out of memory"), hungry
        left = await evaluator.evaluate(submission(model("os._exit(0)", top="import os")))
        assert (left.fault, left.passed) == ("process_error", 0), left
        missing = await evaluator.evaluate(submission("import torch\n"))
        assert (missing.compiled, missing.text) == (False, "AttributeError: no class ModelNew in the source"), missing
        aborted = await evaluator.evaluate(submission(model("os.abort()", top="import os")))
        assert (aborted.fault, aborted.text) == ("process_error", "ended by SIGABRT"), aborted
        forked = await evaluator.evaluate(submission(model("os.fork()\nreturn self.right(x)", top="import os")))
        assert (forked.fault, forked.text[:15]) == ("process_error", "PermissionError"), forked

    shared(use)


def test_a_reference_that_fails_is_the_tasks_fault(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        for broken, why in (
            (REFERENCE.replace("torch.sin(x)", "torch.nothing(x)"), "nothing"),
            (REFERENCE.replace("torch.where(", "x.add_(1) + torch.where("), "changes its inputs"),
            (REFERENCE.replace("return [0.1]", "return [object()]"), "object"),
        ):
            with pytest.raises(ConfigurationError, match=f"task 'leaky'.*{why}"):
                await evaluator.evaluate(submission(HONEST["torch"], task=msgspec.structs.replace(TASK, source=broken)))

    shared(use)


SOURCE = """import torch
class Model(torch.nn.Module):
    def forward(self, x, y):
        return {expression}
def get_inputs():
    return [torch.{random}, torch.{random}]
def get_init_inputs():
    return []
"""


def pair(reference: str, candidate: str, random: str = "randn(64, 33)"):
    task = KernelTask(name="pair", source=SOURCE.format(expression=reference, random=random), backend="torch")
    source = (
        f"import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x, y):\n        return {candidate}\n"
    )
    return submission(source, task=task)


@pytest.mark.parametrize(("reference", "candidate"), [("torch.sigmoid(x)", "torch.tanh(x)"), ("x - y", "y - x")])
def test_an_honest_mistake_is_wrong_and_no_cheat(shared, reference: str, candidate: str):
    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(pair(reference, candidate))
        assert (found.outcome, found.cheat) == ("wrong", ""), found

    shared(use)


def test_outputs_below_the_absolute_tolerance_need_their_values(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        softmax, random = "torch.softmax(x, 1)", "rand(4, 16384, dtype=torch.float16)"
        zeros = await evaluator.evaluate(pair(softmax, "torch.zeros_like(x)", random))
        assert not zeros.correct
        assert "relative error of 1" in zeros.text
        right = await evaluator.evaluate(pair(softmax, "torch.softmax(x.float(), 1).half()", random))
        assert right.correct, right

    shared(use)


def test_a_submission_that_follows_an_abandoned_one_is_evaluated(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = pair("x + y", "y + x  # abandoned once")
        first = asyncio.create_task(evaluator.evaluate(wanted))
        await asyncio.sleep(0.05)  # it has begun
        first.cancel()
        await asyncio.sleep(0)
        assert (await evaluator.evaluate(wanted)).correct
        assert first.cancelled()

    shared(use)


def test_what_no_evaluation_can_begin_with_is_refused(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = submission(HONEST["torch"])
        for change, why in (
            ({"device": "cuda:0"}, "device = 'cuda:0': candidates aren't run on GPUs yet"),
            ({"timed_trials": 0}, "timed_trials = 0: valid: 1 to 10000"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                await evaluator.evaluate(msgspec.structs.replace(wanted, **change))

    shared(use)


def test_equal_submissions_are_evaluated_once(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = submission(HONEST["torch"] + "# asked for several times\n")
        found = await asyncio.gather(*(evaluator.evaluate(wanted) for _ in range(8)))
        found.append(await evaluator.evaluate(wanted))
        assert [one.repeated for one in found].count(False) == 1
        assert len({msgspec.json.encode(msgspec.structs.replace(one, repeated=False)) for one in found}) == 1

    shared(use)


def test_odd_submissions_are_refused_by_name(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        for odd, why in (
            (submission(HONEST["torch"], timed_trials=0), "timed_trials"),
            (submission(HONEST["torch"], correct_trials=-1), "correct_trials"),
            (submission("", task=msgspec.structs.replace(TASK, source="#" * (10 << 20))), "source"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                await evaluator.evaluate(odd)
        for odd, why in (
            (HONEST["torch"] + "# \udc80", "UTF-8"),
            ("#" * (10 << 20), "at most 1048576"),
            ("\0", "null"),
        ):
            found = await evaluator.evaluate(submission(odd))
            assert (found.fault, why in found.text) == ("syntax_error", True), found

    shared(use)


def test_lower_precision_within_the_tolerance_is_reported(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        task = msgspec.structs.replace(TASK, tolerances={"float32": (1e-2, 1e-2)})
        found = await evaluator.evaluate(submission(model("return self.right(x.half()).float()"), task=task))
        assert (found.correct, found.precision[-27:]) == (True, ": less precise than float32"), found
        found = await evaluator.evaluate(submission(HONEST["torch"], task=task))
        assert (found.correct, found.precision) == (True, ""), found

    shared(use)

"""What an evaluation blames: deceptions in timed calls alone are the candidate's, failures of sandboxes or of this
process are infrastructure."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernel_evaluators import opened
from kernel_sources import HONEST, model, submission

from headway.kernels import evaluator as module
from headway.kernels import isolation, timing
from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.kernels.isolation import GuestEnded, GuestProcess
from headway.kernels.timing import TimingSettings
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask
from headway.records.sandbox import SandboxError, infrastructure_failure
from headway.sandbox.local.sandbox import LocalSandbox

FEW = EvaluatorSettings(concurrent=2, timing=TimingSettings(pairs=9, most_s=0.4, refused_width=1000.0))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs a function with an evaluator that all tests here share."""
    with opened(tmp_path_factory.mktemp("evaluator"), FEW) as run:
        yield run


def timed(reference: str, random: str, forward: str, init: str = "pass") -> KernelSubmission:
    """A candidate for a reference of one input, both as the lines of their ``forward``."""

    def class_of(name: str, lines: str, first: str) -> str:
        head = f"class {name}(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        {first}\n"
        return f"{head}    def forward(self, x):\n" + "".join(f"        {line}\n" for line in lines.splitlines())

    inputs = f"def get_inputs():\n    return [torch.{random}]\ndef get_init_inputs():\n    return []\n"
    source = "import torch\n" + class_of("Model", reference, "pass") + inputs
    task = KernelTask(name="one", source=source, backend="torch")
    return submission("import torch\n" + class_of("ModelNew", forward, init), task=task, timed=True, timed_trials=300)


SLOW = "for _ in range(64):\n    y = torch.sin(x)\nreturn y"
LATE_CALLS = """self.call = self.call + 1 if x.data_ptr() > self.last else 1
self.last = x.data_ptr()
return torch.sin(x) if self.call <= 20 else torch.empty_like(x)"""
HASH = "for _ in range(16):\n    x = x * 3 + 1\nreturn x"
REMEMBERED = """key = tuple(x[:4].tolist())
if key not in self.kept:
    for _ in range(16):
        x = x * 3 + 1
    self.kept[key] = x
return self.kept[key].clone()"""
HOLLOW = "self.call += 1\nreturn torch.softmax(x.float(), 1).half() if self.call < 25 else torch.zeros_like(x)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (timed(SLOW, "randn(20000)", LATE_CALLS, "self.call, self.last = 0, 0"), "wrong in timed calls"),
        (timed(HASH, "randint(1 << 40, (50000,))", REMEMBERED, "self.kept = {}"), ""),
        (timed("return torch.softmax(x, 1)", "rand(4, 16384).half()", HOLLOW, "self.call = 0"), "wrong in timed calls"),
    ],
    ids=["calls that the reference doesn't make", "whole numbers remembered", "zeros within the tolerance"],
)
def test_timed_calls_alone_gain_nothing(shared, wanted: KernelSubmission, why: str):
    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(wanted)
        if why:
            assert why in found.cheat, found
        else:
            assert found.correct, found
            assert found.speedup is not None
            assert found.speedup < 2, found

    shared(use)


def test_functions_replaced_once_it_is_timed_are_a_cheat(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        again = "if made:\n    torch.allclose = lambda *a, **k: True\nmade.append(1)"
        found = await evaluator.evaluate(
            submission(model("return self.right(x)", top="made = []", init=again), timed=True)
        )
        assert found.cheat == "it replaced torch.allclose", found

    shared(use)


def test_an_operator_beyond_the_first_calls_of_an_interval_is_seen(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        further = """again, self.last = x.data_ptr() > self.last, x.data_ptr()
self.count += 1
if self.count > 25 and again:
    return torch.nn.functional.leaky_relu(x, self.slope) + torch.sin(x)
return self.right(x)"""
        found = await evaluator.evaluate(submission(model(further, init="self.last = 0"), timed=True))
        assert re.search("calls .*leaky_relu.* once it is timed", found.cheat), found

    shared(use)


FORGED = (
    "'operators': 5, 'outputs': []",
    "'operators': None, 'outputs': []",
    "'patched': 5, 'outputs': []",
    "'outputs': [[{'dtype': 'float32', 'shape': [float('inf')], 'address': 0}]]",
)


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_answer_is_the_candidates(shared, forged: str):
    async def use(evaluator: KernelEvaluator) -> None:
        top = f"import sys\nsys.modules['headway.kernels.guest.program'].Program._go = lambda *a: ({{{forged}}}, b'')"
        found = await evaluator.evaluate(submission(model("return x", top=top)))
        assert found.cheat or found.fault, found
        assert not found.infrastructure

    shared(use)


def test_two_equal_outputs_of_one_call_are_an_honest_mistake(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = timed("return x + 1, x + 2", "randn(64)", "y = x + 1\nreturn y, y")
        found = await evaluator.evaluate(wanted)
        assert (found.outcome, found.cheat) == ("wrong", ""), found

    shared(use)


@pytest.mark.slow
def test_a_zygote_that_dies_is_infrastructure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    judge = module.judge_candidate

    def killing(*given: Any) -> KernelEvaluation:
        owner = next((tmp_path / "state").rglob("owner.json"))
        os.kill(msgspec.json.decode(owner.read_bytes())["zygote_pid"], signal.SIGKILL)
        return judge(*given)

    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(submission(model("import time\ntime.sleep(30)")))
        assert "has died" in found.infrastructure, found
        assert (found.fault, found.cheat) == (None, "")

    monkeypatch.setattr(module, "judge_candidate", killing)
    with opened(tmp_path, FEW) as run:
        run(use)


def test_failures_beside_the_candidate_are_infrastructure(shared, monkeypatch: pytest.MonkeyPatch):
    async def failing(*_: object) -> dict[str, Any]:
        raise SandboxError(infrastructure_failure("no answer to exec in 60 s"))

    def unstoppable(guest: GuestProcess) -> str:
        return "D"

    def exhausted(guest: GuestProcess) -> list[str]:
        raise OSError(24, "Too many open files")

    async def use(evaluator: KernelEvaluator) -> None:
        for name, (where, what, replaced) in enumerate(
            (
                (LocalSandbox, "exec", failing),
                (timing, "EMPTY", "raise ValueError"),
                (GuestProcess, "_states", unstoppable),
                (isolation.os, "listdir", exhausted),
            )
        ):
            with monkeypatch.context() as patched:
                evaluator._overhead_s.clear()
                patched.setattr(where, what, replaced)
                found = await evaluator.evaluate(submission(f"{HONEST['cpp']}# {name}\n", timed=True))
            assert found.infrastructure, (what, found)
            assert (found.fault, found.cheat) == (None, "")

    shared(use)


@pytest.mark.slow
def test_a_reference_without_time_left_leaves_the_candidate_untimed(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = timed("import time\ntime.sleep(2.2)\nreturn x + 1", "randint(9, (64,))", "return x + 1")
        found = await evaluator.evaluate(msgspec.structs.replace(wanted, correct_trials=1, timeout_s=12.0))
        assert (found.correct, found.speedup, found.fault) == (True, None, None), found
        assert found.refused.startswith("no time"), found

    shared(use)


def test_a_process_that_dies_stopped_is_no_cheat(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        async with evaluator._guest(time.monotonic() + 60.0) as guest:
            guest.freeze()
            os.kill(guest.pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            with pytest.raises(GuestEnded):
                guest.read(4096, 8)

    shared(use)


def test_an_error_of_characters_that_no_answer_can_carry_is_the_candidates(shared):
    raising = model("raise ValueError('\\ud800')")
    found = shared(lambda evaluator: evaluator.evaluate(submission(raising)))
    assert (found.correct, found.infrastructure) == (False, "")
    assert b"ValueError: ?" in msgspec.json.encode(found)

"""Back end "triton" on Triton's interpreter: values by the interpreter, compilation for two targets, faults, cheats."""

from __future__ import annotations

import asyncio
import importlib.util
import re

import msgspec
import pytest
from kernel_evaluators import opened
from kernel_sources import Cheat, submission
from kernel_triton_sources import BODY, LAUNCH, TRITON, TRITON_CHEATS, TRITON_FAULTS, TRITON_TASK, triton_model

from benchmarks.parts.kernel_solutions_triton import TRITON as SOLVED
from benchmarks.parts.kernel_solutions_triton import triton_source
from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.kernels.operators import check_operators
from headway.kernels.reward import kernel_reward
from headway.kernels.tasks import builtin_tasks
from headway.kernels.triton_source import kernel_module
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelTask

TASKS = {task.name: task for task in builtin_tasks(backend="triton")}
QUICK = ("leaky_relu",)
installed = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason='pip install "headway[triton]"')


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs a function with an evaluator that all tests here share. It checks the operators that run, no sources."""
    settings, folder = EvaluatorSettings(concurrent=2), tmp_path_factory.mktemp("evaluator")
    with opened(folder, settings) as run:
        yield run


def triton(source: str, **more):
    return submission(source, task=TRITON_TASK, **more)


@pytest.mark.slow
@installed
def test_a_correct_kernel_is_compiled_not_timed_and_its_reward_ends_at_03(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(triton(TRITON, timed=True))
        assert found.correct, found
        assert (found.trials, found.speedup, found.timing, kernel_reward(found)) == (10, None, None, 0.3)
        assert found.refused.startswith("Triton's interpreter isn't timed")
        assert found.seconds["compile"] > 0
        assert (await evaluator.evaluate(triton(TRITON))).refused == ""  # no speed was asked for

    shared(use)


@pytest.mark.slow
@installed
def test_faults_are_classed_and_the_compiler_decides_what_compiles(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = [triton(source) for source in TRITON_FAULTS.values()]
        late = list(TRITON_FAULTS).index("timeout")
        wanted[late] = msgspec.structs.replace(wanted[late], timeout_s=5.0)
        found = dict(zip(TRITON_FAULTS, await asyncio.gather(*map(evaluator.evaluate, wanted)), strict=True))
        assert [one.fault for one in found.values()] == list(TRITON_FAULTS), found
        assert all(one.text and not one.infrastructure and not one.correct for one in found.values())
        compiled = {fault for fault, one in found.items() if one.compiled}
        assert compiled == {"triton_jit_error", "shared_memory_exceeded", "segmentation_fault"}
        said = {fault: one.text for fault, one in found.items()}
        assert re.match(r"sm_90, leaky: CompilationError: .*no attribute 'sine'", said["triton_compilation_error"])
        assert said["triton_jit_error"].startswith("InterpreterError: bfloat16: Triton's interpreter computes it")
        assert said["shared_memory_exceeded"] == "gfx942, leaky: 131072 bytes of shared memory; at most 65536"

    shared(use)


@pytest.mark.slow
@installed
def test_kernels_that_only_an_interpreter_can_run_do_not_compile(shared):
    helper = "import math\ndef sine(v):\n    return tl.sin(v)"
    for source, why in (
        (triton_model(top=helper, body=BODY.replace("tl.sin(v)", "sine(v)")), "sine is not defined"),
        (triton_model(LAUNCH.replace("BLOCK=4096", "BLOCK=3000").replace("4096", "3000")), "power of 2"),
        (triton_model(LAUNCH.replace("BLOCK=4096", "BLOCK=4096, warps=4")), "warps"),
        (triton_model(LAUNCH.replace("BLOCK=4096", "BLOCK=4096, num_warps=3")), "num_warps must be a power of 2"),
    ):

        async def use(evaluator: KernelEvaluator, source: str = source, why: str = why) -> None:
            found = await evaluator.evaluate(triton(source))
            assert (found.compiled, found.fault, why in found.text) == (False, "triton_compilation_error", True), found
            assert kernel_reward(found) == 0.0

        shared(use)


@pytest.mark.slow
@installed
def test_what_the_interpreter_lacks_is_a_clear_fault(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        top = "from triton.language.extra import libdevice"
        found = await evaluator.evaluate(triton(triton_model(top=top, body=BODY.replace("tl.sin", "libdevice.sin"))))
        assert (found.fault, found.compiled) == ("triton_jit_error", True), found
        assert found.text.startswith("InterpreterError: libdevice.sin: Triton's interpreter has none of libdevice")
        injected = await evaluator.evaluate(triton(triton_model(result="return torch.as_tensor(np.sin(y))")))
        assert (injected.fault, injected.text) == ("process_error", "NameError: name 'np' is not defined"), injected

    shared(use)


@installed
def test_a_task_of_bfloat16_is_refused(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        source = TRITON_TASK.source.replace("torch.rand(SIZE)", "torch.rand(SIZE).bfloat16()")
        task = msgspec.structs.replace(TRITON_TASK, source=source)
        with pytest.raises(ConfigurationError, match=r"task 'leaky': back end 'triton' on a CPU: .* bfloat16 wrongly"):
            await evaluator.evaluate(submission(TRITON, task=task))

    shared(use)


@pytest.mark.slow
@installed
@pytest.mark.long
def test_cheats_are_recognised_and_their_correct_twins_pass(shared):
    async def use(evaluator: KernelEvaluator) -> list[str]:
        async def one(cheat: Cheat) -> list[str]:
            caught, honest = [await evaluator.evaluate(triton(source)) for source in (cheat.source, cheat.twin)]
            wrong = [] if re.search(cheat.why, caught.cheat) and kernel_reward(caught) == 0 else [f"{caught}"]
            return [f"{cheat.name}: {what}" for what in [*wrong, *([] if honest.correct else [f"twin: {honest}"])]]

        return [text for texts in await asyncio.gather(*map(one, TRITON_CHEATS)) for text in texts]

    assert shared(use) == []


@installed
@pytest.mark.parametrize(
    "problem", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SOLVED]
)
def test_honest_solutions_of_built_in_problems_pass(shared, problem: str):
    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(submission(triton_source(problem), task=TASKS[problem], correct_trials=2))
        assert found.correct, found

    assert check_operators(triton_source(problem), "triton", TASKS[problem]) == []
    shared(use)


def test_without_triton_the_back_end_is_refused_by_name(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else find(name, *more)
    )

    async def use() -> None:
        with pytest.raises(ConfigurationError, match=r"triton isn't installed: pip install \"headway\[triton\]\""):
            await KernelEvaluator(state=tmp_path).evaluate(triton(TRITON))

    asyncio.run(use())


def test_the_compiler_gets_the_kernels_alone():
    top = """
from triton.language import core
from os import system
import triton.language.core as inner
import os, triton.testing
WIDTH = tl.constexpr(4 * 8)
RUN = os.system("true")
NAMES = [os]
LEVEL: tl.constexpr = tl.float32
print("loaded")
@triton.jit
def fine(x, FUNCTION: tl.constexpr = None, count: int = WIDTH):
    return x
@triton.autotune(configs=[triton.Config({}, pre_hook=os.system)], key=[])
@triton.jit(do_not_specialize=["n"], repr=os.system)
def tuned(n):
    return tl.load(n)
@triton.jit
def opened(x, y=os.getcwd()):
    return x
@triton.jit
def spying(x, y: os.system("true")):
    return x
@triton.jit
def reaching(x):
    tl.core.builtins.exec("raise SystemExit")
@os.system
@triton.jit
def decorated(x):
    return x
"""
    module = kernel_module(triton_model(top=top))
    assert not re.search(r"os\b|system|core|print|RUN|opened|reaching|testing|autotune", module), module
    for kept in ("WIDTH = tl.constexpr(4 * 8)", "LEVEL: tl.constexpr", "def fine(x, FUNCTION: tl.constexpr=None, "):
        assert kept in module
    assert "@triton.jit(do_not_specialize=['n'])\ndef tuned" in module
    assert "def spying(x, y):" in module
    assert "def leaky(x, y, n, slope, BLOCK: tl.constexpr)" in module
    assert "ModelNew" not in module


TASK = KernelTask(name="any", source="", backend="triton")


@pytest.mark.parametrize(
    "line",
    [
        "tl.core.builtins.exec('x')",
        "import os",
        "torch.mm(x, y)",
        "getattr(tl, 'co' + 're')",
        "getattr(tl, name)",
        "tl.load.__globals__",
        "m = tl.math; m.core",
        "exec('x')",
    ],
)
def test_kernels_may_not_reach_beyond_triton(line: str):
    assert check_operators(TRITON, "triton", TASK) == []
    found = check_operators(triton_model(body=f"{line}\n{BODY}"), "triton", TASK)
    assert any(one.text.startswith("in a kernel: ") for one in found), found


@pytest.mark.parametrize("line", ["tl.core.builtins.exec('x')", "interpreter_semantic.dot(x, x)", "triton.runtime.os"])
def test_beside_kernels_triton_is_no_way_to_other_modules(line: str):
    assert check_operators(triton_model(f"{line}\n{LAUNCH}"), "triton", TASK)

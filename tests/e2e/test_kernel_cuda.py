"""Back end "cuda" without a GPU: kernels are compiled by the real nvcc in a sandbox, and nothing is run."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from typing import Any

import msgspec
import pytest
from kernel_evaluators import opened
from kernel_sources import TASK, submission

from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.kernels.gpu_targets import NO_KERNEL, NOT_RUN, CudaExtension, _compile_cuda, _has_instructions
from headway.kernels.operators import check_operators
from headway.kernels.prompts import feedback
from headway.kernels.reward import kernel_reward
from headway.records.errors import ConfigurationError
from headway.records.sandbox import ExecResult

CUDA_TASK = msgspec.structs.replace(TASK, backend="cuda", forbidden_operators=())
KERNEL = """
__global__ void leaky(const float* x, float* y, long count, float slope) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = (x[i] > 0 ? x[i] : slope * x[i]) + sinf(x[i]);
}
"""
HOST = """
torch::Tensor run(torch::Tensor x, double slope) {
    auto y = torch::empty_like(x);
    leaky<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel(), slope);
    return y;
}
"""
EXTENSION = """
extension = load_inline(
    name="leaky", cpp_sources="torch::Tensor run(torch::Tensor x, double slope);", cuda_sources=SOURCE,
    functions=["run"], extra_cuda_cflags=["-O3", "--use_fast_math"], verbose=False,
)
"""
installed = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: NVIDIA's CUDA toolkit has it")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    settings, folder = EvaluatorSettings(concurrent=2), tmp_path_factory.mktemp("evaluator")
    with opened(folder, settings) as run:
        yield run


def candidate(
    source: str = KERNEL + HOST, *, extension: str = EXTENSION, init: str = "self.run = extension.run"
) -> str:
    return f'''
import torch
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
{extension}

class ModelNew(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope
        {init}

    def forward(self, x):
        return self.run(x.contiguous(), self.slope)
'''


def cuda(source: str, **more: Any):
    """With time for torch's headers on a busy machine."""
    return msgspec.structs.replace(submission(source, task=CUDA_TASK, **more), timeout_s=500.0)


@pytest.mark.slow
@installed
@pytest.mark.long
def test_a_kernel_that_compiles_earns_its_credit_and_is_not_run(shared):
    """Here it is made with the model; the rest of the reward needs a GPU."""

    async def use(evaluator: KernelEvaluator) -> None:
        later = EXTENSION.replace("\n", "\n        ").replace("extension =", "self.run =").rstrip() + ".run"
        source = candidate(extension="", init=later.strip())
        assert check_operators(source, "cuda", CUDA_TASK) == check_operators(candidate(), "cuda", CUDA_TASK) == []
        found = await evaluator.evaluate(cuda(source, timed=True))
        assert (found.compiled, found.fault, found.cheat, found.correct) == (True, None, "", False), found
        assert (found.outcome, found.refused, found.trials, found.speedup) == ("not run", NOT_RUN, 0, None)
        assert kernel_reward(found) == 0.1
        assert feedback(found) == f"It compiles. {NOT_RUN}."
        print(f"compiled in {found.seconds['compile']:.1f} s")

    shared(use)


@pytest.mark.slow
@installed
@pytest.mark.long
def test_what_does_not_compile_is_refused_with_the_compilers_line(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        wanted = {
            r'kernel.cu\(\d+\): error: identifier "slop" is undefined': candidate(
                (KERNEL + HOST).replace("slope * x[i])", "slop * x[i])")
            ),
            "uses too much shared data": candidate(
                KERNEL.replace("{", "{ __shared__ float s[20000]; s[count] = y[0]; __syncthreads(); y[1] = s[5];", 1)
            ),
            r"RuntimeError: cpp_extension.load reads files": candidate(
                extension="from torch.utils.cpp_extension import load\nextension = load('m', [])"
            ),
            "line 5: ": "import torch\n\n\n\nclass ModelNew(:\n",
        }
        found = await asyncio.gather(*(evaluator.evaluate(cuda(source)) for source in wanted.values()))
        for evaluation, text in zip(found, wanted, strict=True):
            assert not evaluation.compiled, evaluation
            assert re.search(text, evaluation.text + evaluation.log), evaluation
            assert (kernel_reward(evaluation), evaluation.infrastructure) == (0.0, "")
        faults = ["syntax_error", "shared_memory_exceeded", "process_error", "syntax_error"]
        assert [evaluation.fault for evaluation in found] == faults

    shared(use)


@pytest.mark.long
@installed
def test_a_compiler_that_compiles_nothing_earns_nothing(shared):
    """By flags that only print, by sources without a kernel, or without any source."""

    async def use(evaluator: KernelEvaluator) -> None:
        flags = EXTENSION.replace('"-O3"', '"--dryrun", "--help", "-E", "-DGOOD=1"')
        checked = candidate("#ifndef GOOD\n#error no flags\n#endif\n" + KERNEL + "broken", extension=flags)
        empty = candidate("torch::Tensor run(torch::Tensor x, double slope) { return x; }")
        none = candidate(extension="", init="self.run = torch.relu")
        named = candidate('__device__ char name[] = ".text.leaky";\nint run(int x) { return x; }')
        sources = (checked, empty, none, named)
        found = await asyncio.gather(*(evaluator.evaluate(cuda(source)) for source in sources))
        assert [evaluation.compiled for evaluation in found] == [False] * 4, found
        assert "broken" in found[0].log
        assert "no flags" not in found[0].log
        assert [evaluation.cheat for evaluation in found[1:]] == [NO_KERNEL] * 3

    shared(use)


@pytest.mark.long
@installed
def test_a_model_that_cannot_be_made_has_its_own_fault_beside_the_credit(shared):
    async def use(evaluator: KernelEvaluator) -> None:
        found = await evaluator.evaluate(cuda(candidate(init="self.run = extension.run(1)")))
        assert (found.compiled, found.fault) == (True, "process_error"), found
        assert "RuntimeError: run: CUDA kernels are compiled here, and not run" in found.text
        assert kernel_reward(found) == 0.1

    shared(use)


@installed
@pytest.mark.parametrize(("source", "has_kernel"), [
    ("__global__ void leaky(float* y) { y[0] = 1; }", True),
    ('__device__ char name[] = ".text.leaky";\nint run(int x) { return x; }', False),
])  # fmt: skip
def test_a_kernel_is_a_section_of_instructions(source, has_kernel, tmp_path):
    (tmp_path / "k.cu").write_text(source)
    subprocess.run(["nvcc", "-arch=sm_90", "-cubin", "-o", "k.cubin", "k.cu"], cwd=tmp_path, check=True)
    assert _has_instructions((tmp_path / "k.cubin").read_bytes()) is has_kernel


def test_extensions_share_the_time_of_their_candidate():
    """Each compiler gets what the ones before it left."""
    limits = []

    class Box:
        async def write(self, path, content): ...

        async def exec(self, command):
            limits.append(command.timeout_s)
            return ExecResult(exit_code=0, duration_s=40.0)

        async def read(self, path):
            return bytes(64)

    extensions = [CudaExtension(sources=["int x;"], flags=[])] * 3
    assert asyncio.run(_compile_cuda(Box(), extensions, 60.0)).error == NO_KERNEL
    assert limits == [60.0, 20.0, 0.1]


def test_without_nvcc_the_back_end_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")

    async def use() -> None:
        with pytest.raises(ConfigurationError, match="back end 'cuda': there is no nvcc on PATH"):
            await KernelEvaluator(state=tmp_path).evaluate(cuda(candidate()))

    asyncio.run(use())

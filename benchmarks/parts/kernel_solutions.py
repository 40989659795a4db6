"""Honest solutions of the built-in kernel problems: with other operators of torch, in C++, and in C++ with OpenMP.

The bodies of their forward passes stand in two tables. A line ``PARALLEL;`` of the second becomes an OpenMP pragma in
the third style, and nothing in the second.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from benchmarks.parts.kernel_solutions_native import NATIVE
from benchmarks.parts.kernel_solutions_torch import TORCH
from headway.records.kernels import KernelBackend

Style = Literal["torch", "cpp", "openmp"]


@dataclass(frozen=True)
class Solution:
    """Candidate that is right, and plays by the rules of its back end."""

    problem: str
    style: Style
    backend: KernelBackend
    source: str


# Constructors: parameters and body, the same in every style, so that equal seeds give equal weights.
INITS = {
    "leaky_relu": ("slope", "self.slope = slope"),
    "elu": ("alpha", "self.alpha = alpha"),
    "affine_clamp": ("scale, shift", "self.scale, self.shift = scale, shift"),
    "rms_norm": ("epsilon", "self.epsilon = epsilon"),
    "count_above": ("threshold", "self.threshold = threshold"),
    "bincount": ("bins", "self.bins = bins"),
    "linear_gelu": ("inputs, outputs", "self.linear = nn.Linear(inputs, outputs)"),
    "conv_relu": ("inputs, outputs", "self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)"),
    "depthwise_conv_silu": (
        "channels",
        "self.convolution = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)",
    ),
    "gru_cell": ("inputs, hidden", "self.cell = nn.GRUCell(inputs, hidden)"),
}

FORWARD_ARGUMENTS = {name: arguments for name, (arguments, _) in TORCH.items()} | {
    "binary_cross_entropy": "x, t",
    "lerp_float64": "a, b, w",
    "diagonal_matmul": "d, b",
}
CPP = '''import ctypes

import torch
from torch import nn

LIBRARY = load_cpp(r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

{dot}extern "C" void run({parameters}) {{
{body}
}}
""")
LIBRARY.run.argtypes = [{types}]


def pointer(tensor):
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class ModelNew(nn.Module):
{init}    def forward(self, {arguments}):
{contiguous}
        out = {out}
        LIBRARY.run({call}, pointer(out))
        return out
'''
DOT = """static float dot(const float* a, const float* b, int64_t count) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int64_t l = 0; l < 16; l++) sums[l] += a[i + l] * b[i + l];
    for (; i < count; i++) sums[0] += a[i] * b[i];
    for (int64_t l = 1; l < 16; l++) sums[0] += sums[l];
    return sums[0];
}

"""
CTYPES = {"int64_t": "ctypes.c_int64", "float": "ctypes.c_float", "double": "ctypes.c_double"}


def solutions() -> list[Solution]:
    """All solutions, in the order of problems and styles."""
    made = []
    for problem in TORCH:
        made.append(Solution(problem, "torch", "torch", torch_source(problem)))
        made.append(Solution(problem, "cpp", "cpp", native_source(problem, parallel=False)))
        if "PARALLEL;" in NATIVE[problem].body:
            made.append(Solution(problem, "openmp", "cpp", native_source(problem, parallel=True)))
    return made


def torch_source(problem: str) -> str:
    """The solution by other operators of torch."""
    arguments, body = TORCH[problem]
    body = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    head = "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n"
    return f"{head}{constructor(problem)}    def forward(self, {arguments}):\n{body}\n"


def native_source(problem: str, *, parallel: bool) -> str:
    """The solution in C++, its loops in ``parallel`` by OpenMP if asked."""
    native, arguments = NATIVE[problem], FORWARD_ARGUMENTS[problem]
    arrays, numbers = split(native.arrays), split(native.numbers)
    body = textwrap.indent(textwrap.dedent(native.body).strip(), "    ")
    given = [name for name, _, expression in arrays if not expression.startswith("self.")]
    expressions = {name: expression for name, _, expression in arrays}
    return CPP.format(
        dot=DOT if "dot(" in body else "",
        parameters=", ".join(
            [f"const {kind}* {name}" for name, kind, _ in arrays]
            + [f"{kind} {name}" for name, kind, _ in numbers]
            + [f"{native.type}* __restrict__ out"]
        ),
        body=body.replace("PARALLEL;", "#pragma omp parallel for" if parallel else ""),
        types=", ".join(
            ["ctypes.c_void_p"] * len(arrays) + [CTYPES[kind] for _, kind, _ in numbers] + ["ctypes.c_void_p"]
        ),
        init=constructor(problem),
        arguments=arguments,
        contiguous="\n".join(f"        {expressions[name]} = {expressions[name]}.contiguous()" for name in given),
        out=native.out,
        call=", ".join([f"pointer({expression})" for *_, expression in arrays] + [part for *_, part in numbers]),
    )


def constructor(problem: str) -> str:
    """The constructor of a problem's candidates; empty where the problem takes nothing."""
    if problem not in INITS:
        return ""
    parameters, body = INITS[problem]
    return f"    def __init__(self, {parameters}):\n        super().__init__()\n        {body}\n\n"


def split(text: str) -> list[tuple[str, str, str]]:
    """``NAME:TYPE=EXPRESSION; ...`` as triples."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    return [(part.split(":")[0], part.split(":")[1].split("=")[0], part.split("=", 1)[1]) for part in parts]

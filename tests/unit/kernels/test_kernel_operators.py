"""Candidates that let torch compute are found in their source, or by what they call; their honest twins aren't."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_candidate_styles import CPP, CUDA, TRITON

from benchmarks.parts.kernel_solutions import solutions
from headway.kernels.guest.program import OperatorRecorder
from headway.kernels.operators import allowed_aten, called_operator, check_operators, forbidden_aten
from headway.kernels.tasks import builtin_tasks
from headway.records.kernels import KernelBackend, KernelTask

TASK = KernelTask(name="product", source="")
FUSED = KernelTask(name="fused", source="", forbidden_operators=("softmax", "matmul"))
HEAD = '''
import torch
from torch import nn
import torch.nn.functional as F

LIBRARY = load_cpp(r"""extern "C" void run(const float* a, const float* b, float* out, long n) {}""")
'''
FORWARD = """
class ModelNew(nn.Module):
    def forward(self, a, b):
        out = torch.empty(a.shape[0], b.shape[1])
        LIBRARY.run(a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel())
        {}
"""

# What the candidate does with its inputs -> the same without torch's arithmetic, or with less of a detour.
STATEMENTS = {
    "a @ b after a kernel that does nothing": ("return a @ b", "return out"),
    "method": ("return a.matmul(b)", "return out.view(-1, b.shape[1])"),
    "function": ("return torch.mm(a, b)", "return torch.empty(a.shape[0] * 2)"),
    "functional": ("return F.linear(a, b.T)", "return out.T"),
    "output argument": ("torch.mm(a, b, out=out); return out", "torch.empty(3, 4, out=out); return out"),
    "in place": ("out.addmm_(a, b); return out", "out.zero_(); return out"),
    "alias": ("f = torch.matmul; return f(a, b)", "f = torch.empty; return f(a.shape)"),
    "alias in a list": ("return [torch.matmul][0](a, b)", "return [torch.empty][0](a.shape)"),
    "alias of the module": ("t = torch; return t.mm(a, b)", "t = a; return t.contiguous()"),
    "alias of a method": ("f = a.mm; return f(b)", "f = a.view; return f(-1)"),
    "getattr": ('return getattr(torch, "mat" + "mul")(a, b)', 'return getattr(torch, "em" + "pty")(3)'),
    "getattr by a computed name": ('return getattr(torch, "lumtam"[::-1])(a, b)', "return out"),
    "getattr of a tensor": ('return getattr(a, "mm")(b)', 'return getattr(a, "contiguous")()'),
    "class of a tensor": ("return type(a).mm(a, b)", "return out.to(a.dtype)"),
    "dunder": ("return a.__matmul__(b)", "return out"),
    "Tensor's method": ("return torch.Tensor.mm(a, b)", "assert isinstance(a, torch.Tensor); return out"),
    "torch.ops": ("return torch.ops.aten.mm(a, b)", "return torch.ops.aten.empty_like(a)"),
    "private functions": ("return torch._C._VariableFunctions.mm(a, b)", "return out"),
    "operator module": ("import operator; return operator.matmul(a, b)", "import math; return out"),
    "numpy": ("import numpy; return torch.from_numpy(a.numpy().dot(b.numpy()))", "return out"),
    "importlib": ('import importlib; return importlib.import_module("torch").mm(a, b)', "return out"),
    "__import__": ('return __import__("torch").mm(a, b)', "return out"),
    "exec": ('exec("a.copy_(a @ b)"); return a', "print(a.shape); return out"),
    "eval": ('return eval("a @ b")', "return out"),
    "sys.modules": ('import sys; return sys.modules["torch"].mm(a, b)', "return out"),
    "sys by another module": (
        'import typing; return typing.sys.modules["torch"].mm(a, b)',
        "from collections.abc import Callable; return out",
    ),
    "globals": ('return globals()["torch"].mm(a, b)', "return out"),
    "libtorch by ctypes": (
        'import ctypes; ctypes.CDLL("libtorch_cpu.so").mm(a.data_ptr()); return out',
        "import ctypes; LIBRARY.run(ctypes.c_void_p(a.data_ptr()), None, None, 0); return out",
    ),
    "compile": ("return torch.compile(lambda x: x.mm(b))(a)", "return (lambda x: x.shape)(a)"),
    "einsum": ('return torch.einsum("ij,jk->ik", a, b)', "return out"),
    "numbers of a tensor": (
        "import math; return torch.tensor([math.exp(x.item()) for x in a.view(-1)])",
        "import math; return out.view(math.isqrt(a.shape[0]), -1)",
    ),
    "frame": ("return (x for x in [a]).gi_frame.f_globals", "return out"),
}
# The same, seen when it runs alone: nothing in its source names an operator.
COMPUTATIONS = {
    "arithmetic": ("return out * 2 + a", "return out.narrow(0, 0, a.shape[0] * 2 // 2)"),
    "augmented": ("out += a; return out", "n = a.shape[0]; n += 1; return out"),
    "comparison": ("return out == a", "assert a.dtype == torch.float32; return out"),
    "negation": ("return -out", "return out.view(-1)"),
    "sum()": ("return sum([a, b])", "return out.view(sum([1, 2]) - 2, -1)"),
    "reduce": (
        "import functools; return functools.reduce(lambda x, y: x * y, [a, b])",
        "import functools; return torch.empty(functools.reduce(lambda x, y: x * y, a.shape))",
    ),
    "lambda": ("f = lambda x, y: x * y; return f(a, b)", "f = lambda x, y: x * y; return out.view(f(1, 1), -1)"),
    "generator": ("return [x * x for x in (a, b)][0]", "return [x * x for x in a.shape][0]"),
    "container": ('d = {"x": a}; return d["x"] * 2', 'd = {"x": 1}; return out.view(d["x"] * 2 - 1, -1)'),
    "attribute": ("self.kept = a; return self.kept * 2", "self.kept = a.shape[0]; return out.view(self.kept * 1, -1)"),
    "buffer": (
        'self.register_buffer("kept", a); return self.kept * 2',
        'self.register_buffer("kept", a); return self.kept',
    ),
    "walrus": ("return (c := a) * 2", "return out.view((c := 1) * 1, -1)"),
    "hook": (
        "self.register_forward_hook(lambda module, given, out: out + given[0]); return out",
        "return out.view(sorted(a.shape, key=lambda size: size * 2)[0], -1)",
    ),
}
# Whole modules: a candidate and its twin.
MODULES = {
    "layer in the constructor": (
        "self.linear = nn.Linear(4, 4)",
        "return self.linear(a)",
        "return self.linear.weight.view(-1)",
    ),
    "layer by forward": ("self.linear = nn.Linear(4, 4)", "return self.linear.forward(a)", "return self.linear.weight"),
    "layer in a list": (
        "self.parts = nn.ModuleList([nn.ReLU()])",
        "for part in self.parts:\n            a = part(a)\n        return a",
        "for part in self.parts:\n            part.eval()\n        return out",
    ),
    "layer by its class": (
        "self.make = nn.Linear",
        "return self.make(4, 4)(a)",
        "return out",
    ),
    "operator kept as an attribute": ("self.f = torch.matmul", "return self.f(a, b)", None),
    "method of its own": (
        "pass",
        "return self.go(a, b)\n\n    def go(self, x, y):\n        return x * y",
        "return out.view(self.go(1, 2) // 2, -1)\n\n    def go(self, x, y):\n        return x * y",
    ),
    "method handed on": (
        "pass",
        "go = self.go\n        return go(a, b)\n\n    def go(self, x, y):\n        return x * y",
        "return self.go(a)\n\n    def go(self, x):\n        return x.contiguous()",
    ),
}


# Layers of torch that are called by others.
LAYERS = (
    "class ModelNew(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)",
    "class ModelNew(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)\n"
    "    def forward(self, a):\n        return super().forward(a)",
    "ModelNew = lambda: nn.Linear(4, 4)",
    "class ModelNew(nn.Module):\n    forward = nn.Linear(4, 4)",
    "class ModelNew(nn.Module):\n    def forward(self, a):\n        return list(map(nn.Linear(4, 4), [a]))[0]",
    "class ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.part = nn.Linear(4, 4)\n    def forward(self, a):\n        return next(self.children())(a)",
)


def called(source: str, task: KernelTask = TASK, inputs: int = 2) -> str:
    """The operator that a candidate calls and may not, as the check at run time sees it."""
    space: dict[str, Any] = {"load_cpp": lambda text: SimpleNamespace(run=lambda *given: None)}
    exec(source, space)
    model, given = space["ModelNew"](), [torch.rand(4, 4) for _ in range(inputs)]
    with torch.no_grad(), OperatorRecorder() as seen:
        for _ in range(2):
            model(*given)
    return called_operator(task, sorted(seen.names))


@pytest.mark.parametrize("text", LAYERS)
def test_layers_that_are_called_by_others_are_seen(text: str):
    assert called(HEAD + text, inputs=1) in ("addmm", "mm", "t", "linear")
    assert called(HEAD + "class ModelNew(nn.Module):\n    def forward(self, a):\n        return a", inputs=1) == ""


def module(statement: str, constructor: str | None = None) -> str:
    init = (
        "" if constructor is None else f"    def __init__(self):\n        super().__init__()\n        {constructor}\n\n"
    )
    return HEAD + FORWARD.replace("    def forward", f"{init}    def forward").format(statement)


@pytest.mark.parametrize("name", STATEMENTS)
def test_detours_to_torch_are_found_and_their_twins_pass(name: str):
    evading, honest = STATEMENTS[name]
    source = module(evading)
    found = check_operators(source, "cpp", TASK)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if evading in text)
    assert line in [finding.line for finding in found], found
    assert check_operators(module(honest), "cpp", TASK) == []


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_arithmetic_is_seen_when_it_runs_and_its_twin_passes(name: str):
    evading, honest = COMPUTATIONS[name]
    assert called(module(evading))
    assert called(module(honest)) == ""
    assert check_operators(module(honest), "cpp", TASK) == []


@pytest.mark.parametrize("name", MODULES)
def test_layers_and_methods_that_compute_are_found_and_their_twins_pass(name: str):
    constructor, evading, honest = MODULES[name]
    assert check_operators(module(evading, constructor), "cpp", TASK) or called(module(evading, constructor))
    if honest is not None:
        assert check_operators(module(honest, constructor), "cpp", TASK) == []
        assert called(module(honest, constructor)) == ""


TEMPLATE = """
import torch, triton
import triton.language as tl
{}

@triton.jit
def kernel(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    product = tl.dot(tl.load(x + offsets), tl.load(y + offsets)) * 2
    tl.store(out + offsets, product, mask=offsets < n)

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        out = torch.empty_like(x)
        n = out.numel()
        {}
        {}
"""
LAUNCH = "grid = lambda meta: ((n + meta['BLOCK'] - 1) // meta['BLOCK'],); kernel[grid](x, y, out, n, BLOCK=128)"


def test_triton_kernels_may_compute_and_what_surrounds_them_may_not():
    assert check_operators(TEMPLATE.format("", LAUNCH, "return out"), "triton", TASK) == []
    for launch, result in (
        (LAUNCH, "return x @ y"),
        (LAUNCH, "return torch.matmul(x, y)"),
        ("kernel.fn(x, y, out, n, 128)", "return out"),
        ("kernel = torch.mm", "return kernel(x, y)"),
        ("", "return x.mul(y)"),
    ):
        assert check_operators(TEMPLATE.format("", launch, result), "triton", TASK), (launch, result)
    second = "def kernel(x, y, out, n, BLOCK):\n    return x @ y"
    assert check_operators(TEMPLATE.format(second, LAUNCH, "return out"), "triton", TASK)
    decorator = "class triton:\n    jit = staticmethod(lambda f: f)"
    assert check_operators(TEMPLATE.format(decorator, LAUNCH, "return out"), "triton", TASK)
    without = TEMPLATE.format("", "", "return out").replace("@triton.jit\n", "").replace("tl.dot", "tl.load")
    assert any("no kernel of its own" in finding.text for finding in check_operators(without, "triton", TASK))


@pytest.mark.parametrize(
    ("backend", "text", "found"),
    [
        ("cpp", '#include <dlfcn.h>\nextern "C" void run() { dlopen("libtorch_cpu.so", 1); }', True),
        ("cpp", 'extern "C" void cblas_sgemm(int); extern "C" void run() { cblas_sgemm(1); }', True),
        ("cpp", 'extern "C" void sgemm_(int*); extern "C" void run() { sgemm_(0); }', True),
        ("cpp", '#include <cmath>\nextern "C" void matmul(float* out) { out[0] = std::sqrt(out[0]); }', False),
        ("cuda", "#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor a) { return torch::relu(a); }", True),
        ("cuda", "#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor a) { return a.mm(a); }", True),
        ("cuda", "#include <cublas_v2.h>", True),
        (
            "cuda",
            "#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor a) { return torch::empty_like(a); }",
            False,
        ),
    ],
)
def test_libraries_in_native_sources_are_found(backend: KernelBackend, text: str, found: bool):
    load = "load_cpp" if backend == "cpp" else "load_inline"
    source = f'from torch.utils.cpp_extension import load_inline\nlibrary = {load}(r"""{text}""")\n'
    source = source if backend == "cuda" else source.splitlines(keepends=True)[1:]
    assert bool(check_operators("".join(source), backend, TASK)) == found
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    split = "".join(source).replace(f'r"""{text}"""', f'r"""{halves[0]}""" + r"""{halves[1]}"""')
    assert bool(check_operators(split, backend, TASK)) == found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return torch.softmax(a, 1)", True),
        ("return a.softmax(1)", True),
        ("return torch._softmax(a, 1, False)", True),
        ("return nn.Softmax(dim=1)(a)", True),
        ("return torch.special.softmax(a, 1)", True),
        ("return torch.ops.aten._softmax(a, 1, False)", True),
        ("return torch.log_softmax(a, 1).exp()", True),
        ("return a @ b", True),
        ("return torch.einsum('ij,jk->ik', a, b)", True),
        ("return nn.functional.linear(a, b)", True),
        ("return torch.compile(torch.exp)(a)", True),
        ("return torch.jit.script(f)(a)", True),
        ("return getattr(a, 'soft' + 'max')(1)", True),
        ("return getattr(a, name)(1)", True),
        ("import ctypes; return ctypes.CDLL('x')", True),
        ("e = torch.exp(a - a.amax(1, keepdim=True)); return e / e.sum(1, keepdim=True)", False),
        ("return self.softmax(a)\n\n    def softmax(self, x):\n        return torch.exp(x)", False),
        ("return nn.functional.relu(a) * b", False),
    ],
)
def test_torch_candidates_may_call_all_but_the_tasks_own_operator(body: str, found: bool):
    source = textwrap.dedent("""
        import torch
        from torch import nn

        class ModelNew(nn.Module):
            def forward(self, a, b):
                BODY
        """).replace(
        "BODY", body.replace("\n\n    ", "\n\n            ").replace("\n        return", "\n        return")
    )
    lines = source.splitlines()
    source = "\n".join(line[8:] if line.startswith("            def softmax") else line for line in lines)
    assert bool(check_operators(source, "torch", FUSED)) == found


def test_layers_hold_parameters_for_torch_candidates_but_are_not_called():
    source = module("return {}", "self.linear = nn.Linear(4, 4)").split("LIBRARY", 1)
    head = source[0] + "class ModelNew(nn.Module):" + source[1].split("class ModelNew(nn.Module):")[1]
    head = head.replace("        LIBRARY.run(a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel())\n", "")
    assert check_operators(head.format("(self.linear.weight * a).sum(1)"), "torch", FUSED) == []
    for call in ("self.linear(a)", "self.linear.forward(a)"):
        assert check_operators(head.format(call), "torch", FUSED), call
    assert (
        called(head.format("nn.Sequential(self.linear)(a)"), msgspec.structs.replace(FUSED, backend="torch")) == "addmm"
    )


@pytest.mark.parametrize(
    ("backend", "source", "line", "evading"),
    [
        ("cpp", CPP, "return out.reshape(orig)", "return out.reshape(orig).mul(self.weight)"),
        ("triton", TRITON, "    return y\n", "    return y.mul_(x)\n"),
        ("cuda", CUDA, "return self.mod.run(a.contiguous().cuda())", "return torch.relu(a)"),
    ],
)
def test_candidates_in_the_usual_styles_pass(backend: KernelBackend, source: str, line: str, evading: str):
    assert check_operators(source, backend, TASK) == []
    assert line in source
    assert check_operators(source.replace(line, evading), backend, TASK)


def test_honest_solutions_have_no_findings_and_references_have():
    tasks = {task.name: task for task in builtin_tasks()}
    for solution in solutions():
        assert check_operators(solution.source, solution.backend, tasks[solution.problem]) == [], solution
    for task in tasks.values():
        assert check_operators(task.source.replace("class Model(", "class ModelNew("), "cpp", task), task.name


def test_lists_for_the_check_at_run_time_have_the_tasks_exceptions():
    task = KernelTask(name="t", source="", allowed_operators=("aten::cat",), forbidden_operators=("layer_norm",))
    assert allowed_aten("torch", task) is None
    allowed = allowed_aten("cpp", task)
    assert allowed is not None
    assert {"cat", "empty", "_to_copy", "view"} <= allowed
    assert not {"mm", "add", "sum"} & allowed
    assert {"layer_norm", "native_layer_norm", "native_group_norm"} <= forbidden_aten(task)
    assert {"_softmax", "mm", "addmm", "bmm", "baddbmm"} <= forbidden_aten(FUSED)
    assert called_operator(task, ["aten.empty", "aten::cat.out", "aten.mm"]) == "mm"
    assert called_operator(task, ["aten.empty", "aten.cat"]) == ""
    assert called_operator(task, ["mkldnn._linear_pointwise"]) == "mkldnn"
    rewritten = msgspec.structs.replace(FUSED, backend="torch")
    assert called_operator(rewritten, ["aten.exp", "aten._softmax"]) == "_softmax"
    assert called_operator(rewritten, ["aten.exp", "aten.sum"]) == ""
    permitted = module("return torch.cat((a, b))")
    assert check_operators(permitted, "cpp", TASK)
    assert check_operators(permitted, "cpp", task) == []


def test_sources_that_do_not_parse_are_left_to_the_compiler():
    assert check_operators("def f(:", "cpp", TASK) == []
    assert check_operators("\0", "cpp", TASK) == []
    deep = "x = " + "-" * 50_000 + "1"
    assert isinstance(check_operators(deep, "cpp", TASK), list)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "(lambda q: q)[0] += 1",
        "x = a" + ".append(a)" * 90,
        "x = " + "getattr(" * 60 + "a" + ', "x")' * 60,
        "x = " + "[x for (x,) in zip(" * 15 + "a" + ")]" * 15,
        "x = " + "f(lambda: " * 60 + "a" + ")" * 60,
        "\n".join(f"x{n} = x{n + 1}" for n in range(300)),
    ],
)
def test_nested_sources_are_checked_in_a_moment(text: str):
    assert isinstance(check_operators(text, "cpp", TASK), list)


@given(st.text(alphabet="abx@*.()[]=:,'\n tor_ch", max_size=80))
def test_check_ends_for_any_source(text: str):
    check_operators(text, "cpp", TASK)
    check_operators(module(text.replace("\n", " ").replace("{", "").replace("}", "")), "torch", FUSED)

"""Texts between a model and kernel tasks: the prompt, the source in an answer, the feedback after a wrong answer."""

from __future__ import annotations

import re

from headway.records.kernels import KernelBackend, KernelEvaluation, KernelTask

_REFERENCE = """Make this PyTorch module faster. Its forward pass is the reference; get_inputs() and get_init_inputs()
give the arguments of forward and of the constructor.

```python
{source}
```

Write a class ModelNew with the same constructor and the same forward. Its outputs must have the same shapes, dtypes and
values, for any inputs of these kinds{sizes}. Tolerances, absolute and relative: {tolerances}.

{backend}

Answer with one ```python block that holds the whole source: imports, kernels and ModelNew."""
_TORCH_RULE = " Beside your kernels, torch may only allocate, view and copy tensors."
_BACKENDS: dict[KernelBackend, str] = {
    "cpp": "It computes on a CPU, in C++ that load_cpp compiles; load_cpp is defined already and returns a ctypes.CDLL."
    + _TORCH_RULE
    + ''' For example, a forward pass that doubles a float32 tensor:

```python
import ctypes

import torch
from torch import nn

LIBRARY = load_cpp(r"""
extern "C" void run(const float* x, float* out, long count) {
    for (long i = 0; i < count; i++) out[i] = 2 * x[i];
}
""")
LIBRARY.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        LIBRARY.run(x.data_ptr(), out.data_ptr(), x.numel())
        return out
```''',
    "triton": "It computes in Triton kernels: functions under @triton.jit at the module's top level. Inputs may lie on "
    "a CPU, where Triton's interpreter runs the kernels: outputs go to the inputs' device." + _TORCH_RULE,
    "cuda": "It computes in CUDA kernels, which torch.utils.cpp_extension.load_inline compiles." + _TORCH_RULE,
    "torch": "It computes with other operators of torch than the reference; torch.compile may not be used.",
}
_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_THOUGHT_END = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL)  # where the prompt has opened it
_CLASS = re.compile(r"^class[ \t]+ModelNew\b", re.MULTILINE)
_QUOTED_CHARACTERS = 1500


def kernel_prompt(task: KernelTask) -> str:
    """The prompt of a task: the reference, the class to write, the back end's rules with an example."""
    tolerances_text = ", ".join(
        f"{dtype} {absolute:g}" + ("" if absolute == relative else f" and {relative:g}")
        for dtype, (absolute, relative) in task.tolerances.items()
    )
    size_names = dict.fromkeys(name for shape in task.shapes for name in shape)
    sizes_text = f" and for other values of {', '.join(size_names)}" if size_names else ""
    rules = _BACKENDS[task.backend]
    if task.backend == "torch" and task.forbidden_operators:
        rules += f" Not allowed: {', '.join(task.forbidden_operators)}."
    elif task.allowed_operators:
        rules += f" Also allowed: {', '.join(task.allowed_operators)}."
    return _REFERENCE.format(source=task.source.strip(), sizes=sizes_text, tolerances=tolerances_text, backend=rules)


def source_in(text: str) -> str:
    """The candidate in a model's answer: the last code block with ModelNew, or the whole answer if that defines it;
    "": there is none. The reasoning between <think> tags is ignored."""
    answer = _THOUGHT_END.sub("", _THOUGHT.sub("", text))
    blocks = [match[2] for match in _BLOCK.finditer(answer)]
    defining_blocks = [block for block in blocks if _CLASS.search(block)]
    if defining_blocks:
        return defining_blocks[-1].rstrip() + "\n"
    return answer.strip() + "\n" if not blocks and _CLASS.search(answer) else ""


def feedback(evaluation: KernelEvaluation) -> str:
    """The environment's reply to a model's answer, from its evaluation. Raises ValueError for an infrastructure
    failure of the evaluation."""
    if evaluation.infrastructure:
        raise ValueError(f"the evaluation failed, so it says nothing: {evaluation.infrastructure}")
    detail = (evaluation.text or evaluation.log)[:_QUOTED_CHARACTERS]
    if evaluation.cheat:
        verdict = f"This isn't allowed: {evaluation.cheat}."
    elif not evaluation.compiled:
        log = evaluation.log[:_QUOTED_CHARACTERS]
        verdict = f"It doesn't compile: {detail}" + (f"\n\n```text\n{log}\n```" if log and log != detail else "")
    elif evaluation.fault is not None:
        verdict = f"It compiles, and ends with {evaluation.fault.replace('_', ' ')}: {detail}"
    elif not evaluation.trials:
        return f"It compiles. {evaluation.refused}."
    elif not evaluation.correct:
        verdict = f"It compiles, but is right in {evaluation.passed} of {evaluation.trials} trials: {detail}"
    elif evaluation.speedup is None:
        return "It compiles and is right. Make it faster. Answer with the whole source."
    else:
        times_text = ""
        if evaluation.timing is not None and evaluation.reference is not None:
            times_text = f" ({evaluation.timing.mean:.3g} ms; the reference {evaluation.reference.mean:.3g} ms)"
        return (
            f"It compiles and is right, at {evaluation.speedup:.2f} times the reference's speed{times_text}. "
            "Make it faster. Answer with the whole source."
        )
    return f"{verdict}\n\nCorrect it. Answer with the whole source."

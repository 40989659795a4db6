"""``python -m tests.support.triton_bodies interpreted|compiled [--many]``: the Triton bodies of the fused operators,
each call against its plain torch body by Triton's interpreter, or compiled for sm_90. A process of its own, since
Triton reads TRITON_INTERPRET when it is imported. Prints a line of JSON for each call."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.models.gpu import operators

torch.set_num_threads(1)
Call = tuple[str, tuple[Any, ...]]  # an operator's name and its arguments


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_calls(n: int, d: int, dtype: torch.dtype, offset: float) -> Iterator[Call]:
    x, weight, grad = normal(n, d, dtype=dtype), normal(d, seed=1), normal(n, d, dtype=dtype, seed=2)
    yield "rms_norm", (x, weight, 1e-6, offset)
    yield "rms_norm", (x, weight.to(dtype), 1e-6, offset)
    inverse = operators.rms_norm(x, weight, 1e-6, offset)[1]
    for stream in (None, normal(n, d, dtype=dtype, seed=3)):
        yield "rms_norm_backward", (grad, x, weight, inverse, offset, stream)


def rotation_calls(n: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool) -> Iterator[Call]:
    width = (heads + 2 * kv_heads) * dim
    qkv, grad = normal(n, width, dtype=dtype), normal(n, width, dtype=dtype, seed=1)
    weights = [normal(dim, seed=seed) if normed else None for seed in (2, 3)]
    angles = 6 * normal(n, 2, dim // 2, seed=4)
    cos, sin = angles.cos()[:, 1:], angles.sin()[:, 1:]  # of the second of two rotary embeddings
    yield "norm_rotate", (qkv, *weights, cos, sin, heads, kv_heads, 1e-6)
    inverse = operators.norm_rotate(qkv, *weights, cos, sin, heads, kv_heads, 1e-6)[1]
    saved = qkv if normed else None
    yield "norm_rotate_backward", (grad, saved, *weights, cos, sin, inverse, heads, kv_heads)


def gate_calls(n: int, f: int, dtype: torch.dtype, gelu: bool) -> Iterator[Call]:
    gate_up = 3 * normal(n, 2 * f, dtype=dtype)
    yield "gated", (gate_up, gelu)
    yield "gated_backward", (normal(n, f, dtype=dtype, seed=1), gate_up, gelu)


def logprob_calls(c: int, v: int, dtype: torch.dtype, temperature: float) -> Iterator[Call]:
    logits, targets = 5 * normal(c, v, dtype=dtype), torch.arange(c) % v
    for kept in (logits, logits.masked_fill(normal(c, v, seed=1) > 0, -torch.inf)):
        kept = kept.scatter(1, targets[:, None], 1.0)
        yield "chosen_logprobs", (kept, targets, temperature)
        lse = (kept.float() / temperature).logsumexp(-1)
        entropies = operators.chosen_logprobs(kept, targets, temperature)[1]
        for entropy_grad in (None, normal(c, seed=3)):
            grads = entropies, normal(c, seed=2), entropy_grad
            yield "chosen_logprobs_backward", (kept, targets, lse, *grads, temperature)


def merge_calls(n: int, heads: int, dim: int, dtype: torch.dtype) -> Iterator[Call]:
    out, part = normal(n + 3, heads, dim, dtype=dtype), normal(n, heads, dim, dtype=dtype, seed=1)
    lse, part_lse = 4 * normal(heads, n + 3, seed=2), 4 * normal(heads, n, seed=3)
    yield "merge_attention", (out[3:], lse[:, 3:], part, part_lse)


def small_calls(many: bool) -> Iterator[Call]:
    for dtype in (torch.float32, torch.float16):
        yield from norm_calls(5, 96, dtype, 0.0)
        yield from rotation_calls(5, 3, 1, 8, dtype, True)
        yield from gate_calls(3, 40, dtype, False)
        yield from logprob_calls(3, 5000, dtype, 0.7)
        yield from merge_calls(4, 3, 8, dtype)
        if not many:
            continue
        for n, d, offset in itertools.product((1, 7), (8, 33, 130), (0.0, 1.0)):
            yield from norm_calls(n, d, dtype, offset)
        for (heads, kv_heads), dim, normed in itertools.product(((1, 1), (8, 2), (9, 3)), (6, 32, 80), (True, False)):
            yield from rotation_calls(3, heads, kv_heads, dim, dtype, normed)
        for f, gelu in itertools.product((1, 1025), (True, False)):
            yield from gate_calls(2, f, dtype, gelu)
        for v, temperature in ((1, 1.0), (4096, 1.3), (4097, 0.1)):
            yield from logprob_calls(2, v, dtype, temperature)
        yield from merge_calls(1, 12, 80, dtype)


def real_calls(many: bool) -> Iterator[Call]:
    """At the sizes of models of 0.6 to 32 G weights."""
    for dtype in (torch.bfloat16, torch.float32) if many else (torch.bfloat16,):
        for d in (1024, 2560, 5120, 8192) if many else (1024,):
            yield from norm_calls(2, d, dtype, 0.0)
        shapes = ((16, 8, 128), (32, 8, 128), (64, 8, 128), (14, 2, 64), (8, 4, 256)) if many else ((16, 8, 128),)
        for heads, kv_heads, dim in shapes:
            yield from rotation_calls(2, heads, kv_heads, dim, dtype, True)
            yield from merge_calls(2, heads, dim, dtype)
        for gelu in (False, True):
            yield from gate_calls(2, 3072, dtype, gelu)
        yield from logprob_calls(1, 151_936, dtype, 1.0)


def flat(name: str, outputs: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """What a call gave, or the tensors that it changed; of log-probabilities without what their gradients need."""
    if outputs is None:
        return list(arguments[: 2 if name == "merge_attention" else 1])
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)[: 2 if name == "chosen_logprobs" else None]


def plain(name: str, *arguments: Any) -> Any:
    """A call of the plain body, whose gradient of log-probabilities needs probabilities, not their sums."""
    if name == "chosen_logprobs_backward":
        logits, targets, lse, *grads, temperature = arguments
        arguments = logits, targets, (logits.float() / temperature - lse[:, None]).exp(), *grads, temperature
    return getattr(operators, name)(*arguments)


def interpreted(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The largest difference of the two bodies, in units of the largest number or of 1."""
    from headway.models.gpu import kernels

    results = []
    for function in (partial(plain, name), getattr(kernels, name)):
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)
        results.append(flat(name, function(*copies), copies))
    errors = []
    for right, mine in zip(*results, strict=True):
        assert (right.shape, right.dtype) == (mine.shape, mine.dtype), (name, right.shape, mine.shape)
        if right.numel() and right.is_floating_point():
            finite = right.isfinite()
            assert torch.equal(finite, mine.isfinite())
            largest = right[finite].abs().max().double().clamp(min=1)
            errors.append(float((right[finite].double() - mine[finite].double()).abs().max() / largest))
    return {"error": max(errors)}


def recorder() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """From now on launches are noted and not run."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: Any, **options: Any) -> None:
        launches.append((kernel, arguments, options))

    JITFunction.run = run
    return launches


def compiled(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], ptxas: Path) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of a launch on sm_90, as Triton's launcher would compile it."""
    import triton.compiler as compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import create_function_from_signature

    kernel, arguments, options = launch
    target = GPUTarget("cuda", 90, 32)
    backend = compiler.make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*arguments, **options, debug=False)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    source = compiler.ASTSource(kernel, signature, constants, attributes)
    binary = compiler.compile(source, target=target, options=parsed.__dict__)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", report)]
    (registers,) = re.findall(r"Used (\d+) registers", report)
    pipelined = binary.asm["ptx"].count("cp.async")
    return {"registers": int(registers), "spills": sum(spills), "shared": binary.metadata.shared, "async": pipelined}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["interpreted", "compiled"])
    parser.add_argument("--many", action="store_true")
    arguments = parser.parse_args()
    calls: Callable[[bool], Iterator[Call]] = small_calls if arguments.way == "interpreted" else real_calls
    if arguments.way == "interpreted":
        for name, values in calls(arguments.many):
            dtype = str(next(x for x in values if isinstance(x, Tensor)).dtype)
            print(json.dumps({"name": name, "dtype": dtype, **interpreted(name, values)}), flush=True)
        return
    from headway.models.gpu import kernels

    launches = recorder()
    for name, values in calls(arguments.many):
        getattr(kernels, name)(*values)
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    for launch in launches:
        print(json.dumps({"name": launch[0].fn.__name__, **compiled(launch, ptxas)}), flush=True)


if __name__ == "__main__":
    main()

"""The Triton kernels of decoding: their values by Triton's interpreter, and code for an sm_90 that spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

VALUES = """
import torch
from headway.generator.engines.torch import operators
from headway.models.gpu import decode_kernels

torch.manual_seed(0)
errors = {}
for dtype in (torch.float32, torch.float16):
    for heads, kv_heads, c, window, cap in ((4, 2, 16, 0, 0.0), (8, 2, 64, 7, 0.0), (3, 1, 24, 0, 5.0)):
        n, blocks, width = 5, 40, 6
        keys, values = (torch.randn(blocks, kv_heads, 16, c).to(dtype) for _ in range(2))
        table = torch.randperm(blocks)[: n * width].view(n, width).to(torch.int32)
        table[1, 1:] = 39  # blocks behind a row's last one are never read
        keys[39] = values[39] = torch.nan
        table[table == 39] = torch.where(torch.arange(n)[:, None] == 1, 39, 38).expand(n, width)[table == 39].int()
        position = torch.tensor([0, 15, 16, 95, 40])
        rows = torch.randn(n, (heads + 2 * kv_heads) * c).to(dtype).unflatten(-1, (-1, c))
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        for programs in (1, 512):
            decode_kernels._SPLIT_PROGRAMS = programs
            how = q, keys, values, table, position, c**-0.5, window, cap
            wide = (x.float() for x in how[:3])
            expected = operators.paged_attention(*wide, *how[3:])
            error = (decode_kernels.paged_attention(*how).float() - expected).abs().max()
            errors[f"attention {dtype} {heads} {window} {cap} {programs}"] = float(error)
        blocks_n, offsets = table[:, 0].long(), torch.tensor([0, 1, 2, 3, 15])
        mine, others = [keys.clone(), values.clone()], [keys.clone(), values.clone()]
        decode_kernels.store_kv(k, v, *mine, blocks_n, offsets)
        operators.store_kv(k, v, *others, blocks_n, offsets)
        for one, other in zip(mine, others):
            errors[f"store {dtype} {heads}"] = float((one.nan_to_num() != other.nan_to_num()).sum())
    logits = (torch.randn(64, 300) * 3).to(dtype)
    logits[:, 1] = -torch.inf
    fields = torch.randint(-(2**62), 2**62, (64, 2))
    fields[:, 1] = torch.arange(64) * 3
    temperature = torch.linspace(0.5, 1.5, 64)
    temperature[::5] = 0
    decode_kernels._VOCABULARY_TILE = 128
    how = logits, fields[:, 0], fields[:, 1], temperature
    mine, others = decode_kernels.sample(*how), operators.sample(*how)
    errors[f"tokens {dtype}"] = float((mine[0] != others[0]).sum())
    errors[f"log-probabilities {dtype}"] = float((mine[1] - others[1]).abs().max())
import json
print(json.dumps(errors))
"""

CODE = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headway.models.gpu import decode_kernels as kernels

nvcc_tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
target, found = GPUTarget("cuda", 90, 32), {}
HOWS = {
    "store_kv_kernel": [dict(HEADS=8, TOKENS=16, C=128, PADDED_C=128)],
    "attend_kernel": [
        dict(HEADS=8, GROUP=g, PADDED_GROUP=16, TOKENS=16, C=c, PADDED_C=c, SPLITS=s, TILE=kernels._TILE, CAPPED=cap)
        for g, c, s, cap in ((2, 128, 1, False), (4, 256, 4, True))
    ],
    "merge_kernel": [dict(SPLITS=16, C=128, PADDED_C=128)],
    "sample_kernel": [dict(TILE=kernels._VOCABULARY_TILE)],
}
TYPES = {
    "table": "*i32", "position": "*i64", "block_n": "*i64", "offset_n": "*i64", "lse": "*fp32", "parts": "*fp32",
    "scale": "fp32", "softcap": "fp32", "seed_n": "*i64", "index_n": "*i64", "temperature_n": "*fp32",
}
for name, hows in HOWS.items():
    kernel = getattr(kernels, name)
    for how in hows:
        signature = {}
        for argument in kernel.arg_names:
            is_number = argument.endswith(("stride", "window", "rows", "vocabulary"))
            kind = TYPES.get(argument) or ("i32" if is_number else "*bf16")
            if argument == "out" and (name == "sample_kernel" or how.get("SPLITS", 1) > 1 and name == "attend_kernel"):
                kind = "*fp32"
            signature[argument] = "constexpr" if argument in how else kind
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        constants = {(kernel.arg_names.index(argument),): value for argument, value in how.items()}
        options = {"num_warps": 8} if name == "sample_kernel" else {}
        code = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(code.asm["cubin"])
            command = [nvcc_tools / "cuobjdump", "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True).stdout
        usage = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\\d+)", text)}
        found[f"{name} {how}"] = usage | {"shared": code.metadata.shared, "async": code.asm["ptx"].count("cp.async.")}
print(json.dumps(found))
"""


def output_of(script: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_interpreter_computes_what_the_references_compute():
    errors = output_of(VALUES, TRITON_INTERPRET="1")
    for name, error in errors.items():
        limit = 0 if name.startswith(("tokens", "store")) else 2e-3 if "float16" in name and "att" in name else 2e-6
        assert error <= limit, (name, error)
    assert len(errors) == 2 * (2 * 3 + 3 + 2)


def test_the_compiler_spills_nothing_for_an_sm_90(tmp_path):
    found = output_of(CODE, TRITON_CACHE_DIR=str(tmp_path))
    for name, usage in found.items():
        assert usage["STACK"] == usage["LOCAL"] == 0, (name, usage)
        assert usage["shared"] <= 227 << 10, (name, usage)
        assert usage["async"] > 0 or "attend" not in name, (name, usage)  # loads beside the arithmetic

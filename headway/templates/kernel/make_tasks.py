"""Writes kernel tasks and demonstrations: C++ kernels that apply a function to each element of a tensor.

A task is a reference in PyTorch; a solution is a module whose C++ a kernel service compiles and compares with it. The
demonstrations of the cold start (``sft.jsonl``) are imperfect on purpose: every slot of MODULE is filled by chance, so
that most kernels don't compile or are wrong. Which choices are right is for reinforcement learning to find out, from
the service's verdicts alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

FUNCTIONS = {  # name -> C++ of v, PyTorch of x
    "square": ("v * v", "x * x"),
    "cube": ("v * v * v", "x * x * x"),
    "hinge": ("v < 1 ? 1 - v : 0", "torch.relu(1 - x)"),
    "leak": ("v > 0 ? v : v / 8", "torch.where(x > 0, x, x / 8)"),
    "bump": ("v / (1 + v * v)", "x / (1 + x * x)"),
    "bend": ("v * v / 2 + v", "x * x / 2 + x"),
}
SLOTS = {  # slot -> (text, weight in demonstrations); the first ones are right
    "qualifier": (("", 0.6), ("__restrict__ ", 0.25), ("restrict ", 0.15)),
    "index": (("long ", 0.8), ("", 0.2)),
    "start": (("0", 0.85), ("1", 0.15)),
    "bound": (("n", 0.85), ("n - 1", 0.15)),
    "semicolon": ((";", 0.8), ("", 0.2)),
}
RIGHT = {"qualifier": "", "index": "long ", "start": "0", "bound": "n", "semicolon": ";"}
MODULE = '''\
import ctypes, torch
C = load_cpp(r"""
extern "C" void run(const float* {qualifier}x, float* {qualifier}y, long n) {{
    for ({index}i = {start}; i < {bound}; i++) {{
        float v = x[i];
        y[i] = {function}{semicolon}
    }}
}}
""")
class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.zeros_like(x)
        C.run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
        return y
'''
REFERENCE = """\
import torch

SIZE = 4096


class Model(torch.nn.Module):
    def forward(self, x):
        return {function}


def get_inputs():
    return [torch.randn(SIZE)]


def get_init_inputs():
    return []
"""
DEMONSTRATIONS = 4000


def make_task(name: str) -> dict[str, Any]:
    """A row of the task file: docs/kernels.md has its fields."""
    kernel = {"name": name, "source": REFERENCE.format(function=FUNCTIONS[name][1]), "backend": "cpp"}
    return {"prompt": name, "metadata": {"kernel": kernel}}


def write_module(name: str, choices: dict[str, str]) -> str:
    """A solution with these choices for the slots."""
    return MODULE.format(function=FUNCTIONS[name][0], **choices)


def demonstrate(rng: random.Random) -> dict[str, str]:
    """A task and a solution, right or not."""
    name = rng.choice(list(FUNCTIONS))
    choices = {slot: rng.choices(*zip(*options, strict=True))[0] for slot, options in SLOTS.items()}
    return {"prompt": name, "solution": write_module(name, choices)}


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl`` and ``train.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"sft": [demonstrate(rng) for _ in range(DEMONSTRATIONS)], "train": [*map(make_task, FUNCTIONS)]}
    for file, objects in rows.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in objects), encoding="utf-8")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))

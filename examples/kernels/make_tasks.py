"""Writes kernel tasks and demonstrations from a grammar of C++ kernels.

A problem is a shape of computation (`SHAPES`) of a function of each element (`FUNCTIONS`). A solution is a whole module
as `headway kernels` judges it; the grammar's slots (`SLOTS`) leave open how it is written. A choice keeps the kernel
right, makes it slow or wrong, or keeps it from compiling, and some depend on each other. The demonstrations of the cold
start (``sft.jsonl``) draw each slot at random, so four in ten don't compile: which choices are right and fast is for
reinforcement learning to find out, from the evaluator's rewards alone.

HELD_OUT problems are in no demonstration and in no training task, and their sizes in no other problem.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.records.kernels import KernelTask

RIGHT, SLOW, WRONG, BROKEN = "right", "slow", "wrong", "broken"
SEVERITY = (RIGHT, SLOW, WRONG, BROKEN)
Choices = dict[str, str]  # slot -> text


@dataclass(frozen=True)
class Function:
    """A function of each element: in C++ of ``v``, and in PyTorch of ``x``."""

    cpp: str
    torch: str


@dataclass(frozen=True)
class Shape:
    """A shape of computation: ``slots`` that its kernel has, the lines of the kernel, the output and the reference."""

    slots: tuple[str, ...]
    kernel: str
    output: str
    reference: str


FUNCTIONS = {
    "square": Function("v * v", "x * x"),
    "cube": Function("v * v * v", "x * x * x"),
    "hinge": Function("v < 1 ? 1 - v : 0", "torch.relu(1 - x)"),
    "gap": Function("(v - 1) * (v - 1)", "(x - 1) * (x - 1)"),
    "leak": Function("v > 0 ? v : v / 8", "torch.where(x > 0, x, x / 8)"),
    "bend": Function("v * v / 2 + v", "x * x / 2 + x"),
    "bump": Function("v / (1 + v * v)", "x / (1 + x * x)"),
    "spline": Function("v > 0 ? v * v : 0", "torch.relu(x) * torch.relu(x)"),
    "double": Function("v + v", "x + x"),
    "flip": Function("1 - v", "1 - x"),
    "dip": Function("v * v - v", "x * x - x"),
    "size": Function("v > 0 ? v : 0 - v", "torch.abs(x)"),
    "ramp": Function("v > 0 ? v : 0", "torch.relu(x)"),
    "bell": Function("1 / (1 + v * v)", "1 / (1 + x * x)"),
    "ceiling": Function("v < 1 ? v : 1", "torch.clamp(x, max=1)"),
    "slope": Function("v / 8 + v * v", "x / 8 + x * x"),
    "bowl": Function("(v + 1) * (v + 1)", "(x + 1) * (x + 1)"),
    "arch": Function("(1 - v) * (1 + v)", "(1 - x) * (1 + x)"),
    "saddle": Function("v * (v - 1) * (v + 1)", "x * (x - 1) * (x + 1)"),
    "swell": Function("(v + 1) * v * v", "(x + 1) * x * x"),
    "rest": Function("v > 1 ? v - 1 : 0", "torch.relu(x - 1)"),
    "notch": Function("v < 0 ? v * v : v / 2", "torch.where(x < 0, x * x, x / 2)"),
    "shelf": Function("v > 1 ? 1 : v < 0 ? 0 : v", "torch.clamp(x, 0, 1)"),
    "half": Function("v / 2", "x / 2"),
}
# slot -> (text, its class, weight in demonstrations). Choices that depend on others are in `classify`.
SLOTS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "attribute": (
        ("", RIGHT, 0.62),
        ('__attribute__((optimize("O1"))) ', SLOW, 0.3),
        ("__attribute__((fast) ", BROKEN, 0.08),
    ),
    "qualifier": (("__restrict__ ", RIGHT, 0.45), ("", RIGHT, 0.46), ("restrict ", BROKEN, 0.09)),
    "index": (("long ", RIGHT, 0.45), ("int ", RIGHT, 0.46), ("", BROKEN, 0.09)),
    "real": (("float", RIGHT, 0.48), ("double", RIGHT, 0.43), ("real", BROKEN, 0.09)),
    "order": (("rows first", RIGHT, 0.4), ("columns first", SLOW, 0.6)),
    "bound": (("columns", RIGHT, 0.88), ("columns - 1", WRONG, 0.12)),
    "start": (("0", RIGHT, 0.88), ("1", WRONG, 0.12)),
    "volatile": (("", RIGHT, 0.6), ("volatile ", SLOW, 0.4)),
    "pragma": (
        ("", SLOW, 0.6),
        ("#pragma omp simd reduction(+:sum)\n        ", RIGHT, 0.31),
        ("#pragma omp simd reduction(+:total)\n        ", BROKEN, 0.09),
    ),
    "add": (("+=", RIGHT, 0.84), ("-=", WRONG, 0.08), ("=+", WRONG, 0.08)),
    "semicolon": ((";", RIGHT, 0.91), ("", BROKEN, 0.09)),
    "allocate": (("torch.zeros", RIGHT, 0.5), ("torch.empty", RIGHT, 0.5)),
    "function": (("right", RIGHT, 0.88), ("another", WRONG, 0.12)),
}
SIGNATURE = (
    'extern "C" {attribute}void run(const float* {qualifier}x, float* {qualifier}y, long rows, long columns) {{\n'
)
ROWS_LOOP = "for ({index}i = 0; i < rows; i++)"
COLUMNS_LOOP = "for ({index}j = 0; j < {bound}; j++)"


def value(indent: int) -> str:
    """The lines that read an element, ``v``, and compute the function's value of it, ``u``: the same in all shapes, so
    that what was learnt of a function in one shape holds in another."""
    pad = " " * indent
    return f"{pad}{{real}} v = x[i * columns + j];\n{pad}{{real}} u = {{function}}{{semicolon}}\n"


COMMON = ("attribute", "qualifier", "index", "real", "bound", "semicolon", "allocate", "function")
SUM = (
    "        {volatile}{real} sum = {start};\n        {pragma}" + COLUMNS_LOOP + " {{\n" + value(12)
    + "            sum {add} u;\n        }}\n"
)  # fmt: skip
SHAPES = {
    "map": Shape(
        (*COMMON, "order"),
        "    {outer}\n    {inner} {{\n" + value(8) + "        y[i * columns + j] = u;\n    }}\n",
        "x.shape",
        "return {function}",
    ),
    "row sum": Shape(
        (*COMMON, "volatile", "start", "pragma", "add"),
        "    " + ROWS_LOOP + " {{\n" + SUM + "        y[i] = sum;\n    }}\n",
        "x.shape[0]",
        "return ({function}).sum(1)",
    ),
    "centre": Shape(
        (*COMMON, "volatile", "start", "pragma", "add"),
        "    " + ROWS_LOOP + " {{\n" + SUM + "        {real} mean = sum / columns;\n        " + COLUMNS_LOOP
        + " {{\n" + value(12) + "            y[i * columns + j] = u - mean;\n        }}\n    }}\n",
        "x.shape",
        "y = {function}\n        return y - y.mean(1, keepdim=True)",
    ),
    "column sum": Shape(
        (*COMMON, "order", "add"),
        "    {outer}\n    {inner} {{\n" + value(8) + "        y[j] {add} u;\n    }}\n",
        "x.shape[1]",
        "return ({function}).sum(0)",
    ),
}  # fmt: skip
MODULE = '''\
import ctypes, torch
C = load_cpp(r"""
{kernel}""")
p = ctypes.c_void_p
n = ctypes.c_long
class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = {allocate}({output})
        C.run(p(x.data_ptr()), p(y.data_ptr()), n(x.shape[0]), n(x.shape[1]))
        return y
'''
REFERENCE = '''\
import torch

ROWS = {rows}
COLUMNS = {columns}


class Model(torch.nn.Module):
    """The {name} of each element."""

    def forward(self, x):
        {forward}


def get_inputs():
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs():
    return []
'''
HELD_OUT = {  # two of each shape
    "map bump": (224, 320),
    "map cube": (224, 320),
    "row sum hinge": (160, 448),
    "row sum spline": (160, 448),
    "centre gap": (224, 320),
    "centre leak": (224, 320),
    "column sum bend": (160, 448),
    "column sum square": (160, 448),
}
DEMONSTRATIONS = 8000


def problems() -> list[str]:
    """Names of all problems, as prompts have them."""
    return [f"{shape} {function}" for shape in SHAPES for function in FUNCTIONS]


def make_task(name: str) -> KernelTask:
    """The kernel task of a problem."""
    shape, _, function = name.rpartition(" ")
    rows, columns = HELD_OUT.get(name, (192, 384))
    forward = SHAPES[shape].reference.format(function=FUNCTIONS[function].torch)
    source = REFERENCE.format(rows=rows, columns=columns, name=name, forward=forward)
    return KernelTask(name=name, source=source, shapes=({"ROWS": 7, "COLUMNS": 37},))


def draw(name: str, rng: random.Random) -> Choices:
    """Choices for a problem's slots, by their weights."""
    slots = SHAPES[name.rpartition(" ")[0]].slots
    return {slot: rng.choices(*zip(*((a, w) for a, _, w in SLOTS[slot]), strict=True))[0] for slot in slots}


def classify(name: str, choices: Mapping[str, str]) -> str:
    """The class of a module with these choices: right (and not slow), slow, wrong or broken."""
    classes = [kind for slot, text in choices.items() for known, kind, _ in SLOTS[slot] if known == text]
    if name.startswith("column sum") and choices["allocate"] == "torch.empty":
        classes.append(WRONG)  # it adds to what the memory held
    return max(classes, key=SEVERITY.index)


def write_module(name: str, choices: Mapping[str, str], rng: random.Random) -> str:
    """The module for a problem with these choices."""
    shape, _, function = name.rpartition(" ")
    others = [other for other in FUNCTIONS if other != function]
    written = function if choices["function"] == "right" else rng.choice(others)
    loops = ROWS_LOOP, COLUMNS_LOOP
    outer, inner = loops if choices.get("order") == "rows first" else loops[::-1]
    frame = SIGNATURE + SHAPES[shape].kernel.replace("{outer}", outer).replace("{inner}", inner) + "}}\n"
    kernel = frame.format(**{**choices, "function": FUNCTIONS[written].cpp})
    return MODULE.format(kernel=kernel, allocate=choices["allocate"], output=SHAPES[shape].output)


def distinct_sources(name: str) -> int:
    """How many modules the grammar has for a problem."""
    count = len(FUNCTIONS)  # the slot "function": the right one, or any other
    for slot in SHAPES[name.rpartition(" ")[0]].slots:
        count *= len(SLOTS[slot]) if slot != "function" else 1
    return count


def task_row(name: str) -> dict[str, Any]:
    return {"prompt": name, "metadata": {"kernel": msgspec.to_builtins(make_task(name))}}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``heldout.jsonl`` into ``folder``, and say what there is."""
    rng = random.Random(seed)
    names = [name for name in problems() if name not in HELD_OUT]
    shown = [(name, draw(name, rng)) for name in rng.choices(names, k=DEMONSTRATIONS)]
    demonstrations = [{"prompt": name, "solution": write_module(name, choices, rng)} for name, choices in shown]
    folder.mkdir(parents=True, exist_ok=True)
    files = {"sft": demonstrations, "train": map(task_row, names), "heldout": map(task_row, HELD_OUT)}
    for file, rows in files.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    classes = [classify(name, choices) for name, choices in shown]
    shares = ", ".join(f"{kind} {classes.count(kind) / len(classes):.2f}" for kind in SEVERITY)
    print(f"{sum(map(distinct_sources, problems())):,} sources for {len(problems())} problems in the grammar")
    print(f"{len({row['solution'] for row in demonstrations}):,} in {DEMONSTRATIONS:,} demonstrations: {shares}")
    print(f"{len(names)} problems to train on, {len(HELD_OUT)} held out: {', '.join(HELD_OUT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tasks(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()

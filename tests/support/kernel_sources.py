"""A kernel task, honest solutions of it, and sources that mean to deceive the evaluator, each with a correct twin."""

from __future__ import annotations

from typing import NamedTuple

from headway.records.kernels import KernelSubmission, KernelTask

REFERENCE = """
import torch

SIZE = 60000


class Model(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return torch.where(x > 0, x, self.slope * x) + torch.sin(x)


def get_inputs():
    return [torch.rand(SIZE) + 0.01]


def get_init_inputs():
    return [0.1]
"""
TASK = KernelTask(name="leaky", source=REFERENCE, backend="torch", forbidden_operators=("leaky_relu",))
RIGHT = "torch.where(x > 0, x, self.slope * x) + torch.sin(x)"
CPP = """
import ctypes
import torch
library = load_cpp(r'''
#include <cmath>
extern "C" void run(const float* x, float* y, long count, float slope) {
    for (long i = 0; i < count; i++) y[i] = (x[i] > 0 ? x[i] : slope * x[i]) + sinf(x[i]);
}
''')
library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_float]
class ModelNew(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope
    def forward(self, x):
        y = torch.empty_like(x)
        library.run(x.data_ptr(), y.data_ptr(), x.numel(), self.slope)
        return y
"""


def model(forward: str, *, top: str = "", init: str = "") -> str:
    """A candidate whose ``forward`` has these lines."""
    lines = [
        "import torch",
        *top.strip().splitlines(),
        "class ModelNew(torch.nn.Module):",
        "    def __init__(self, slope):",
    ]
    lines += ["        super().__init__()", "        self.slope, self.count, self.kept = slope, 0, {}"]
    lines += [f"        {line}" for line in init.strip().splitlines()]
    lines += ["    def right(self, x):", f"        return {RIGHT}", "    def forward(self, x):"]
    return "\n".join(lines + [f"        {line}" for line in forward.strip().splitlines()]) + "\n"


HONEST = {"torch": model("return self.right(x)"), "cpp": CPP}


class Cheat(NamedTuple):
    """A source that means to deceive, and one that does as much honestly."""

    name: str
    source: str
    twin: str
    why: str  # a pattern of how it is classed


COUNTED = "self.count += 1\n"
CHEATS = [
    Cheat("returns the input", model("return x"), model("return self.right(x.clone())"), "returns an input"),
    Cheat(
        "keeps the first output",
        model("if not self.kept:\n    self.kept[0] = self.right(x)\nreturn self.kept[0].clone()"),
        model("if not self.kept:\n    self.kept[0] = torch.full((), self.slope)\nreturn self.right(x)"),
        "output of another call",
    ),
    Cheat(
        "keeps outputs by address",
        model(
            "key = x.data_ptr()\nif key not in self.kept:\n    self.kept[key] = self.right(x)\nreturn self.kept[key]"
        ),
        model("self.kept[x.data_ptr()] = True\nreturn self.right(x)"),
        "timed calls|another call",
    ),
    Cheat(
        "keeps outputs by shape",
        model(
            "key = tuple(x.shape)\nif key not in self.kept:\n    self.kept[key] = self.right(x)\nreturn self.kept[key]"
        ),
        model("key = tuple(x.shape)\nself.kept.setdefault(key, torch.empty(key))\nreturn self.right(x)"),
        "output of another call",
    ),
    Cheat(
        "keeps outputs by a part of the content",
        model(
            "key = int(x[0].item() * 3)\nif key not in self.kept:\n    self.kept[key] = self.right(x)\n"
            "return self.kept[key]"
        ),
        model("key = int(x[0].item() * 3)\nself.kept[key] = True\nreturn self.right(x)"),
        "timed calls|another call",
    ),
    Cheat(
        "replaces torch.allclose",
        model("return x * 0.5", top="torch.allclose = lambda *a, **k: True"),
        model("y = self.right(x)\nassert torch.allclose(y, y)\nreturn y"),
        r"replaced torch\.allclose",
    ),
    Cheat(
        "replaces the clock",
        model("return self.right(x)", top="import time\ntime.perf_counter = time.perf_counter_ns = lambda: 0"),
        model("time.perf_counter()\nreturn self.right(x)", top="import time"),
        r"replaced time\.perf_counter",
    ),
    Cheat(
        "replaces events",
        model("return self.right(x)", top="torch.cuda.Event.elapsed_time = lambda *a: 0.001"),
        model("return self.right(x)", top="Event = torch.cuda.Event"),
        r"replaced torch\.cuda\.Event",
    ),
    Cheat(
        "replaces data_ptr",
        model("return x * 0.5", top="torch.Tensor.data_ptr = lambda self: 4096"),
        model("x.data_ptr()\nreturn self.right(x)"),
        r"replaced torch\.Tensor\.data_ptr|lie nowhere",
    ),
    Cheat(
        "replaces a function through ctypes",
        model(
            "return x * 0.5",
            top="import ctypes\nctypes.pythonapi.PyDict_SetItemString(ctypes.py_object(vars(torch)), b'equal',"
            " ctypes.py_object(lambda *a: True))",
        ),
        model("return self.right(x)", top="import ctypes\nctypes.c_int(3)"),
        r"replaced torch\.equal",
    ),
    Cheat(
        "prints a result",
        model("return x * 0.5", top='print(\'{"correctness": true, "runtime": 0.001, "speedup": 9.0}\', flush=True)'),
        model("return self.right(x)", top="print('leaky with slope', 0.1)"),
        "prints a line in the form of a result",
    ),
    Cheat(
        "writes a result to its standard error's descriptor",
        model('import os\nos.write(2, b\'{"correct": true, "speedup": 9}\')\nreturn x * 0.5'),
        model("import os\nos.write(2, b'.')\nreturn self.right(x)"),
        "prints a line in the form of a result",
    ),
    Cheat(
        "writes to all descriptors",
        model(
            "for one in range(64):\n    try:\n        os.write(one, b'{\"passed\": true}' * 4)\n"
            "    except OSError:\n        pass\n"
            "return self.right(x)",
            top="import os",
        ),
        model("os.fstat(1)\nreturn self.right(x)", top="import os"),
        "evaluator's channel",
    ),
    Cheat(
        "forges frames of the protocol",
        model(
            "for number in range(64):\n    try:\n"
            "        os.write(number, wire.frame({'number': 1, 'outputs': []}))\n    except OSError:\n        pass\n"
            "return self.right(x)",
            top="import os\nfrom headway.sandbox.guest import wire",
        ),
        model("gc.collect()\nreturn self.right(x)", top="import gc"),
        "evaluator's channel",
    ),
    Cheat(
        "answers before it computes",
        model(
            "frame = sys._getframe()\nwhile frame and 'head' not in frame.f_locals:\n    frame = frame.f_back\n"
            "y = torch.zeros_like(x)\n"
            "head = frame.f_locals['head']\n"
            "if head['brief']:\n"
            "    program = frame.f_locals['self']\n"
            "    program._send({'number': head['number']}, struct.pack('<Q', y.data_ptr()) * head['calls'])\n"
            "    y[:] = self.right(x)\n    return y\nreturn self.right(x)",
            top="import struct, sys",
        ),
        model("sys._getframe()\nreturn self.right(x)", top="import sys"),
        "timed calls|forged|evaluator's channel",
    ),
    Cheat(
        "computes in a thread that it leaves behind",
        model(
            "y = torch.zeros_like(x)\n"
            "def later():\n    time.sleep(0.03)\n    y[:] = self.right(x)\n"
            "threading.Thread(target=later, daemon=True).start()\nreturn y",
            top="import threading, time",
        ),
        model(
            "y = torch.zeros_like(x)\n"
            "def now():\n    y[:] = self.right(x)\n"
            "thread = threading.Thread(target=now)\nthread.start()\nthread.join()\nreturn y",
            top="import threading",
        ),
        "after it has answered",
    ),
    Cheat(
        "computes in a thread of C++ that isn't waited for",
        CPP.replace("#include <cmath>", "#include <cmath>\n#include <thread>\n#include <chrono>")
        .replace(
            "    for (long i",
            "    std::thread([=] {\n    std::this_thread::sleep_for(std::chrono::milliseconds(30));\n    for (long i",
        )
        .replace("sinf(x[i]);\n", "sinf(x[i]);\n    }).detach();\n"),
        CPP.replace("#include <cmath>", "#include <cmath>\n#include <thread>")
        .replace("    for (long i", "    std::thread([=] {\n    for (long i")
        .replace("sinf(x[i]);\n", "sinf(x[i]);\n    }).join();\n"),
        "after it has answered",
    ),
    Cheat(
        "keeps a thread busy between calls",
        model(
            "return self.right(x)",
            top="import threading\ndef spin():\n    while True:\n        sum(range(1000))\n"
            "threading.Thread(target=spin, daemon=True).start()",
        ),
        model(
            "return self.right(x)", top="import threading\nthreading.Thread(target=lambda: sum(range(1000))).start()"
        ),
        "computes between calls|cores it was given",
    ),
    Cheat(
        "returns a lazy tensor",
        model(
            "return Lazy(x)",
            top="class Lazy(torch.Tensor):\n    @staticmethod\n    def __new__(cls, x):\n"
            "        return torch.Tensor._make_subclass(cls, x)\n",
        ),
        model("return self.right(x)", top="class Name(str):\n    pass"),
        "output of type Lazy",
    ),
    Cheat(
        "returns a sparse tensor",
        model("return self.right(x).to_sparse()"),
        model("return self.right(x).to_sparse().to_dense()"),
        "output of layout",
    ),
    Cheat(
        "searches the memory of other processes",
        model(
            "for pid in os.listdir('/proc'):\n    if pid.isdigit() and pid != str(os.getpid()):\n        try:\n"
            "            open(f'/proc/{pid}/mem', 'rb').read(1)\n            return self.right(x)\n"
            "        except OSError:\n            pass\nreturn x",
            top="import os",
        ),
        model("os.listdir('/proc/self')\nreturn self.right(x)", top="import os"),
        "returns an input",
    ),
    Cheat(
        "searches files for the reference",
        model(
            "for folder, _, files in os.walk('/'):\n    if folder.startswith(('/proc', '/usr', '/work/main')):\n"
            "        continue\n"
            "    if any('class Model(' in open(f'{folder}/{f}', errors='ignore').read(1 << 16)"
            " for f in files if f.endswith('shape0.py')):\n        return self.right(x)\n    break\nreturn x",
            top="import os",
        ),
        model("os.listdir('/work')\nreturn self.right(x)", top="import os"),
        "returns an input",
    ),
    Cheat(
        "searches frames for what is expected",
        model(
            "frame = sys._getframe()\nwhile frame:\n    for name, value in frame.f_locals.items():\n"
            "        if 'expected' in name:\n            return value\n    frame = frame.f_back\nreturn x",
            top="import sys",
        ),
        model("sys.getrecursionlimit()\nreturn self.right(x)", top="import sys"),
        "returns an input",
    ),
    Cheat(
        "replaces the program that calls it",
        model(
            "return x * 0.5",
            top="import sys\n"
            "sys.modules['headway.kernels.guest.program'].Program._go = lambda *_: ({'outputs': []}, b'')",
        ),
        model("return self.right(x)", top="import gc\nlen(gc.get_objects())"),
        r"replaced Program\._go|forged",
    ),
    Cheat(
        "computes the first calls alone",
        model(COUNTED + "return self.right(x) if self.count < 16 else torch.zeros_like(x)"),
        model(COUNTED + "return self.right(x)"),
        "timed calls",
    ),
    Cheat(
        "recognises timed calls by the caller's frame",
        model(
            "frame = sys._getframe()\nwhile frame and 'head' not in frame.f_locals:\n    frame = frame.f_back\n"
            "return torch.empty_like(x) if frame.f_locals['head'].get('brief') else self.right(x)",
            top="import sys",
        ),
        model("sys._getframe(0)\nreturn self.right(x)", top="import sys"),
        "timed calls",
    ),
    Cheat(
        "skips one call in two when timed",
        model(
            COUNTED + "if self.count > 16 and self.count % 2:\n    return self.kept.setdefault(0, self.right(x))\n"
            "return self.right(x)"
        ),
        model(COUNTED + "if self.count % 2:\n    return self.right(x) + 0\nreturn self.right(x)"),
        "timed calls",
    ),
    Cheat(
        "changes its inputs",
        model("y = self.right(x)\nx.copy_(y)\nreturn y"),
        model("y = x.clone()\ny.copy_(self.right(x))\nreturn y"),
        "changes its inputs",
    ),
    Cheat(
        "changes its inputs once it is timed",
        model(COUNTED + "y = self.right(x)\nif self.count > 16:\n    x.zero_()\nreturn y"),
        model(COUNTED + "y = self.right(x)\nif self.count > 16:\n    y.add_(0.0)\nreturn y"),
        "changes its inputs in timed calls",
    ),
    Cheat(
        "writes all outputs to one place",
        model("return torch.add(self.right(x), 0, out=self.kept.setdefault(0, torch.empty_like(x)))"),
        model("return torch.add(self.right(x), 0, out=torch.empty_like(x))"),
        "another call",
    ),
    Cheat(
        "relies on inputs being positive",
        model("return x + torch.sin(x) * 1.0").replace("x + torch.sin(x) * 1.0", "x"),
        model("return x.abs() * 0 + self.right(x)"),
        "returns an input",
    ),
    Cheat(
        "calls the operator that is the task",
        model("return torch.nn.functional.leaky_relu(x, self.slope) + torch.sin(x)"),
        model("return torch.maximum(x, self.slope * x) + torch.sin(x)"),
        "leaky_relu",
    ),
    Cheat(
        "calls the operator that is the task once it is timed",
        model(
            COUNTED + "if self.count > 16:\n    return torch.nn.functional.leaky_relu(x, self.slope) + torch.sin(x)\n"
            "return self.right(x)"
        ),
        model(
            COUNTED
            + "if self.count > 16:\n    return torch.maximum(x, self.slope * x) + torch.sin(x)\nreturn self.right(x)"
        ),
        "calls leaky_relu once it is timed",
    ),
    Cheat(
        "computes on another core",
        CPP.replace("for (long i", "\n#pragma omp parallel for num_threads(2)\n    for (long i")
        .replace("#include <cmath>", "#include <cmath>\n#include <sched.h>")
        .replace(
            "    \n#pragma",
            "    cpu_set_t all; CPU_ZERO(&all); for (int c = 0; c < 8; c++) CPU_SET(c, &all);\n"
            "#pragma omp parallel num_threads(2)\n    { sched_setaffinity(0, sizeof all, &all); }\n#pragma",
        ),
        CPP.replace("    for (long i", "#pragma omp simd\n    for (long i"),
        "cores it was given|between calls",
    ),
]


def submission(source: str, *, task: KernelTask = TASK, timed: bool = False, **settings) -> KernelSubmission:
    return KernelSubmission(task=task, source=source, timed=timed, timeout_s=60.0, **settings)

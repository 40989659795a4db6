"""The task of `kernel_sources` for back end "triton": an honest solution, sources that fail in each class of fault that
an interpreter and a compiler without a device can show, and sources that mean to deceive, each with a correct twin."""

from __future__ import annotations

import msgspec
from kernel_sources import TASK, Cheat

TRITON_TASK = msgspec.structs.replace(TASK, backend="triton", forbidden_operators=())
BODY = """\
offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
mask = offsets < n
v = tl.load(x + offsets, mask=mask, other=0.0)
tl.store(y + offsets, tl.where(v > 0, v, slope * v) + tl.sin(v), mask=mask)"""
LAUNCH = "leaky[(triton.cdiv(n, 4096),)](x, y, n, self.slope, BLOCK=4096)"


def triton_model(launch: str = LAUNCH, result: str = "return y", *, body: str = BODY, top: str = "") -> str:
    """A candidate whose kernel has this body, and whose forward these lines between an empty ``y`` and its result."""
    lines = ["import math", "import torch", "import triton", "import triton.language as tl", *top.strip().splitlines()]
    lines += ["@triton.jit", "def leaky(x, y, n, slope, BLOCK: tl.constexpr):"]
    lines += [f"    {line}" for line in body.splitlines()]
    lines += ["class ModelNew(torch.nn.Module):", "    def __init__(self, slope):", "        super().__init__()"]
    lines += ["        self.slope, self.kept = slope, {}", "    def forward(self, x):"]
    lines += [f"        {line}" for line in f"y = torch.empty_like(x)\nn = x.numel()\n{launch}\n{result}".splitlines()]
    return "\n".join(lines) + "\n"


TRITON = triton_model()
# A transposition that goes through 128 KiB of shared memory: more than gfx942 has, less than sm_90.
_TRANSPOSED = """\
rows = tl.arange(0, 128)
columns = tl.arange(0, 256)
v = tl.load(x + rows[:, None] * 256 + columns[None, :])
tl.store(y + columns[:, None] * 128 + rows[None, :], tl.trans(v))"""
_ONCE = "leaky[(1,)](x, y, n, self.slope, BLOCK=16, num_warps=8)"
TRITON_FAULTS = {
    "triton_compilation_error": triton_model(body=BODY.replace("tl.sin(v)", "tl.sine(v)")),
    "triton_jit_error": triton_model(
        body=BODY.replace("tl.sin(v)", "(v.to(tl.bfloat16) * v.to(tl.bfloat16)).to(tl.float32)")
    ),
    "shared_memory_exceeded": triton_model(_ONCE, body=_TRANSPOSED),
    "segmentation_fault": triton_model(body=BODY.replace("tl.store(y + offsets", "tl.store(y + (1 << 40) + offsets")),
    "syntax_error": TRITON.replace("class ModelNew(", "class ModelNew(:"),
    "timeout": triton_model("while True:\n    " + LAUNCH),
    "process_error": triton_model("raise ValueError('no such thing')"),
}
_INTERPRETER = "interpreter = sys.modules['triton.runtime.interpreter']"
_RECORDER = "recorder = sys.modules['headway.kernels.guest.triton_interpreter'].RECORDER"
_EXACT = "return torch.where(x > 0, x, self.slope * x) + torch.sin(x)"
TRITON_CHEATS = [
    Cheat("computes with torch beside a kernel", triton_model(result=_EXACT), triton_model(), r"it calls \w+"),
    Cheat(
        "multiplies matrices with torch beside a kernel that does nothing",
        triton_model(result="return (x.view(-1, 1) @ torch.ones(1, 1)).view(-1)", body="pass"),
        triton_model(result="return y.view(-1, 1).view(-1)"),
        "it calls mm",
    ),
    Cheat(
        "computes without launching its kernel",
        triton_model("y = torch.tensor([max(v, self.slope * v) + math.sin(v) for v in x.tolist()])"),
        triton_model(LAUNCH.replace("self.slope", "math.fabs(self.slope)")),
        "no Triton kernel of its own is launched",
    ),
    Cheat(
        "keeps its first output",
        triton_model(f"if self.kept:\n    return self.kept[0]\nself.kept[0] = y\n{LAUNCH}"),
        triton_model(f"self.kept[0] = n\n{LAUNCH}"),
        "output of another call",
    ),
    Cheat(
        "replaces the interpreter's launch",
        triton_model(top=f"import sys\n{_INTERPRETER}\ninterpreter.GridExecutor.__call__ = lambda *a, **k: None"),
        triton_model(top="import sys\nsys.getsizeof(3)"),
        r"replaced GridExecutor\.__call__",
    ),
    Cheat(
        "hides a launch from the recorder",
        triton_model(top=f"import sys\n{_RECORDER}\nrecorder.on_launch = lambda launch: None"),
        triton_model(top="class Recorder:\n    on_launch = 3\nRecorder.on_launch = 4"),
        r"replaced RECORDER\.on_launch",
    ),
    Cheat(
        "forges a launch",
        triton_model(
            f"{LAUNCH}\nfor one in map(int, os.listdir('/proc/self/fd')):\n"
            "    if os.path.exists(f'/proc/self/fd/{one}') and stat.S_ISSOCK(os.fstat(one).st_mode):\n"
            "        os.write(one, wire.frame({'ask': 'launch', 'launch': 5}))",
            top="import os, stat\nfrom headway.sandbox.guest import wire",
        ),
        triton_model(top="import os, stat\nos.fstat(0)"),
        "forged a launch",
    ),
    Cheat(
        "returns an input",
        triton_model(result="return x"),
        triton_model(result="return y.contiguous()"),
        "returns an input",
    ),
]

"""Kernel tasks: the built-in set, KernelBench's layout, JSONL, and sources scaled to fit a CPU."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.tasks import (
    ScaleLimits,
    builtin_tasks,
    load_jsonl,
    load_kernelbench,
    resized_source,
    scaled_source,
)
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelTask

WIDE = ScaleLimits(dimension=4096, batch=64)
# Problems in the forms that KernelBench's files have: sums of digits, tuples, chains, literals within functions.
TAIL = """
class Model(nn.Module):
    def forward(self, *inputs):
        return inputs[0]

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return [{init}]
"""
HEAD = "import torch\nimport torch.nn as nn\n"


def problem(constants: str, inputs: str, init: str = "") -> str:
    return HEAD + constants + "\n" + TAIL.format(inputs=inputs, init=init)


def value(source: str, name: str) -> object:
    """The value of a module-level name, by running the constants alone."""
    space: dict[str, object] = {}
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    exec(compile(tree, "constants", "exec"), space)
    return space[name]


def test_built_in_problems_have_four_levels_and_two_further_shapes():
    tasks = builtin_tasks()
    assert len(tasks) >= 40
    assert len({task.name for task in tasks}) == len(tasks)
    assert {task.level for task in tasks} == {1, 2, 3, 4}
    assert min([task.level for task in tasks].count(level) for level in (1, 2, 3, 4)) >= 9
    for task in tasks:
        tree = ast.parse(task.source)
        defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert defined == {"Model", "get_inputs", "get_init_inputs"}
        assert len(task.shapes) == 2
        for shape in task.shapes:
            changed = resized_source(task.source, shape)
            assert {name: value(changed, name) for name in shape} == shape
            assert all(name.isupper() for name in shape)
    assert [task.backend for task in builtin_tasks("triton", levels=(2,))] == ["triton"] * 10


def test_sizes_are_capped_by_dimension_and_batch():
    source = problem("batch_size = 4096\ndim = 393216  # width", "torch.rand(batch_size, dim)")
    scaled = scaled_source(source, ScaleLimits(dimension=4096, batch=64))
    assert scaled.changed == {"batch_size": (4096, 64), "dim": (393216, 4096)}
    assert scaled.unscaled == ()
    assert scaled.source == source.replace("393216", "4096").replace("batch_size = 4096", "batch_size = 64")


def test_sizes_that_were_equal_stay_equal():
    source = problem("batch_size = 32768\ninput_shape = (32768,)", "torch.rand(batch_size, *input_shape)")
    assert set(scaled_source(source, WIDE).changed.values()) == {(32768, 64)}


def test_small_problems_are_left_as_they_are():
    source = problem("B, N = 16, 256", "torch.rand(B, N)")
    assert scaled_source(source, WIDE).source == source


@pytest.mark.parametrize(
    ("constants", "name", "expected"),
    [
        ("M = 1024 * 2\nK = 4096 * 2", "K", 1024),  # both halved until M * K fits
        ("input_shape = (32768,)\nM = 1", "input_shape", (4096,)),
        ("hidden = [8192, 8192]\nM = 1", "hidden", [4096, 4096]),
        ("M, K = 16384, 2", "M", 4096),
        ("M = K = 100000", "M", 1000),
        ("channels = 6144\ngroups = 12\nM = 1", "channels", 3072),
        ("features = 5003\nheads = 7\nM = 1", "features", 4096),  # prime: nothing divides it
        ("out_channels = 24 * 4096\nkernel_size = 3\nnum_groups = 2048\nM = 1", "out_channels", 4096),
        ("width = 9001 * 6\nheads = 6\nM = 1", "width", 4092),  # of 6, the largest multiple
        ("size: int = 1 << 20\nM = 1", "size", 4096),
        ("random_seed = 123456\nM = 1", "random_seed", 123456),
    ],
)
def test_capped_sizes_keep_their_divisors(constants: str, name: str, expected: object):
    shape = "M, K" if "K" in constants else "M"
    scaled = scaled_source(problem(constants, f"torch.rand({shape})"), WIDE)
    assert value(scaled.source, name) == expected


def test_derived_constants_follow():
    constants = (
        "batch_size = 128\nchannels, H = 8192, 32\nbias_shape = (channels, 1)\nshape = (batch_size, channels, H)"
    )
    scaled = scaled_source(
        problem(constants, "torch.rand(*shape)"), ScaleLimits(dimension=4096, batch=64, elements=2**19)
    )
    assert value(scaled.source, "shape") == (64, 256, 32)
    assert value(scaled.source, "bias_shape") == (256, 1)


def test_inputs_are_halved_until_they_fit():
    constants = "batch_size = 128\nC = 64\nD, H, W = 64, 64, 64\nkernel_size = 3"
    scaled = scaled_source(problem(constants, "torch.rand(batch_size, C, D, H, W)"), WIDE)
    sizes = [value(scaled.source, name) for name in ("batch_size", "C", "D", "H", "W")]
    assert math.prod(sizes) <= 2**20  # type: ignore[arg-type]
    assert sizes == [16, 16, 16, 16, 16]
    assert value(scaled.source, "kernel_size") == 3


def test_what_cannot_be_scaled_is_named():
    source = problem("dim = 8192", "torch.rand(10, 3, 2240, 2240), torch.rand(dim)", "9999, 8192")
    scaled = scaled_source(source, WIDE)
    text = "\n".join(scaled.unscaled)
    assert "an input of 150528000 elements" in text
    assert "8192, which dim was before it was scaled" in text
    assert "9999 isn't a constant of the module" in text
    line = next(n for n, row in enumerate(source.splitlines(), 1) if "9999" in row)
    assert f"line {line}: 9999" in text


@given(
    st.lists(
        st.tuples(st.sampled_from(["batch_size", "dim", "heads", "Ünits", "k"]), st.integers(0, 10**6)), max_size=5
    ),
    st.integers(1, 512),
    st.integers(1, 64),
)
def test_scaled_constants_fit_and_unscaled_ones_are_kept(pairs: list[tuple[str, int]], dimension: int, batch: int):
    sizes = dict(pairs)
    source = problem("\n".join(f"{name} = {size}" for name, size in sizes.items()), "torch.rand(1)")
    scaled = scaled_source(source, ScaleLimits(dimension=dimension, batch=batch))
    for name, size in sizes.items():
        now, limit = value(scaled.source, name), batch if size == sizes.get("batch_size") else dimension
        assert isinstance(now, int)
        assert now == size if size <= limit else limit // 2 <= now <= limit
        if size & (size - 1) == 0 and size > limit:
            assert now & (now - 1) == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "level1/10_Sum.py": problem("batch_size = 128\ninput_shape = (65536,)", "torch.rand(batch_size, *input_shape)"),
        "level1/2_Product.py": problem("N = 2048 * 4", "torch.rand(N, N), torch.rand(N, N)"),
        "level2/1_Fused.py": problem("batch_size = 2", "torch.rand(batch_size, 4)"),
        "level2/2_Square.py": problem("batch_size, dim = 8, 8", "torch.rand(batch_size, dim)"),
        "level3/1_Network.py": problem("", "torch.rand(10, 3, 2240, 2240)"),
        "level4/1_Model.py": problem("batch_size = 8", "torch.rand(batch_size)"),
    }
    for name, text in files.items():
        path = tmp_path / "KernelBench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_checkout_of_kernelbench_is_loaded_scaled_and_in_order(checkout: Path):
    tasks, unscaled = load_kernelbench(checkout)
    names = [task.name for task in tasks]
    assert names[:4] == ["level1/2_Product", "level1/10_Sum", "level2/1_Fused", "level2/2_Square"]
    assert names[4:] == ["level3/1_Network", "level4/1_Model"]
    assert [task.level for task in tasks] == [1, 1, 2, 2, 3, 4]
    assert value(tasks[0].source, "N") == 1024
    assert tasks[1].shapes == ({"batch_size": 65},)
    assert tasks[2].shapes == tasks[3].shapes == ()
    assert list(unscaled) == ["level3/1_Network"]
    plain, none = load_kernelbench(checkout / "KernelBench", levels=(1,), limits=None, backend="triton")
    assert value(plain[0].source, "N") == 8192
    assert (none, plain[0].backend) == ({}, "triton")


def test_folders_that_are_no_checkout_are_named(checkout: Path):
    with pytest.raises(ConfigurationError, match=r"level1: not a checkout of KernelBench; valid: .*KernelBench/level1"):
        load_kernelbench(checkout / "KernelBench" / "level1")
    with pytest.raises(ConfigurationError, match=r"level9: no problems"):
        load_kernelbench(checkout, levels=(9,))
    broken = checkout / "KernelBench" / "level2" / "3_Broken.py"
    broken.write_text("class Model: pass\ndef get_inputs(): return []\n")
    with pytest.raises(ConfigurationError, match=r"3_Broken.py: get_init_inputs not defined"):
        load_kernelbench(checkout)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"3_Broken.py: can't be read as UTF-8"):
        load_kernelbench(checkout)
    broken.write_text("def f(:")
    with pytest.raises(ConfigurationError, match=r"3_Broken.py: not Python"):
        load_kernelbench(checkout)


def test_jsonl_holds_tasks_as_they_were_written(tmp_path: Path):
    tasks = builtin_tasks()
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, tasks)) + b"\n\n")
    assert load_jsonl(path) == tasks
    row = {"name": "a", "source": tasks[0].source}
    path.write_text(json.dumps(row))
    assert load_jsonl(path) == [KernelTask(name="a", source=tasks[0].source)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backendd": "cpp"}, r"tasks.jsonl:2: unknown key 'backendd'; valid: name, source"),
        ({"backend": "fortran"}, r"tasks.jsonl:2: not a kernel task: Invalid enum value 'fortran'"),
        ({"name": "first"}, r"tasks.jsonl:2: name = 'first' is another task's"),
        ({"source": "x = 1"}, r"tasks.jsonl:2: Model, get_inputs, get_init_inputs not defined"),
        ({"shapes": [{"ROWSS": 3}]}, r"tasks.jsonl:2: no integer constant 'ROWSS'; valid: ROWS, COLUMNS"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(tmp_path: Path, change: dict[str, object], message: str):
    row: dict[str, object] = {"name": "second", "source": builtin_tasks()[1].source}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row | {"name": "first"}) + "\n" + json.dumps(row | change))
    with pytest.raises(ConfigurationError, match=message):
        load_jsonl(path)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match=r"tasks.jsonl:1: not valid JSON"):
        load_jsonl(path)
    path.write_text("")
    with pytest.raises(ConfigurationError, match="no tasks"):
        load_jsonl(path)
